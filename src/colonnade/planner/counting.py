"""A step of one stage that computes nothing: the program's own classes at work on tensors without memory.

Runner, chunks, mailbox, ownership and flat buffers are those of a run. What stands in for the rest: a model whose units
make tensors of the right sizes and keep as many bytes for their backward as the real ones; buckets on the meta device;
and transports that hold what is under way until somebody waits for it. So what is alive at each moment is what would be
alive in a run, without a second statement of who frees what when.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from colonnade.architecture.statement import Architecture, Weight
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.data_parallel.buckets import Bucket, flatten
from colonnade.data_parallel.zero import Ownership
from colonnade.kernels.products import WeightGradients
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Site
from colonnade.mesh.mesh import Axis, Mesh, paper_mesh
from colonnade.mesh.transport import PaperTransport, Pending
from colonnade.pipeline.carry import Carry
from colonnade.pipeline.partition import chunks
from colonnade.pipeline.schedule import actions
from colonnade.planner.kept import Handed, Kept
from colonnade.planner.live import LiveTensors, Watch
from colonnade.planner.stand_in import META
from colonnade.tensor_parallel.placement import Placement
from colonnade.train.state import runner_of, storage_of


@dataclass(frozen=True)
class Peaks:
    """[bytes] The most at once, beside what is there all the time."""

    activations: int
    """What backward will need, gradients of the carry, and messages between stages."""
    buffers: int
    """Of parameters and gradients of which a rank keeps a slice, all while they are in use; and sums under way."""
    operators: int = 0
    """What operators make and let go of while they run, at the worst moment, beside `activations`."""


def peaks(
    architecture: Architecture, kept: Mapping[str, Kept], parallel: ParallelConfig, train: TrainConfig, *, stage: int
) -> Peaks:
    """Walk through a step of this stage. `kept`: what a micro-batch leaves in a unit of each kind.

    Raises LayoutError for what cannot be cut or scheduled.
    """
    count = train.num_microbatches(parallel.dp)
    actions(parallel.schedule, stage, parallel.pp, count, parallel.virtual_stages)  # refuses what cannot be
    every, mesh = chunks(architecture, parallel), _mesh(parallel, stage)
    units = [unit for held in every[stage :: parallel.pp] for unit in held]
    weights = {bucket: architecture.buckets[bucket] for unit in units for bucket in unit.buckets}
    buckets = _buckets(weights, parallel, train, mesh)
    owner = Ownership(buckets, {unit.name: unit.buckets for unit in units}, mesh, zero=parallel.zero)
    later = WeightGradients()
    model = CountingModel(architecture, kept, later, splits=parallel.schedule == "zero_bubble")
    with LiveTensors() as live:
        watch = Watch(owner, buckets, live)
        runner_of(parallel, every, model, watch, later, mesh.pp, META).run(range(enough(parallel, count)))
    return Peaks(watch.activations, watch.buffers, watch.operators)


def enough(parallel: ParallelConfig, num_microbatches: int) -> int:
    """The micro-batches of a shorter step with the same peaks.

    All but gpipe, which keeps every micro-batch, come to a state in which each stage keeps as much as it ever will.
    """
    return num_microbatches if parallel.schedule == "gpipe" else min(num_microbatches, 3 * parallel.pp)


class CountingModel:
    """Units that make tensors of the sizes of the real ones, without memory, and keep as much for backward."""

    def __init__(
        self, architecture: Architecture, kept: Mapping[str, Kept], later: WeightGradients, *, splits: bool
    ) -> None:
        """`splits`: whether weight gradients wait in `later`."""
        self.later, self.splits = later, splits
        self.kinds = {unit.name: unit.usual_kind for unit in architecture.units}
        self.kept = {unit.name: kept[unit.kind] for unit in architecture.units}
        self.loss = torch.empty((), dtype=torch.float64, device=META)
        self.weight = torch.empty((), device=META, requires_grad=True)
        self._entries: dict[str, list[Handed]] = {}
        self._shared: WeakValueDictionary[tuple[str, int, Any], Tensor] = WeakValueDictionary()
        carry: list[Handed] = []
        for unit in architecture.units:
            self._entries[unit.name] = carry
            carry = [each if each.source is None else carry[each.source] for each in self.kept[unit.name].out]

    def run(self, unit: str, carry: Carry, inputs: Any) -> Carry:
        """`inputs`: anything that tells micro-batches apart."""
        kept = self.kept[unit]
        read = (x for place, x in enumerate(carry) if place not in kept.unread)
        shared = self._of_all(self.kinds[unit], kept.shared, inputs)
        later = [carry[place].detach() for place in kept.deferred.inputs]
        made: Carry = _Unit.apply(self, kept, shared, later, self.weight, *read)  # type: ignore[no-untyped-call]
        if kept.losses:
            return made
        new = iter(made)
        return tuple(next(new) if each.source is None else carry[each.source] for each in kept.out)

    def carry_buffers(self, inputs: Any, into: str) -> Carry:
        return tuple(_tensor(each) for each in self._entries[into])

    def _of_all(self, kind: str, size: int, inputs: Any) -> Tensor:
        """What units of a kind, whatever of them is trained, share of a micro-batch where they keep as much: it lives
        as long as some unit's backward keeps it.
        """
        alive = self._shared.get((kind, size, inputs))
        if alive is None:
            alive = self._shared[kind, size, inputs] = _bytes(size)
        return alive


class _Unit(torch.autograd.Function):
    """Makes what a unit makes, or the loss, and keeps what its backward needs until that has run."""

    @staticmethod
    def forward(
        ctx: Any, model: CountingModel, kept: Kept, shared: Tensor, later: list[Tensor], weight: Tensor, *carry: Tensor
    ) -> Carry:
        ctx.model, ctx.kept, ctx.later = model, kept, later
        ctx.lengths = [len(x) if x.is_floating_point() else None for x in carry]
        ctx.set_materialize_grads(False)
        _bytes(kept.forward)  # for a moment
        ctx.left = [_bytes(kept.inside), shared]
        if kept.losses:
            return tuple(model.loss.detach() for _ in range(kept.losses))
        made = tuple(_tensor(each) for each in kept.out if each.source is None)
        ctx.mark_non_differentiable(*(x for x in made if not x.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, waits = ctx.kept, ctx.model.splits
        _bytes(kept.deferred.backward if waits else kept.backward)  # for a moment
        ctx.left.clear()
        made = [place for place, each in enumerate(kept.out) if each.source is None]
        gradients = [x for place, x in zip(made, given, strict=False) if place in kept.deferred.gradients]
        if waits:
            held = (_bytes(kept.deferred.inside), *ctx.later, *gradients)
            ctx.model.later.add(partial(_compute, kept.deferred.weights, held))
        return None, None, None, None, None, *(None if length is None else _halves(length) for length in ctx.lengths)


def _compute(size: int, held: tuple[Tensor, ...]) -> None:
    """What weight gradients make while they are computed from what they hold on to."""
    _bytes(size)


class HoldingTransport(PaperTransport):
    """Moves nothing, and holds what it is given until that is waited for, as real ones do."""

    def _note(self, operation: str, x: Tensor, site: Site, peer: int | None = None) -> Pending:
        super()._note(operation, x, site, peer)
        return Pending(_Held(x))


@dataclass(frozen=True)
class _Held:
    tensor: Tensor

    def wait(self) -> None: ...


def _mesh(parallel: ParallelConfig, stage: int) -> Mesh:
    """Of this stage's first rank. What goes over tp is the layers' affair, and none is here."""
    layout = Layout(pp=parallel.pp, dp=parallel.dp)
    mesh = paper_mesh(layout, layout.rank_at(pp=stage, dp=0, tp=0))
    return replace(mesh, pp=_holding(mesh.pp, mesh), dp=_holding(mesh.dp, mesh))


def _holding(axis: Axis, mesh: Mesh) -> Axis:
    if axis.transport is None:
        return axis
    return replace(axis, transport=HoldingTransport(axis.name, axis.size, mesh.ledger))


def _buckets(
    weights: Mapping[str, Sequence[Weight]], parallel: ParallelConfig, train: TrainConfig, mesh: Mesh
) -> list[Bucket]:
    """Flat buffers of one tp rank's shards."""
    placements = {
        bucket: [_placement(weight, parallel.tp) for weight in of_bucket] for bucket, of_bucket in weights.items()
    }
    return flatten(placements, mesh.reduce, storage_of(train, parallel, META))


def _placement(weight: Weight, tp: int) -> Placement:
    local = weight.local_shape(tp)
    parameter = nn.Parameter(torch.empty(local, device=META), requires_grad=not weight.is_frozen)
    dim, factors = None if weight.is_shared(tp) else weight.cut, (weight.learning_rate, weight.weight_decay)
    return Placement(weight.name, parameter, weight.shape, dim, 0, local[0], weight.is_partial, *factors)


def _tensor(handed: Handed) -> Tensor:
    return _halves(handed.size // 2) if handed.has_gradient else _bytes(handed.size)


def _halves(length: int) -> Tensor:
    """Of a type that can have a gradient, two bytes each."""
    return torch.empty(length, dtype=torch.float16, device=META)


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=META)
