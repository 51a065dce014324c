"""How many bytes a micro-batch leaves behind in each unit for its backward, on one rank.

Nothing is stated here of any layer. One unit of each kind is built as training builds it and run forward and backward
on tensors without memory (torch's meta device) and collectives that send nothing. Storages that are alive are counted.
So whatever has a forward pass is counted, as it is written.

    after a forward                 inside + what it hands on + shared
    after another one beside it     inside + what it hands on, once more: what is not there twice is shared
    after a backward that defers    what deferred weight gradients hold on to

So is the most that is alive at once while operators run: logits, operands in another type, gradients on their way.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from colonnade.architecture.families import architecture_of
from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.data_parallel.buckets import Storage, flatten
from colonnade.kernels.choice import Products
from colonnade.kernels.products import WeightGradients
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, paper_mesh
from colonnade.model.precision import DTYPES
from colonnade.pipeline.carry import Carry, backward_from, leaves
from colonnade.pipeline.chunk import Model
from colonnade.planner.example import example_inputs
from colonnade.planner.live import LiveTensors
from colonnade.planner.operators import Recorder
from colonnade.planner.stand_in import META, Device, StandIn
from colonnade.train.state import build_model, parallel_of

T = TypeVar("T")
_Storages = list[weakref.ref[torch.UntypedStorage] | None]


class Handed(NamedTuple):
    """One tensor of what a unit hands on."""

    size: int
    """[bytes]"""
    source: int | None = None
    """Its place in what came in, where it is handed on as it is; None: the unit makes it."""
    has_gradient: bool = True


@dataclass(frozen=True)
class Deferred:
    """What weight gradients hold on to that backward leaves for later (zero-bubble's W)."""

    inside: int = 0
    """[bytes] Besides the next two."""
    inputs: tuple[int, ...] = ()
    """Places in what comes in of tensors that they hold on to."""
    gradients: tuple[int, ...] = ()
    """Places in what is handed on of tensors whose gradients they hold on to."""
    backward: int = 0
    """[bytes] The most at once that such a backward makes."""
    weights: int = 0
    """[bytes] The most at once that they make when they are computed."""


@dataclass(frozen=True)
class Kept:
    """Bytes that one micro-batch leaves in one unit."""

    inside: int
    """For the unit's backward, besides its input and output."""
    out: tuple[Handed, ...] = ()
    """The carry that it hands on, which is the next unit's input; () where it makes losses."""
    losses: int = 0
    """How many losses it makes."""
    deferred: Deferred = Deferred()
    shared: int = 0
    """What all units of this kind share in a micro-batch: made by the first that needs it, and alive while one of them
    keeps it."""
    unread: tuple[int, ...] = ()
    """Places in what comes in of tensors that it does not compute with: their gradients get nothing from it."""
    forward: int = 0
    """The most at once that its forward makes, what it leaves included, but nothing that is shared."""
    backward: int = 0
    """The most at once that its backward makes, beside what its forward has left."""


def kept_of(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    vocab_size: int,
    device: Device,
    separate_documents: bool = False,
    products: Products | None = None,
    architecture: Architecture | None = None,
) -> dict[str, Kept]:
    """What a micro-batch leaves in a unit of each kind, where ranks compute on `device`; a CPU is one of this kind.
    `architecture`: with what of the model is trained; None: all.
    """
    architecture = architecture or architecture_of(model, vocab_size)
    units = {unit.kind: unit for unit in reversed(architecture.units)}  # the first of each
    tp, dtype = paper_mesh(Layout(tp=parallel.tp), 0).tp, DTYPES[train.precision]
    layers, names = parallel_of(parallel, tp, products), [unit.name for unit in reversed(units.values())]
    with META:
        built = build_model(model, vocab_size, layers, dtype=dtype, units=names, architecture=architecture)
    flatten(built.placements(), Axis("dp"), Storage(dtype=dtype, device=META))
    inputs = example_inputs(model, train, vocab_size, META, separate_documents=separate_documents)
    with StandIn(device) as place:
        later = layers.weight_gradients
        return {kind: unit_kept(built, unit, inputs, later, Recorder(place)) for kind, unit in units.items()}


def unit_kept(model: Model, unit: Unit, inputs: Any, later: WeightGradients, live: LiveTensors) -> Kept:
    """What a micro-batch leaves in a unit, found by running it. `later`: what its linear layers were built with. `live`
    counts what is alive.
    """
    with live:
        found = _after_backward(model, unit, inputs, later, _after_forward(model, unit, inputs, live), live)
        left = live.bytes.total()
    assert not left, f"{unit.name} holds on to {left} bytes after its backward"
    return found


def _after_forward(model: Model, unit: Unit, inputs: Any, live: LiveTensors) -> Kept:
    entry = leaves(model.carry_buffers(inputs, unit.name), gradients=unit.sends_back)
    before = live.bytes.total()
    first = model.run(unit.name, entry, inputs)
    with_shared = live.bytes.total() - before
    second, most = most_of(lambda: model.run(unit.name, entry, inputs), live)
    own = live.bytes.total() - before - with_shared
    assert len(first) == len(second), "a unit hands on what it handed on before"
    handed = tuple(_handed(x, entry) for x in first)
    made = sum(each.size for each in handed if each.source is None)
    out, losses = ((), len(first)) if unit.is_loss else (handed, 0)
    return Kept(own - made, out, losses, shared=with_shared - own, forward=most)


def most_of(run: Callable[[], T], live: LiveTensors) -> tuple[T, int]:
    """What `run` returns, and the most bytes at once that it makes."""
    before = live.bytes.total()
    live.most.clear()
    found = run()
    return found, max(0, live.most.total() - before)


def _handed(x: Tensor, entry: Carry) -> Handed:
    source = next((place for place, each in enumerate(entry) if each is x), None)
    return Handed(x.untyped_storage().nbytes(), source, x.is_floating_point())


def _after_backward(
    model: Model, unit: Unit, inputs: Any, later: WeightGradients, kept: Kept, live: LiveTensors
) -> Kept:
    """`kept`, and what backward tells."""
    flows = [each.source is None and each.has_gradient for each in kept.out]
    most = _backward(model, unit, inputs, flows, live).most
    with later.deferred() as queue:
        back = _backward(model, unit, inputs, flows, live)
    came, went = _alive(back.inputs), _alive(back.gradients)
    inside = live.bytes.total() - sum(storage.nbytes() for storage in (*came.values(), *went.values()))
    places = tuple(came), tuple(went)
    del came, went
    _, weights = most_of(queue.run, live)
    return replace(kept, deferred=Deferred(inside, *places, back.most, weights), unread=back.unread, backward=most)


@dataclass(frozen=True)
class _Back:
    """What a backward tells. It holds no tensor."""

    unread: tuple[int, ...]
    inputs: _Storages
    gradients: _Storages
    most: int


def _backward(model: Model, unit: Unit, inputs: Any, flows: Sequence[bool], live: LiveTensors) -> _Back:
    """`flows`: whether a gradient comes for what is handed on; none where it makes losses."""
    entry = leaves(model.carry_buffers(inputs, unit.name), gradients=unit.sends_back)
    out = model.run(unit.name, entry, inputs)
    gradients = None if unit.is_loss else tuple(map(_gradient, out, flows))
    _, most = most_of(lambda: backward_from(out, gradients), live)
    unread = tuple(place for place, x in enumerate(entry) if x.is_floating_point() and x.grad is None)
    return _Back(unread, _storages(entry), _storages(gradients or ()), most)


def _gradient(x: Tensor, flows: bool) -> Tensor | None:
    return torch.ones_like(x) if flows else None


def _storages(tensors: Iterable[Tensor | None]) -> _Storages:
    return [None if x is None else weakref.ref(x.untyped_storage()) for x in tensors]


def _alive(storages: _Storages) -> dict[int, torch.UntypedStorage]:
    """Those that somebody still holds, by place."""
    found = ((place, None if ref is None else ref()) for place, ref in enumerate(storages))
    return {place: storage for place, storage in found if storage is not None}
