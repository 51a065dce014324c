"""The mesh: this rank's place, and the groups of ranks it talks to.

An `Axis` is one line of ranks through the mesh. Layers are handed the axis they are cut along and know nothing else
about the layout. An axis of size 1 has no transport: its collectives are the identity (decided in `collectives.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from colonnade.mesh.layout import AXES, Layout
from colonnade.mesh.ledger import Ledger
from colonnade.mesh.shared_memory import SharedMemoryTransport, share_memory
from colonnade.mesh.transport import PaperTransport, TorchTransport, Transport

COMBINED = {"model": ("pp", "tp"), "world": AXES}  # products of axes: one copy of the model; all ranks


@dataclass(frozen=True)
class Axis:
    """One line of ranks through the mesh, as one of them sees it."""

    name: str
    size: int = 1
    rank: int = 0
    """This rank's place on the axis, from 0."""
    ranks: tuple[int, ...] = (0,)
    """Global ranks along the axis."""
    transport: Transport | None = None
    """None where size is 1."""


@dataclass(frozen=True)
class Mesh:
    """This rank's axes. `model` joins the ranks that hold one copy of the model (pp × tp), `world` joins all."""

    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    tp: Axis = Axis("tp")
    model: Axis = Axis("model")
    world: Axis = Axis("world")
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.tp.size, pp=self.pp.size, dp=self.dp.size)

    @property
    def coordinates(self) -> str:
        """`[pp1 dp0 tp3]`, with which a rank's log lines start."""
        return f"[pp{self.pp.rank} dp{self.dp.rank} tp{self.tp.rank}]"


def build_mesh(layout: Layout, rank: int) -> Mesh:
    """The mesh of `rank` in a run whose process group has been joined. Every rank must call this (it makes groups)."""

    def carry(name: str, ranks: tuple[int, ...], member: bool, ledger: Ledger) -> Transport | None:
        group = dist.new_group(list(ranks))
        if not member:
            return None
        segment = share_memory(group, ranks.index(rank), len(ranks))
        if segment is None:
            return TorchTransport(name, group, len(ranks), ledger)
        return SharedMemoryTransport(name, group, len(ranks), ledger, segment)

    return _assemble(layout, rank, carry)


def paper_mesh(layout: Layout, rank: int) -> Mesh:
    """The mesh of any rank of any layout, in one process: collectives write the ledger and move nothing."""

    def carry(name: str, ranks: tuple[int, ...], member: bool, ledger: Ledger) -> Transport | None:
        return PaperTransport(name, len(ranks), ledger) if member else None

    return _assemble(layout, rank, carry)


def _assemble(
    layout: Layout, rank: int, carry: Callable[[str, tuple[int, ...], bool, Ledger], Transport | None]
) -> Mesh:
    ledger = Ledger()
    axes = {}
    for name, along in {**{name: (name,) for name in AXES}, **COMBINED}.items():
        for ranks in layout.groups(*along):
            member = rank in ranks
            transport = carry(name, ranks, member, ledger) if len(ranks) > 1 else None
            if member:
                axes[name] = Axis(name, len(ranks), ranks.index(rank), ranks, transport)
    return Mesh(**axes, ledger=ledger)
