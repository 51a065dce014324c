"""What carries a collective: torch's process groups, or paper.

Both write the same ledger. `PaperTransport` moves nothing: one process can walk through the program of any rank of any
layout and see what it would send (shapes, bytes, order), as the planner and the audit do.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.mesh.ledger import Entry, Flight, Ledger, Site

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renames both and warns of the old names; 2.11 has the old ones only
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective or transfer under way: `wait()` before touching its tensors."""

    def __init__(
        self,
        work: Any,
        ledger: Ledger | None = None,
        entry: Entry | None = None,
        flight: Flight | None = None,
        mark: Callable[[], Any] = lambda: None,
    ) -> None:
        """`mark`: records an event on the current stream, for the `flight`."""
        self._work, self._ledger, self._entry, self._flight, self._mark = work, ledger, entry, flight, mark

    def wait(self) -> None:
        """Block until the result is there (on CUDA: until the current stream may use it). Once is enough."""
        work, self._work = self._work, None
        if work is None:
            return
        if self._ledger is None or self._entry is None:
            work.wait()
            return
        stalls = None if self._flight is None else self._ledger.stalls
        began = None if stalls is None else self._mark()
        self._ledger.wait(self._entry, work.wait)
        if self._flight is not None:
            self._flight.done = self._mark()
            if stalls is not None:
                stalls.append((began, self._flight.done))
        self._ledger.close(self._entry)


class Transport(Protocol):
    """Collectives over the ranks of one axis, and transfers between two of them. Tensors are contiguous."""

    ledger: Ledger

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending: ...
    def all_gather_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending: ...
    def reduce_scatter_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending: ...
    def broadcast_(self, x: Tensor, source: int, site: Site) -> None: ...
    def send(self, x: Tensor, to: int, site: Site) -> Pending: ...
    def receive_(self, x: Tensor, source: int, site: Site) -> Pending: ...


@dataclass(frozen=True)
class Groups:
    """The process groups of one axis. Where transfers need no groups of their own, all three are one."""

    collective: dist.ProcessGroup
    upward: dist.ProcessGroup
    """CUDA transfers to higher ranks."""
    downward: dist.ProcessGroup
    """CUDA transfers to lower ranks."""
    is_scalar: bool = False
    """They carry a few numbers, over gloo even where there is NCCL."""


def warm_up_p2p(groups: Groups, rank: int, size: int, device: torch.device) -> None:
    """Send a word both ways between all neighbours of an axis, the last and the first among them.

    NCCL makes the connection of a pair at its first transfer, and both ranks stand still until both are there. Here
    all do it in one order; in the middle of a schedule two pairs could wait for each other.
    """
    word = torch.zeros(1, device=device)
    for low, high in sorted({(at, at + 1) for at in range(size - 1)} | {(0, size - 1)}):
        for group, source, to in ((groups.upward, low, high), (groups.downward, high, low)):
            if rank == source:
                dist.send(word, group=group, group_dst=to)
            elif rank == to:
                dist.recv(word, group=group, group_src=source)


def _record_event(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


class TorchTransport:
    """Collectives of `torch.distributed` over one process group (gloo for CPU tensors, NCCL for CUDA).

    gloo and NCCL round 16-bit sums at every addition. A sum over few ranks loses little; sum long chains in fp32.
    """

    def __init__(self, axis: str, groups: Groups, size: int, ledger: Ledger) -> None:
        self.axis, self.groups, self.group, self.size, self.ledger = axis, groups, groups.collective, size, ledger

    def _run(self, operation: str, x: Tensor, site: Site, start: Callable[[], Any], peer: int | None = None) -> Pending:
        entry = self.ledger.open(operation, self.axis, x, site, peer)
        mark = partial(_record_event, x.device)
        flight = None if x.is_cpu else Flight(entry, mark())
        work = self.ledger.wait(entry, start)  # the first on a group of NCCL waits for the others
        if flight is not None:
            flight.work = weakref.ref(work)
            self.ledger.flying.append(flight)
        return Pending(work, self.ledger, entry, flight, mark)

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        reduction = REDUCTIONS[op]
        return self._run("all_reduce", x, site, lambda: dist.all_reduce(x, reduction, self.group, async_op=True))

    def all_gather_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        return self._run("all_gather", x, site, lambda: _all_gather_single(out, x, self.group, async_op=True))

    def reduce_scatter_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        return self._run(
            "reduce_scatter", x, site, lambda: _reduce_scatter_single(out, x, group=self.group, async_op=True)
        )

    def broadcast_(self, x: Tensor, source: int, site: Site) -> None:
        self._run(
            "broadcast", x, site, lambda: dist.broadcast(x, group=self.group, group_src=source, async_op=True)
        ).wait()

    def send(self, x: Tensor, to: int, site: Site) -> Pending:
        group = self._between(x, self.group.rank(), to)
        return self._run("send", x, site, lambda: dist.isend(x, group=group, group_dst=to), to)

    def receive_(self, x: Tensor, source: int, site: Site) -> Pending:
        group = self._between(x, source, self.group.rank())
        return self._run("receive", x, site, lambda: dist.irecv(x, group=group, group_src=source), source)

    def _between(self, x: Tensor, source: int, to: int) -> dist.ProcessGroup:
        if x.is_cpu:
            return self.groups.collective
        return self.groups.upward if to > source else self.groups.downward


class ScalarTransport(TorchTransport):
    """For the groups that sum a few numbers a step: over gloo, and by way of the host for those of a CUDA device.

    NCCL would keep buffers of its own on the device for every such group.
    """

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        host = x.cpu()  # waits for the device; whoever asks needs the sum before it can go on
        super().all_reduce_(host, op, site).wait()
        x.copy_(host)
        return Pending(None)


class PaperTransport:
    """Writes the ledger and moves nothing: results have the right shape and this rank's own numbers."""

    def __init__(self, axis: str, size: int, ledger: Ledger) -> None:
        self.axis, self.size, self.ledger = axis, size, ledger

    def _note(self, operation: str, x: Tensor, site: Site, peer: int | None = None) -> Pending:
        self.ledger.close(self.ledger.open(operation, self.axis, x, site, peer))
        return Pending(None)

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        assert op in REDUCTIONS, f"{op} is no reduction"
        return self._note("all_reduce", x, site)

    def all_gather_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        out.view(self.size, -1).copy_(x.clone().view(1, -1))
        return self._note("all_gather", x, site)

    def reduce_scatter_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        out.copy_(x.chunk(self.size)[0])
        return self._note("reduce_scatter", x, site)

    def broadcast_(self, x: Tensor, source: int, site: Site) -> None:
        self._note("broadcast", x, site)

    def send(self, x: Tensor, to: int, site: Site) -> Pending:
        return self._note("send", x, site, to)

    def receive_(self, x: Tensor, source: int, site: Site) -> Pending:
        return self._note("receive", x, site, source)
