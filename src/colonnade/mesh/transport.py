"""What carries a collective: torch's process groups, or paper.

Both write the same ledger. `PaperTransport` moves nothing: one process can walk through the program of any rank of any
layout and see what it would send (shapes, bytes, order), as the planner and the audit do.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.mesh.ledger import Entry, Ledger, Site

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending:
    """A collective under way: `wait()` before touching its tensor."""

    def __init__(self, work: Any, ledger: Ledger | None = None, entry: Entry | None = None) -> None:
        self._work, self._ledger, self._entry = work, ledger, entry

    def wait(self) -> None:
        """Block until the result is there (on CUDA: until the current stream may use it)."""
        if self._work is not None:
            self._work.wait()
        if self._ledger is not None and self._entry is not None:
            self._ledger.close(self._entry)


class Transport(Protocol):
    """Collectives over the ranks of one axis. Tensors are contiguous; all but `all_reduce_` return new tensors."""

    ledger: Ledger

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending: ...
    def all_gather(self, x: Tensor, site: Site) -> Tensor: ...
    def reduce_scatter(self, x: Tensor, site: Site) -> Tensor: ...
    def broadcast_(self, x: Tensor, source: int, site: Site) -> None: ...


class TorchTransport:
    """Collectives of `torch.distributed` over one process group (gloo for CPU tensors, NCCL for CUDA)."""

    def __init__(self, axis: str, group: dist.ProcessGroup, size: int, ledger: Ledger) -> None:
        self.axis, self.group, self.size, self.ledger = axis, group, size, ledger

    def _run(self, operation: str, x: Tensor, site: Site, start: Callable[[], Any]) -> Pending:
        entry = self.ledger.open(operation, self.axis, x, site)
        return Pending(start(), self.ledger, entry)

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        reduction = REDUCTIONS[op]
        return self._run("all_reduce", x, site, lambda: dist.all_reduce(x, reduction, self.group, async_op=True))

    def all_gather(self, x: Tensor, site: Site) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._run("all_gather", x, site, lambda: dist.all_gather(parts, x, self.group, async_op=True)).wait()
        return torch.cat(parts)

    def reduce_scatter(self, x: Tensor, site: Site) -> Tensor:
        parts = list(x.chunk(self.size))
        mine = torch.empty_like(parts[0])
        self._run(
            "reduce_scatter", x, site, lambda: dist.reduce_scatter(mine, parts, group=self.group, async_op=True)
        ).wait()
        return mine

    def broadcast_(self, x: Tensor, source: int, site: Site) -> None:
        self._run(
            "broadcast", x, site, lambda: dist.broadcast(x, group=self.group, group_src=source, async_op=True)
        ).wait()


class PaperTransport:
    """Writes the ledger and moves nothing: results have the right shape and this rank's own numbers."""

    def __init__(self, axis: str, size: int, ledger: Ledger) -> None:
        self.axis, self.size, self.ledger = axis, size, ledger

    def _note(self, operation: str, x: Tensor, site: Site) -> None:
        self.ledger.close(self.ledger.open(operation, self.axis, x, site))

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        assert op in REDUCTIONS, f"{op} is no reduction"
        self._note("all_reduce", x, site)
        return Pending(None)

    def all_gather(self, x: Tensor, site: Site) -> Tensor:
        self._note("all_gather", x, site)
        return torch.cat([x] * self.size)

    def reduce_scatter(self, x: Tensor, site: Site) -> Tensor:
        self._note("reduce_scatter", x, site)
        return x.chunk(self.size)[0].contiguous()

    def broadcast_(self, x: Tensor, source: int, site: Site) -> None:
        self._note("broadcast", x, site)
