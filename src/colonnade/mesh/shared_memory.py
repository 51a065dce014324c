"""Collectives between ranks of one machine through memory that they share: what makes a laptop's CPU ranks quick.

gloo carries a tensor through sockets: 3.0 ms for the 1.5 MB of a small model's all-reduce, 68 ms for 77 MB, between
two ranks on two cores. Here it is 0.6 ms and 26 ms (benchmarks/collectives.py, results of 2026-11-21): every rank
writes its part into a slot that all can read, says so by raising its counter, waits for the others' counters, and adds
up what it reads. One copy and one sum, no kernel in between.

    segment    [ counters, a cache line a rank | half 0: a slot a rank | half 1: a slot a rank | signature ]

Chunks of a tensor use the two halves in turn, so that one wait per chunk is enough: a rank writes a half again only
when all have raised their counters for the chunk between, which they do after they have read the half.

x86 only: it makes stores visible in their order, and Python has no memory fence to ask others for one. Elsewhere, and
between machines, gloo carries everything.
"""

import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.mesh.ledger import Ledger, Site
from colonnade.mesh.process import ProcessId, has_ended, mine
from colonnade.mesh.transport import Groups, Pending, TorchTransport

SLOT_BYTES = 1 << 22
_LINE = 8  # 64-bit words in a cache line
_EAGER = 50  # polls before the core is offered to others
_PATIENT = 20_000  # polls before the core is left for half a millisecond at a time
_offer_core = getattr(os, "sched_yield", partial(time.sleep, 0.0))
_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Segment:
    """Memory that the ranks of one axis share: a counter and two slots each."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: Sequence[ProcessId], timeout: float) -> None:
        """`processes`: the processes of the axis. Waiting for one of them longer than `timeout` seconds fails."""
        size = len(processes)
        self.rank, self.size, self.processes, self.timeout = rank, size, processes, timeout
        words = memoryview(memory).cast("q")
        self._counters = words[: size * _LINE]
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_header(size), count=2 * size * SLOT_BYTES)
        self._slots = slots.view(2, size, SLOT_BYTES)
        self._count = 0

    def exchange(self, chunk: Tensor) -> list[Tensor]:
        """Every rank's `chunk` (at most SLOT_BYTES), flat, in the order of ranks; valid until the next but one call."""
        half = self._slots[self._count % 2]
        count = chunk.numel() * chunk.element_size()
        half[self.rank, :count].view(chunk.dtype).view(chunk.shape).copy_(chunk)
        self._count += 1
        self._counters[self.rank * _LINE] = self._count
        self._wait()
        return [half[rank, :count].view(chunk.dtype) for rank in range(self.size)]

    def _wait(self) -> None:
        """Until every rank has raised its counter: polling at first, giving the core away after that."""
        counters, count = self._counters, self._count
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
                    self._check(rank, left)

    def _check(self, rank: int, left: float) -> None:
        if has_ended(self.processes[rank]) and self._counters[rank * _LINE] < self._count:
            raise ConnectionError(f"rank {rank} of the axis has ended")
        if left < 0:
            raise TimeoutError(f"rank {rank} of the axis has not come in {self.timeout:.0f} s")


class SharedMemoryTransport(TorchTransport):
    """Carries CPU tensors through a `Segment`, and the rest as `TorchTransport` does. Results are there at once.

    All sums are in the order of ranks, so every rank, and a reduce-scatter, has the bits of the all-reduce. Of 16-bit
    numbers the sum is rounded once, at its end.
    """

    def __init__(self, axis: str, groups: Groups, size: int, ledger: Ledger, segment: Segment) -> None:
        super().__init__(axis, groups, size, ledger)
        self.segment = segment

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        if not x.is_cpu:
            return super().all_reduce_(x, op, site)
        assert op in _COMBINE, f"{op} is no reduction"
        return self._do("all_reduce", x, site, lambda: self._all_reduce_(x, op))

    def all_gather_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        if not x.is_cpu:
            return super().all_gather_into_(out, x, site)
        return self._do("all_gather", x, site, lambda: self._all_gather_into_(out, x))

    def reduce_scatter_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        if not x.is_cpu:
            return super().reduce_scatter_into_(out, x, site)
        return self._do("reduce_scatter", x, site, lambda: self._reduce_scatter_into_(out, x))

    def _do(self, operation: str, x: Tensor, site: Site, move: Callable[[], None]) -> Pending:
        entry = self.ledger.open(operation, self.axis, x, site)
        self.ledger.wait(entry, move)
        self.ledger.close(entry)
        return Pending(None)

    def _all_reduce_(self, x: Tensor, op: str) -> None:
        for chunk in _chunks(x):
            _combine_(chunk, self.segment.exchange(chunk), op)

    def _all_gather_into_(self, out: Tensor, x: Tensor) -> None:
        rows, at = out.view(self.size, -1), 0
        for chunk in _chunks(x):
            for row, theirs in zip(rows, self.segment.exchange(chunk), strict=True):
                row[at : at + len(chunk)] = theirs
            at += len(chunk)

    def _reduce_scatter_into_(self, out: Tensor, x: Tensor) -> None:
        """Every rank shows all of its x, and sums its own part of everybody's."""
        columns = max(1, SLOT_BYTES // x.element_size() // self.size)
        rows = x.view(self.size, -1)
        for chunk, total in zip(torch.split(rows, columns, 1), torch.split(out.view(-1), columns), strict=True):
            parts = self.segment.exchange(chunk)
            _combine_(total, [part.view(self.size, -1)[self.segment.rank] for part in parts], "sum")


def _combine_(out: Tensor, parts: list[Tensor], op: str) -> None:
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
    return size * _LINE * 8


def _num_bytes(size: int) -> int:
    return _header(size) + 2 * size * SLOT_BYTES + _LINE * 8  # a line for the signature at the end


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
