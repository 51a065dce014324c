"""Collectives between ranks of one machine through memory that they share: what makes a laptop's CPU ranks quick.

gloo carries a tensor through sockets: 3.0 ms for the 1.5 MB of a small model's all-reduce, 68 ms for 77 MB, between
two ranks on two cores. Here it is 0.6 ms and 26 ms (benchmarks/collectives.py, results of 2026-11-21): every rank
writes its part into a slot that all can read, says so by raising a counter, waits for the others' counters, and adds
up what it reads. One copy and one sum, no kernel in between.

    segment    [ written, read: a cache line a rank each | half 0: a slot a rank | half 1: a slot a rank | signature ]

Beside its counter a rank says what it has written to each half: how many bytes, of which type, for which operation.
Where ranks say different things they are not at the same operation, and all of them raise.

Chunks of a tensor use the two halves in turn. A rank writes a half again when all have read it, and has read it itself:
so what it has shown it may take later, and compute meanwhile. Up to two chunks wait like that, the others' too, and
nobody stands still because another is a little behind.

x86 only: it makes stores visible in their order, and Python has no memory fence to ask others for one. Elsewhere, and
between machines, gloo carries everything.
"""

import mmap
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.mesh.ledger import Ledger, Site
from colonnade.mesh.process import ProcessId, has_ended, mine
from colonnade.mesh.transport import Groups, Pending, TorchTransport

SLOT_BYTES = 1 << 22
HALVES = 2
_LINE = 8  # 64-bit words in a cache line
_EAGER = 50  # polls before the core is offered to others
_PATIENT = 20_000  # polls before the core is left for half a millisecond at a time
_offer_core = getattr(os, "sched_yield", partial(time.sleep, 0.0))
_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
_KINDS = list(product(("all_gather", "reduce_scatter", *(f"all_reduce {op}" for op in _COMBINE)), _DTYPES))
"""Operations, each on tensors of each type; on all ranks alike."""
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_SHIFT = 32  # bits of a word that say how many bytes are shown; those above say of which kind
Use = Callable[[list[Tensor]], object]
"""What is done with every rank's chunk, flat, in the order of ranks."""


class _Shown(NamedTuple):
    """A chunk that this rank has shown, and has not taken the others' of yet."""

    number: int
    num_bytes: int
    dtype: torch.dtype
    use: Use
    word: int
    """What it is, in a word."""


