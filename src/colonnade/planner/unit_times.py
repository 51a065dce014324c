"""What a micro-batch costs in one unit of each kind, on one rank: seconds and bytes, from which layouts are composed.

The real program runs a step of a model with one block of each kind, on paper, with this tp and micro-batch; the events
of each unit are played on the machine's clocks. All blocks take what one of them takes. Its backward is split, as
zero-bubble splits it; the other schedules run both halves at once.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Unit
from colonnade.config.distillation import DistillationConfig
from colonnade.config.parts import LoraConfig, PartsConfig
from colonnade.config.schema import Config, ParallelConfig
from colonnade.kernels.choice import Products
from colonnade.planner.cost import Cost
from colonnade.planner.kept import Kept, kept_of
from colonnade.planner.operators import Section
from colonnade.planner.paper import walk
from colonnade.planner.stand_in import Device
from colonnade.planner.timeline import Clock

FEW = 3
"""Micro-batches of the step that is walked; the second counts."""


@dataclass(frozen=True)
class UnitCost:
    """Of one micro-batch in one unit."""

    forward: float
    """[s]"""
    backward: float
    """[s] But for weight gradients, which can be deferred."""
    weights: float
    """[s] Of those."""
    kept: int
    """[bytes] From forward to backward, with what it hands on."""
    handed: int
    """[bytes] What it hands on."""
    working: int
    """[bytes] The most that it makes for a moment."""
    shared: int = 0
    """[bytes] What all units of its kind share of the micro-batch, as long as one of them keeps it."""


@dataclass(frozen=True)
class Costs:
    """Of all kinds of units."""

    units: Mapping[str, UnitCost]
    """By kind, of a model that is trained as a whole."""
    spent: Mapping[str, float]
    """[s] Of the micro-batch, by what for."""

    def of(self, unit: Unit) -> UnitCost:
        """A unit that is frozen in part costs as much as one that is not; one that has no backward, its forward."""
        whole = self.units[unit.usual_kind]
        return whole if unit.has_backward else replace(whole, backward=0.0, weights=0.0, kept=0)


def unit_costs(
    config: Config, vocab_size: int, cost: Cost, device: Device, *, products: Products | None = None
) -> Costs:
    """Of this configuration's tp, micro-batch, precision and options of layers; its other sizes do not count.
    `products`: the kernels that take the time (None: the usual ones).
    """
    small = _small(config)
    split = small.model_copy(update={"parallel": small.parallel.model_copy(update={"schedule": "zero_bubble"})})
    found = walk(split, vocab_size, 0, device=device, products=products, whole=True)
    clock = Clock(cost)
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    spent: dict[str, float] = {}
    for section in found.sections:
        counts = section.action is not None and section.action.microbatch == 1
        before = dict(clock.spent)
        for unit, each in _by_unit(section, clock).items():
            if counts and section.action is not None:
                seconds[unit][section.action.kind] += each
        if counts:
            spent = {what: spent.get(what, 0.0) + each - before.get(what, 0.0) for what, each in clock.spent.items()}
    kept = kept_of(
        small.model,
        small.parallel,
        small.train,
        vocab_size=vocab_size,
        device=device,
        separate_documents=config.data.documents == "separate",
    )
    units = {unit.kind: unit.name for unit in reversed(trained_architecture(small, vocab_size).units)}
    return Costs({kind: _cost(seconds[name], kept[kind]) for kind, name in units.items()}, spent)


def _small(config: Config) -> Config:
    """One block of each kind, on one stage, with the same layers, all of it trained and by nobody taught."""
    model, train = config.model, config.train
    decoder = {"num_decoder_layers": 1} if model.decoder_layers else {}
    parallel = ParallelConfig(
        tp=config.parallel.tp,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute="selective" if config.parallel.recompute == "selective" else "none",
    )
    update = {"global_batch_size": FEW * train.micro_batch_size}
    return config.model_copy(
        update={
            "model": model.model_copy(update={"num_layers": 1, **decoder}),
            "parallel": parallel,
            "parts": PartsConfig(),
            "lora": LoraConfig(),
            "distillation": DistillationConfig(),
            "train": train.model_copy(update=update),
        }
    )


def _by_unit(section: Section, clock: Clock) -> dict[str, float]:
    """[s] Of the events of each unit."""
    found: dict[str, float] = defaultdict(float)
    ends = [at for at, _ in section.units[1:]] + [len(section.events)]
    for (start, unit), end in zip(section.units, ends, strict=True):
        found[unit] += clock.play(section.events[start:end])
    return found


def _cost(of: Mapping[str, float], kept: Kept) -> UnitCost:
    handed = sum(each.size for each in kept.out if each.source is None)
    working = max(kept.forward - kept.inside, kept.backward)
    forward, backward, weights = (of.get(kind, 0.0) for kind in "FBW")
    return UnitCost(forward, backward, weights, kept.inside + handed, handed, working, kept.shared)
