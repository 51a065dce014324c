"""Collectives between ranks of one machine through memory that they share: what makes a laptop's CPU ranks quick.

gloo carries a tensor through sockets: 3.0 ms for the 1.5 MB of a small model's all-reduce, 68 ms for 77 MB, between
two ranks on two cores. Here it is 0.6 ms and 26 ms (benchmarks/collectives.py, results of 2026-11-21): every rank
writes its part into a slot that all can read, says so by raising its counter, waits for the others' counters, and adds
up what it reads. One copy and one sum, no kernel in between.

    segment    [ counters, a cache line a rank | half 0: a slot a rank | half 1: a slot a rank | signature ]

Pieces of a tensor use the two halves in turn, so that one wait a piece is enough: a rank writes a half again only
when all have raised their counters for the piece between, which they do after they have read the half.

x86 only: it makes stores visible in their order, and Python has no memory fence to ask others for one. Elsewhere, and
between machines, gloo carries everything.
"""

import mmap
import os
import platform
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.mesh.ledger import Ledger, Site
from colonnade.mesh.transport import Pending, TorchTransport

SLOT_BYTES = 1 << 22
_LINE = 8  # 64-bit words in a cache line
_PATIENCE = 1800.0  # seconds; as long as gloo waits
_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Segment:
    """Memory that the ranks of one axis share: a counter and two slots each."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        words = memoryview(memory).cast("q")
        self._counters = words[: size * _LINE]
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_header(size), count=2 * size * SLOT_BYTES)
        self._slots = slots.view(2, size, SLOT_BYTES)
        self._count = 0

    def exchange(self, piece: Tensor) -> list[Tensor]:
        """Every rank's `piece` (contiguous, at most SLOT_BYTES), in the order of ranks; valid until the next but one
        call.
        """
        half = self._slots[self._count % 2]
        count = piece.numel() * piece.element_size()
        half[self.rank, :count].copy_(piece.view(-1).view(torch.uint8))
        self._count += 1
        self._counters[self.rank * _LINE] = self._count
        self._wait()
        return [half[rank, :count].view(piece.dtype) for rank in range(self.size)]

    def _wait(self) -> None:
        """Until every rank has raised its counter: polling at first, giving the core away after that."""
        counters, count = self._counters, self._count
        for rank in range(self.size):
            polls, deadline = 0, time.monotonic() + _PATIENCE
            while counters[rank * _LINE] < count:
                polls += 1
                if polls > 2000:
                    time.sleep(0.0 if polls < 20000 else 0.0005)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"rank {rank} of the axis has not come in {_PATIENCE:.0f} s")


class SharedMemoryTransport(TorchTransport):
    """Carries CPU tensors through a `Segment`, and the rest as `TorchTransport` does. Results are there at once."""

    def __init__(self, axis: str, group: dist.ProcessGroup, size: int, ledger: Ledger, segment: Segment) -> None:
        super().__init__(axis, group, size, ledger)
        self.segment = segment

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        if not x.is_cpu:
            return super().all_reduce_(x, op, site)
        combine = _COMBINE[op]
        entry = self.ledger.open("all_reduce", self.axis, x, site)
        for piece in _pieces(x):
            first, second, *others = self.segment.exchange(piece)
            combine(first, second, out=piece)  # the same order of summands on every rank: the same bits
            for other in others:
                combine(piece, other, out=piece)
        self.ledger.close(entry)
        return Pending(None)

    def all_gather(self, x: Tensor, site: Site) -> Tensor:
        if not x.is_cpu:
            return super().all_gather(x, site)
        entry = self.ledger.open("all_gather", self.axis, x, site)
        out = x.new_empty((self.size, x.numel()))
        at = 0
        for piece in _pieces(x):
            for row, theirs in zip(out, self.segment.exchange(piece), strict=True):
                row[at : at + len(piece)] = theirs
            at += len(piece)
        self.ledger.close(entry)
        return out.view(self.size * x.shape[0], *x.shape[1:])


def share_memory(group: dist.ProcessGroup, rank: int, size: int) -> Segment | None:
    """A segment for the ranks of `group`, or None on all of them if they cannot share memory. Every rank calls this."""
    offer: list[tuple[str, bytes] | None] = [None]
    made = _make(size) if rank == 0 else None
    if made is not None:
        offer = [(f"/proc/{os.getpid()}/fd/{made}", _sign(made))]
    dist.broadcast_object_list(offer, group=group, group_src=0)
    memory = _map(*offer[0], size) if offer[0] is not None else None
    reached: list[bool] = [False] * size
    dist.all_gather_object(reached, memory is not None, group=group)
    if made is not None:
        os.close(made)  # nameless: it lives as long as somebody has it mapped, and no longer
    return Segment(memory, rank, size) if memory is not None and all(reached) else None


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


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x.view(-1), SLOT_BYTES // x.element_size())