class Segment:
    """Memory that the ranks of one axis share: two counters and two slots each.

    A chunk is shown (`make_room`, `show`) and later taken (`take`), by all ranks in the same order.
    """

    def __init__(self, memory: mmap.mmap, rank: int, processes: Sequence[ProcessId], timeout: float) -> None:
        """`processes`: the processes of the axis. Waiting for one of them longer than `timeout` seconds fails."""
        size = len(processes)
        self.rank, self.size, self.processes, self.timeout = rank, size, processes, timeout
        words = memoryview(memory).cast("q")
        self._written, self._read = words[: size * _LINE], words[size * _LINE : 2 * size * _LINE]
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_header(size), count=HALVES * size * SLOT_BYTES)
        self._halves = [list(half) for half in slots.view(HALVES, size, SLOT_BYTES)]
        """A slot for each rank."""
        self._count = 0
        self._waiting = deque[_Shown]()

    def make_room(self) -> None:
        """Return when the half of the next chunk has been read by all: what lay there is taken first."""
        before = self._count + 1 - HALVES
        self.take(before)
        self._wait(self._read, before)

    def show(self, chunk: Tensor, use: Use, operation: str) -> int:
        """Show a copy of `chunk` (at most SLOT_BYTES), where there is room: the number by which it is taken.
        `operation`: of `_KINDS`.
        """
        self._count += 1
        count = chunk.numel() * chunk.element_size()
        self._slots_of(self._count)[self.rank][:count].view(chunk.dtype).view(chunk.shape).copy_(chunk)
        word = _NUMBERS[operation, chunk.dtype] << _SHIFT | count
        self._waiting.append(_Shown(self._count, count, chunk.dtype, use, word))
        self._written[self.rank * _LINE + 1 + self._count % HALVES] = word
        self._written[self.rank * _LINE] = self._count
        return self._count

    def take(self, number: int) -> None:
        """Use what all have shown, up to a chunk's number; waits for those that have not yet."""
        while self._waiting and self._waiting[0].number <= number:
            shown = self._waiting[0]
            self._wait(self._written, shown.number)
            self._check_kinds(shown)
            shown.use([slot[: shown.num_bytes].view(shown.dtype) for slot in self._slots_of(shown.number)])
            self._waiting.popleft()
            self._read[self.rank * _LINE] = shown.number

    def _check_kinds(self, shown: _Shown) -> None:
        words = self._written[1 + shown.number % HALVES :: _LINE].tolist()
        if words.count(shown.word) < self.size:
            raise RuntimeError(
                f"the ranks of an axis exchange {', '.join(map(_told, words))} at once: they are not at the same "
                "operation. Every rank does the same ones in a step, in the same order, with as many micro-batches"
            )

    def _slots_of(self, number: int) -> list[Tensor]:
        return self._halves[number % HALVES]

    def _wait(self, counters: memoryview, count: int) -> None:
        """Until every rank has raised its counter: polling at first, giving the core away after that."""
        for rank in range(self.size):
            polls, left, before = 0, self.timeout, 0.0
            while counters[rank * _LINE] < count:
                polls += 1
                if polls <= _EAGER:
                    continue
                if polls < _PATIENT:
                    _offer_core()
                else:
                    time.sleep(0.0005)
                if polls % 2000 == 0:
                    now = time.monotonic()
                    left -= min(now - (before or now), 5.0)  # while this process is suspended, time does not count
                    before = now
                    gone = has_ended(self.processes[rank]) and counters[rank * _LINE] < count
                    self._check(rank, gone=gone, late=left < 0)

    def _check(self, rank: int, *, gone: bool, late: bool) -> None:
        if gone:
            raise ConnectionError(f"rank {rank} of the axis has ended")
        if late:
            raise TimeoutError(f"rank {rank} of the axis has not come in {self.timeout:.0f} s")


def _told(word: int) -> str:
    (operation, dtype), count = _KINDS[word >> _SHIFT], word & (1 << _SHIFT) - 1
    return f"{count} bytes of {str(dtype).removeprefix('torch.')} ({operation})"


class _Exchange(NamedTuple):
    """What a `Pending` waits for."""

    segment: Segment
    number: int

    def wait(self) -> None:
        self.segment.take(self.number)


