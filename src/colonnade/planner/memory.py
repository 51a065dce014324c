"""Bytes of memory that a rank will take: parameters, gradients, optimizer state, activations. Pure, before the run.

N elements of a part's flat buffer (padded to 16·dp), D = dp under the ZeRO stage in question, else 1; c bytes of the
compute type, e of the exact one (4, or 8 under fp64):

    parameters                  c·N / D₃            stage 3 keeps a slice
    gradients                   e·N / D₂            from stage 2
    master weights              e·N / D₁            from stage 1; none where parameters are exact themselves
    two moments                2e·N / D₁
    buffers                     what is made whole for a while: see `timeline.py`
    activations                 the most that live micro-batches leave for backward: see `activations.py`

Not counted: what operators need while they run (the most is the head's: logits, some 16 million numbers at a time), and
what the libraries take for themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from colonnade.architecture.families import architecture_of
from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.schema import ModelConfig, ParallelConfig, TrainConfig
from colonnade.data_parallel.lengths import buffer_length
from colonnade.pipeline.partition import chunks_of_stage
from colonnade.pipeline.schedule import Action, all_actions
from colonnade.planner.activations import COMPUTE_BYTES, Microbatch, kept
from colonnade.planner.ownership import PartBuffers
from colonnade.planner.timeline import Stage, timeline


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    """Master weights and both moments."""
    buffers: int
    """The most that is made whole for a while, where only slices are kept, or is on its way to other ranks."""
    activations: int
    """The most that is kept for backward at once, with gradients of the stream and messages between stages."""
    host: int = 0
    """In CPU memory, with parallel.offload: what would be in `optimizer`, and gradients brought to it."""

    @property
    def total(self) -> int:
        """All of it but `host`, as if every peak came at one moment."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


@dataclass(frozen=True)
class Machine:
    """What a prediction has to know of where the run computes."""

    cpu: bool = False
    """Ranks compute on CPUs: what is offloaded moves nowhere."""
    widened: bool = False
    """bf16 products are computed in fp32: on CPUs without matrix units for bf16."""


GPU = Machine()


def rank_memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    vocab_size: int,
    stage: int = 0,
    machine: Machine = GPU,
    separate_documents: bool = False,
) -> Memory:
    """What a rank of this pipeline stage takes. Raises LayoutError for what cannot be cut or scheduled."""
    architecture = architecture_of(model, vocab_size)
    chunks = chunks_of_stage(architecture, parallel, stage)
    buffers = {
        bucket: _Buffers(bucket_length(architecture, bucket, parallel), parallel, train)
        for bucket in dict.fromkeys(bucket for chunk in chunks for unit in chunk for bucket in unit.buckets)
    }
    batch = Microbatch(model, parallel, train.micro_batch_size, train.precision, machine.widened, separate_documents)
    moments = list(timeline(_on_paper(stage, chunks, batch, buffers), _schedules(parallel, train)))
    whole = _Buffers(sum(each.length for each in buffers.values()), parallel, train)
    return Memory(
        parameters=whole.parameters,
        gradients=whole.gradients,
        optimizer=0 if parallel.offload else whole.optimizer,
        host=whole.optimizer + (0 if machine.cpu else whole.reduced) if parallel.offload else 0,
        buffers=max(live.buffers for live in moments),
        activations=max(live.activations for live in moments) + (batch.visible if parallel.recompute == "full" else 0),
    )


def bucket_length(architecture: Architecture, bucket: str, parallel: ParallelConfig) -> int:
    """[elements] A bucket's flat buffers on one rank."""
    return buffer_length((prod(w.local_shape(parallel.tp)) for w in architecture.buckets[bucket]), parallel.dp)


def _schedules(parallel: ParallelConfig, train: TrainConfig) -> list[list[Action]]:
    count = train.num_microbatches(parallel.dp)
    return all_actions(parallel.schedule, parallel.pp, count, parallel.virtual_stages)


def _on_paper(
    number: int, chunks: Sequence[Sequence[Unit]], batch: Microbatch, buffers: Mapping[str, "_Buffers"]
) -> Stage:
    units, parallel = [unit for chunk in chunks for unit in chunk], batch.parallel
    first_blocks = {next((unit for unit in chunk if unit.kind == "block"), None) for chunk in chunks}
    return Stage(
        number=number,
        chunks=[[unit.name for unit in chunk] for chunk in chunks],
        needs={unit.name: unit.buckets for unit in units},
        buffers={part: each.come_and_go for part, each in buffers.items()},
        kept={unit.name: kept(unit.name, batch, first_block=unit in first_blocks) for unit in units},
        stream=batch.stream,
        zero=parallel.zero,
        recompute_every=parallel.recompute_every if parallel.recompute == "full" else 0,
        splits=parallel.schedule == "zero_bubble",
    )


@dataclass(frozen=True)
class _Buffers:
    """Bytes of flat buffers of `length` elements."""

    length: int
    parallel: ParallelConfig
    train: TrainConfig

    @property
    def compute(self) -> int:
        return COMPUTE_BYTES[self.train.precision]

    @property
    def exact(self) -> int:
        return max(self.compute, 4)

    def kept(self, from_stage: int) -> int:
        """Elements that a rank keeps of a buffer that is cut from this ZeRO stage on."""
        return self.length // self.parallel.dp if self.parallel.zero >= from_stage else self.length

    @property
    def parameters(self) -> int:
        return self.compute * self.kept(3)

    @property
    def gradients(self) -> int:
        return self.exact * self.kept(2)

    @property
    def optimizer(self) -> int:
        master = 0 if self.compute == self.exact else self.exact
        return (master + 2 * self.exact) * self.kept(1)

    @property
    def reduced(self) -> int:
        """The gradients that the optimizer reads: copied to where it works, under offload."""
        return self.exact * self.kept(1)

    @property
    def come_and_go(self) -> PartBuffers:
        """What is whole for a while, and what a reduction needs besides the gradients themselves."""
        zero, dp = self.parallel.zero, self.parallel.dp
        narrow = self.train.reduce_precision == "16-bit" and dp > 1  # one rank sends nothing
        wire = self.compute if narrow else self.exact
        copy = wire * self.length if narrow else 0
        result = wire * self.length // dp if zero >= 2 or (zero == 1 and narrow) else 0
        return PartBuffers(
            parameters=self.compute * self.length if zero >= 3 else 0,
            gradients=self.exact * self.length if zero >= 2 else 0,
            sent=copy + result,
        )
