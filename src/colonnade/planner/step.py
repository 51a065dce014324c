"""One rank's training step: all that decides about its traffic, and what follows from it at once. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from colonnade.architecture.families import architecture_of
from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.data_parallel.lengths import buffer_length
from colonnade.mesh.layout import Layout
from colonnade.pipeline.partition import chunks, chunks_of_stage, first_trained, holders
from colonnade.pipeline.schedule import Action, actions
from colonnade.planner.local import Local, local

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Step:
    """One rank's training step: all that decides about its traffic."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: str
    vocab_size: int
    rank: int
    skipped: bool = False
    """fp16: gradients overflowed, so that no weight was updated."""
    cuda: bool = field(kw_only=True)
    """Whether it runs on CUDA, where more of the loss is computed at once."""
    measured: tuple[str, ...] = ()
    """What thermometers read (`thermometers.sites`)."""
    stated: Architecture | None = None
    """The model, with what of it is trained; None: all."""

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.parallel.tp, pp=self.parallel.pp, dp=self.parallel.dp)

    @cached_property
    def place(self) -> dict[str, int]:
        """This rank's number on each axis."""
        return self.layout.coordinates(self.rank)

    @cached_property
    def architecture(self) -> Architecture:
        return self.stated or architecture_of(self.model, self.vocab_size)

    @cached_property
    def chunks(self) -> list[list[Unit]]:
        """The units of each chunk of this rank's stage."""
        return chunks_of_stage(self.architecture, self.parallel, self.place["pp"])

    @cached_property
    def weights(self) -> dict[str, list[Local]]:
        """What this rank has of every trained weight of its stage, by bucket."""
        return self._held(frozen=False)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The elements of every bucket's flat buffers of trained weights."""
        return self._lengths(self.weights)

    @cached_property
    def frozen_lengths(self) -> dict[str, int]:
        """Those of frozen ones."""
        return self._lengths(self._held(frozen=True))

    def _held(self, *, frozen: bool) -> dict[str, list[Local]]:
        buckets = dict.fromkeys(bucket for chunk in self.chunks for unit in chunk for bucket in unit.buckets)
        every = {bucket: [local(w, self.parallel.tp) for w in self.architecture.buckets[bucket]] for bucket in buckets}
        found = {bucket: [w for w in weights if w.is_frozen == frozen] for bucket, weights in every.items()}
        return {bucket: weights for bucket, weights in found.items() if weights}

    def _lengths(self, held: Mapping[str, Sequence[Local]]) -> dict[str, int]:
        return {
            bucket: buffer_length((weight.size for weight in weights), self.parallel.dp)
            for bucket, weights in held.items()
        }

    def trains(self, unit: Unit, *names: str) -> bool:
        """Whether a weight of a unit is trained whose name in its bucket begins so."""
        weights = (weight for bucket in unit.buckets for weight in self.architecture.buckets[bucket])
        return any(weight.name.startswith(names) and not weight.is_frozen for weight in weights)

    @property
    def shares(self) -> int:
        """Between how many ranks gradients and master weights are cut."""
        return self.parallel.dp if self.parallel.zero else 1

    @property
    def num_losses(self) -> int:
        return len(self.architecture.losses)

    @property
    def num_microbatches(self) -> int:
        return self.train.num_microbatches(self.parallel.dp)

    @cached_property
    def schedules(self) -> list[list[Action]]:
        """Every stage's actions."""
        parallel = self.parallel
        return [
            actions(parallel.schedule, stage, parallel.pp, self.num_microbatches, parallel.virtual_stages)
            for stage in range(parallel.pp)
        ]

    @property
    def first_trained(self) -> int:
        """The first chunk of the model with a backward."""
        return first_trained(chunks(self.architecture, self.parallel))

    @property
    def width(self) -> int:
        """Bytes of a number of the computation."""
        return BYTES[self.train.precision]

    @property
    def exact(self) -> int:
        """Bytes of a number of master weights, gradients and losses."""
        return max(self.width, 4)

    @property
    def reduced(self) -> int:
        """Bytes of a number of a gradient on its way over dp."""
        return self.width if self.train.reduce_precision == "16-bit" else self.exact

    def stream(self, length: int) -> int:
        """Bytes of a micro-batch's [s, b, h], as layers read and write it."""
        return length * self.train.micro_batch_size * self.model.hidden_size * self.width

    def message(self, unit: Unit) -> int:
        """Bytes of what a unit takes from another stage: its residual stream, and others as layers read them."""
        cut = self.parallel.tp if self.parallel.sequence_parallel else 1
        own, *others = unit.takes
        stream = self.stream(own) // self.width * (self.exact if self.model.fp32_residual else self.width)
        return (stream + sum(map(self.stream, others))) // cut

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Which stages have a copy of each bucket that several have."""
        return holders(self.architecture, chunks(self.architecture, self.parallel), self.parallel.pp)

    def size(self, axis: str) -> int:
        """The ranks along an axis of the mesh."""
        tp, pp, dp = self.parallel.tp, self.parallel.pp, self.parallel.dp
        ends = 2 if pp > 1 and self.place["pp"] in (0, pp - 1) else 1
        products = {"model": pp * tp, "stage": dp * tp, "world": pp * dp * tp}
        shared = {self.layout.axis_of(stages): len(stages) for stages in self.holders.values()}
        return {**shared, "tp": tp, "pp": pp, "dp": dp, **products, "ends": ends}[axis]