class SharedMemoryTransport(TorchTransport):
    """Carries CPU tensors through a `Segment`, and the rest as `TorchTransport` does.

    A call returns when this rank has shown its tensor; of one that fills more than the two halves all but the last two
    chunks are done by then. `wait()` does the rest. All sums are in the order of ranks, so every rank, and a
    reduce-scatter, has the bits of the all-reduce. Of 16-bit numbers the sum is rounded once, at its end.
    """

    def __init__(self, axis: str, groups: Groups, size: int, ledger: Ledger, segment: Segment) -> None:
        super().__init__(axis, groups, size, ledger)
        self.segment = segment

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        if not x.is_cpu:
            return super().all_reduce_(x, op, site)
        assert op in _COMBINE, f"{op} is no reduction"
        moves = ((chunk, partial(_combine_, chunk, op=op)) for chunk in _chunks(x))
        return self._start(f"all_reduce {op}", x, site, moves)

    def all_gather_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        if not x.is_cpu:
            return super().all_gather_into_(out, x, site)
        columns = torch.split(out.view(self.size, -1), SLOT_BYTES // x.element_size(), 1)
        moves = ((chunk, partial(_set_rows_, rows)) for chunk, rows in zip(_chunks(x), columns, strict=True))
        return self._start("all_gather", x, site, moves)

    def reduce_scatter_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        """Every rank shows all of its x, and sums its own part of everybody's."""
        if not x.is_cpu:
            return super().reduce_scatter_into_(out, x, site)
        columns = max(1, SLOT_BYTES // x.element_size() // self.size)
        chunks, totals = torch.split(x.view(self.size, -1), columns, 1), torch.split(out.view(-1), columns)
        moves = ((chunk, partial(self._sum_mine_, total)) for chunk, total in zip(chunks, totals, strict=True))
        return self._start("reduce_scatter", x, site, moves)

    def _sum_mine_(self, total: Tensor, parts: list[Tensor]) -> None:
        _combine_(total, [part.view(self.size, -1)[self.segment.rank] for part in parts], op="sum")

    def _start(self, operation: str, x: Tensor, site: Site, moves: Iterable[tuple[Tensor, Use]]) -> Pending:
        """Show one chunk after the other; what is not taken on the way is when the result is waited for."""
        entry, number = self.ledger.open(operation.partition(" ")[0], self.axis, x, site), 0
        for chunk, use in moves:
            self.ledger.wait(entry, self.segment.make_room)
            with self.ledger.part(f"{self.axis} moves"):
                number = self.segment.show(chunk, use, operation)
        return Pending(_Exchange(self.segment, number), self.ledger, entry)


def _set_rows_(rows: Tensor, parts: list[Tensor]) -> None:
    for row, part in zip(rows, parts, strict=True):
        row.copy_(part)


def _combine_(out: Tensor, parts: list[Tensor], *, op: str) -> None:
    """Overwrite `out` with the reduction of at least two parts, in their order."""
    combine = _COMBINE[op]
    first, second, *others = parts
    if not others or out.element_size() != 2 or op != "sum":
        combine(first, second, out=out)
        for other in others:
            combine(out, other, out=out)
        return
    total = first.float()
    for other in parts[1:]:
        total += other
    out.copy_(total)


def share_memory(group: dist.ProcessGroup, rank: int, size: int, timeout: float) -> Segment | None:
    """A segment for the ranks of `group`, or None on all of them if they cannot share memory. Every rank calls this."""
    offer: list[tuple[str, bytes] | None] = [None]
    made = _make(size) if rank == 0 else None
    if made is not None:
        offer = [(f"/proc/{os.getpid()}/fd/{made}", _sign(made))]
    dist.broadcast_object_list(offer, group=group, group_src=0)
    memory = _map(*offer[0], size) if offer[0] is not None else None
    processes: list[ProcessId | None] = [None] * size
    dist.all_gather_object(processes, None if memory is None else mine(), group=group)
    if made is not None:
        os.close(made)  # nameless: it lives as long as somebody has it mapped, and no longer
    reached = [process for process in processes if process is not None]
    return Segment(memory, rank, reached, timeout) if memory is not None and len(reached) == size else None


def is_possible() -> bool:
    """Whether ranks of this machine can share memory: Linux on x86."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def _header(size: int) -> int:
    return 2 * size * _LINE * 8


def _num_bytes(size: int) -> int:
    return _header(size) + HALVES * size * SLOT_BYTES + _LINE * 8  # a line for the signature at the end


def _make(size: int) -> int | None:
    """A file in memory, without a name; its descriptor."""
    if not is_possible():
        return None
    try:
        descriptor = os.memfd_create("colonnade")
        os.ftruncate(descriptor, _num_bytes(size))
    except OSError:
        return None
    return descriptor


def _sign(descriptor: int) -> bytes:
    """Write a random signature at the end: on another machine the same path may be another file."""
    signature = os.urandom(16)
    os.pwrite(descriptor, signature, os.fstat(descriptor).st_size - len(signature))
    return signature


def _map(path: str, signature: bytes, size: int) -> mmap.mmap | None:
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), _num_bytes(size))
    except (OSError, ValueError):  # another machine, a container of its own, or a smaller file of that number
        return None
    return memory if memory[-len(signature) :] == signature else None


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x.view(-1), SLOT_BYTES // x.element_size())
