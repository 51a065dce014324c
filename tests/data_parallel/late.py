"""A transport whose results come as late as they may: when they are waited for, not a moment before.

It stands for the slowest possible network. Until `wait`, what will arrive is NaN, and what is being sent must neither
change nor lose its memory: whoever reads early gets NaN, whoever writes or frees early is caught. Otherwise it is the
paper transport: one process, which sees its own numbers come from every rank.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Ledger, Site
from colonnade.mesh.mesh import Axis, Mesh, paper_mesh
from colonnade.mesh.transport import PaperTransport, Pending


class Late:
    """Work that is done when it is waited for."""

    def __init__(self, under_way: list["Late"], finish: Callable[[], None]) -> None:
        self.under_way, self.finish = under_way, finish
        under_way.append(self)

    def wait(self) -> None:
        self.under_way.remove(self)
        self.finish()


class LateTransport(PaperTransport):
    """Collectives of one axis, by the rules above."""

    def __init__(self, axis: str, size: int, rank: int, ledger: Ledger) -> None:
        super().__init__(axis, size, ledger)
        self.rank, self.under_way = rank, list[Late]()

    def _later(self, finish: Callable[[], None]) -> Pending:
        return Pending(Late(self.under_way, finish))

    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        self._note("all_reduce", x, site)
        result = x * self.size if op == "sum" else x.clone()
        return self._later(partial(_arrive, x, _hidden(x), result))

    def all_gather_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        self._note("all_gather", x, site)
        result = torch.cat([x] * self.size)
        return self._later(partial(_arrive, out, _hidden(out), result))

    def reduce_scatter_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        self._note("reduce_scatter", x, site)
        result, sent = x.chunk(self.size)[self.rank] * self.size, x.clone()
        inside = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        hidden = None if inside else _hidden(out)

        def finish() -> None:
            assert x.untyped_storage().size() > 0, "what is being summed was freed"
            assert torch.equal(x, sent), "what is being summed was written to"
            _arrive(out, hidden, result)

        return self._later(finish)


class PunctualTransport(LateTransport):
    """The same numbers, there at once."""

    def _later(self, finish: Callable[[], None]) -> Pending:
        finish()
        return Pending(None)


def _hidden(out: Tensor) -> Tensor:
    """Fill what will arrive with NaN; returns how it looks meanwhile."""
    out.fill_(float("nan"))
    return out.clone()


def _arrive(out: Tensor, meanwhile: Tensor | None, result: Tensor) -> None:
    assert out.untyped_storage().size() > 0, "what arrives has no memory"
    assert meanwhile is None or torch.equal(out.nan_to_num(7.0), meanwhile.nan_to_num(7.0)), "it was written to"
    out.copy_(result)


def late_mesh(layout: Layout, rank: int, kind: type[LateTransport] = LateTransport) -> tuple[Mesh, LateTransport]:
    """A rank's mesh on paper whose dp axis is late, and that axis' transport."""
    mesh = paper_mesh(layout, rank)
    transport = kind("dp", mesh.dp.size, mesh.dp.rank, mesh.ledger)
    dp = Axis("dp", mesh.dp.size, mesh.dp.rank, mesh.dp.ranks, transport)
    return replace(mesh, dp=dp), transport
