"""The mesh: this rank's place, and the groups of ranks it talks to.

An `Axis` is one line of ranks through the mesh. Layers are handed the axis they are cut along and know nothing else
about the layout. An axis of size 1 has no transport: its collectives are the identity (decided in `collectives.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from colonnade.mesh.layout import AXES, Layout
from colonnade.mesh.ledger import Ledger
from colonnade.mesh.shared_memory import Segment, SharedMemoryTransport, share_memory
from colonnade.mesh.transport import (
    Groups,
    PaperTransport,
    ScalarTransport,
    TorchTransport,
    Transport,
    warm_up_p2p,
)

COMBINED = {"model": ("pp", "tp"), "stage": ("dp", "tp"), "world": AXES}  # products of axes
TIMEOUT = 1800.0  # seconds
LONGEST = 1e9  # seconds; gloo counts nanoseconds in 64 bits
Carry = Callable[[str, tuple[int, ...], bool, Ledger], Transport | None]
OnPaper = Callable[[str, tuple[int, ...], Ledger], Transport]
Make = Callable[[str, Sequence[tuple[int, ...]]], "Axis"]


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
    """This rank's axes, and those combined from them."""

    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    tp: Axis = Axis("tp")
    model: Axis = Axis("model")
    """pp × tp: the ranks that hold one copy of the model."""
    stage: Axis = Axis("stage")
    """dp × tp: the ranks that hold the same layers."""
    world: Axis = Axis("world")
    """All ranks."""
    ends: Axis = Axis("ends")
    """The first and the last stage with equal dp and tp, who share a tied embedding; a stage between them is alone.
    Other stages that share weights: `holders`."""
    ledger: Ledger = field(default_factory=Ledger)
    make: Make = field(default=lambda name, groups: Axis(name), repr=False, compare=False)
    """This rank's axis of a name, given the ranks split into groups: every rank makes it."""
    axes: dict[str, Axis] = field(default_factory=dict, repr=False, compare=False)
    """All that were made, by the names that the ledger has."""

    def holders(self, stages: Sequence[int]) -> Axis:
        """Those pipeline stages with equal dp and tp, who share weights; a stage that is not among them is alone.

        Every rank must call this for the same stages in the same order (it makes groups, once for each).
        """
        name = self.layout.axis_of(stages)
        return self.axes.get(name) or self.make(name, self.layout.holders(stages))

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def data(self) -> Axis:
        """Who reads which samples: ranks along it have different ones."""
        return self.dp

    @property
    def reduce(self) -> Axis:
        """Over whom gradients, losses and their counts are summed: ranks along it have seen different tokens."""
        return self.dp

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.tp.size, pp=self.pp.size, dp=self.dp.size)

    @property
    def coordinates(self) -> str:
        """`[pp1 dp0 tp3]`, with which a rank's log lines start."""
        return self.layout.written(self.rank)


def build_mesh(layout: Layout, rank: int, *, timeout: float = TIMEOUT) -> Mesh:
    """The mesh of `rank` in a run whose process group has been joined. Every rank must call this (it makes groups).

    An operation that takes longer than `timeout` seconds fails.
    """
    made: dict[tuple[int, ...], tuple[Groups, Segment | None] | None] = {}

    def carry(name: str, ranks: tuple[int, ...], member: bool, ledger: Ledger) -> Transport | None:
        if ranks not in made:  # axes of the same ranks share groups: all ranks ask for them in the same order
            made[ranks] = _join(name, ranks, rank, timeout)
        joined = made[ranks]
        if joined is None:
            return None
        groups, segment = joined
        if segment is None:
            kind = ScalarTransport if groups.is_scalar else TorchTransport
            return kind(name, groups, len(ranks), ledger)
        return SharedMemoryTransport(name, groups, len(ranks), ledger, segment)

    return _assemble(layout, rank, carry)


def _join(name: str, ranks: tuple[int, ...], rank: int, timeout: float) -> tuple[Groups, Segment | None] | None:
    """The groups of these ranks and the memory that they share; None on ranks that are not among them.

    Over combined axes only numbers are summed: their groups need no NCCL.
    """
    limit = timedelta(seconds=timeout)
    scalar, directed = name in COMBINED and _has_nccl(), name == "pp" and _has_nccl()
    own = dist.new_group(list(ranks), timeout=limit, backend="gloo" if scalar else None)
    up, down = (dist.new_group(list(ranks), timeout=limit, backend="nccl") if directed else own for _ in range(2))
    if rank not in ranks:
        return None
    groups = Groups(own, up, down, is_scalar=scalar)
    if scalar:
        return groups, None
    if directed:
        warm_up_p2p(groups, ranks.index(rank), len(ranks), torch.device("cuda"))
    return groups, share_memory(own, ranks.index(rank), len(ranks), timeout)


def _has_nccl() -> bool:
    return "nccl" in dist.get_backend_config()


def _on_paper(name: str, ranks: tuple[int, ...], ledger: Ledger) -> Transport:
    return PaperTransport(name, len(ranks), ledger)


def paper_mesh(layout: Layout, rank: int, make: OnPaper = _on_paper) -> Mesh:
    """The mesh of any rank of any layout, in one process: collectives write the ledger and move nothing. `make`: what
    carries them in the place of a `PaperTransport`, given axis, ranks and ledger.
    """

    def carry(name: str, ranks: tuple[int, ...], member: bool, ledger: Ledger) -> Transport | None:
        return make(name, ranks, ledger) if member else None

    return _assemble(layout, rank, carry)


def _assemble(layout: Layout, rank: int, carry: Carry) -> Mesh:
    ledger, every = Ledger(), dict[str, Axis]()

    def make(name: str, groups: Sequence[tuple[int, ...]]) -> Axis:
        made = [(ranks, carry(name, ranks, rank in ranks, ledger) if len(ranks) > 1 else None) for ranks in groups]
        ((ranks, transport),) = [each for each in made if rank in each[0]]
        every[name] = Axis(name, len(ranks), ranks.index(rank), ranks, transport)
        return every[name]

    axes = {name: make(name, groups) for name, groups in _groups(layout).items()}
    return Mesh(**axes, ledger=ledger, make=make, axes=every)


def _groups(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
    """The ranks split into groups, by axis, in the order in which all ranks make them."""
    single = {name: layout.groups(name) for name in AXES}
    combined = {name: layout.groups(*along) for name, along in COMBINED.items()}
    return {**single, **combined, "ends": layout.ends()}
