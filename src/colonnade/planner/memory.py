"""Bytes of memory that a rank will take: parameters, gradients, optimizer state, activations. Before the run.

N elements of a bucket's flat buffer (padded to 16·dp), D = dp under the ZeRO stage in question, else 1; c bytes of the
compute type, e of the exact one (4, or 8 under fp64):

    parameters                  c·N / D₃            stage 3 keeps a slice
    gradients                   e·N / D₂            from stage 2
    master weights              e·N / D₁            from stage 1; none where parameters are exact themselves
    two moments                2e·N / D₁
    buffers                     what is gathered for a while, and sums under way        see `counting.py`
    activations                 the most that live micro-batches leave for backward     see `counting.py`, `kept.py`

    operators                   what they need besides while they run, at the worst moment: logits, operands in another
                                type, gradients on their way

Frozen weights have parameters alone. Not counted: memory inside kernels, and what libraries take for themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from colonnade.architecture.families import architecture_of
from colonnade.architecture.statement import Architecture
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.data_parallel.lengths import buffer_length
from colonnade.kernels.choice import Products
from colonnade.pipeline.partition import chunks_of_stage
from colonnade.planner.counting import peaks
from colonnade.planner.kept import Kept, kept_of
from colonnade.planner.stand_in import Device
from colonnade.planner.step import BYTES


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    """Master weights and both moments."""
    buffers: int
    """The most that is gathered for a while, where only slices are kept, or is on its way to other ranks."""
    activations: int
    """The most that is kept for backward at once, with gradients of the stream and messages between stages."""
    operators: int = 0
    """What operators make and let go of while they run, beside `activations`."""
    host: int = 0
    """In CPU memory, with parallel.offload: what would be in `optimizer`, and gradients brought to it."""

    @property
    def state(self) -> int:
        """What lives from step to step, without `host`."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it but `host`, as if every peak came at one moment."""
        return self.state + self.buffers + self.activations + self.operators


def rank_memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    vocab_size: int,
    stage: int = 0,
    device: Device = "cuda",
    separate_documents: bool = False,
    products: Products | None = None,
    architecture: Architecture | None = None,
) -> Memory:
    """What a rank of this pipeline stage takes, where ranks compute on `device`; a CPU is one of this machine's kind.
    `architecture`: with what of the model is trained; None: all. Raises LayoutError for what cannot be cut or
    scheduled.
    """
    architecture = architecture or architecture_of(model, vocab_size)
    kept = kept_of(
        model,
        parallel,
        train,
        vocab_size=vocab_size,
        device=device,
        separate_documents=separate_documents,
        products=products,
        architecture=architecture,
    )
    return stage_memory(architecture, kept, parallel, train, stage=stage, device=device)


def stage_memory(
    architecture: Architecture,
    kept: Mapping[str, Kept],
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    stage: int,
    device: Device,
) -> Memory:
    """The same, given what a micro-batch leaves in a unit of each kind: for who asks of several stages."""
    most = peaks(architecture, kept, parallel, train, stage=stage)
    held = resident(architecture, parallel, train, stage=stage, device=device)
    return replace(held, buffers=most.buffers, activations=most.activations, operators=most.operators)


def resident(
    architecture: Architecture, parallel: ParallelConfig, train: TrainConfig, *, stage: int, device: Device = "cuda"
) -> Memory:
    """What a rank holds all the time. Raises LayoutError for what cannot be cut."""
    units = [unit for chunk in chunks_of_stage(architecture, parallel, stage) for unit in chunk]
    buckets = dict.fromkeys(bucket for unit in units for bucket in unit.buckets)
    trained, frozen = (
        sum(bucket_length(architecture, bucket, parallel, frozen=frozen) for bucket in buckets)
        for frozen in (False, True)
    )
    held = _Buffers(trained, parallel, train, frozen)
    return Memory(
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=0 if parallel.offload else held.optimizer,
        host=held.optimizer + (0 if device == "cpu" else held.reduced) if parallel.offload else 0,
        buffers=0,
        activations=0,
    )


def bucket_length(architecture: Architecture, bucket: str, parallel: ParallelConfig, *, frozen: bool = False) -> int:
    """[elements] The flat buffers of a bucket's trained weights, or of its frozen ones, on one rank."""
    weights = [weight for weight in architecture.buckets[bucket] if weight.is_frozen == frozen]
    return buffer_length((prod(weight.local_shape(parallel.tp)) for weight in weights), parallel.dp)


def buffer_bytes(length: int, parallel: ParallelConfig, train: TrainConfig, *, frozen: int = 0) -> int:
    """What a device holds all the time of trained weights with so many elements, and of frozen ones."""
    held = _Buffers(length, parallel, train, frozen)
    return held.parameters + held.gradients + (0 if parallel.offload else held.optimizer)


@dataclass(frozen=True)
class _Buffers:
    """Bytes of flat buffers of `length` elements of trained weights, and `frozen` of others."""

    length: int
    parallel: ParallelConfig
    train: TrainConfig
    frozen: int = 0

    @property
    def compute(self) -> int:
        return BYTES[self.train.precision]

    @property
    def exact(self) -> int:
        return max(self.compute, 4)

    def kept(self, length: int, from_stage: int) -> int:
        """Elements that a rank keeps of a buffer that is cut from this ZeRO stage on."""
        return length // self.parallel.dp if self.parallel.zero >= from_stage else length

    @property
    def parameters(self) -> int:
        return self.compute * (self.kept(self.length, 3) + self.kept(self.frozen, 3))

    @property
    def gradients(self) -> int:
        return self.exact * self.kept(self.length, 2)

    @property
    def optimizer(self) -> int:
        master = 0 if self.compute == self.exact else self.exact
        return (master + 2 * self.exact) * self.kept(self.length, 1)

    @property
    def reduced(self) -> int:
        """The gradients that the optimizer reads: copied to where it works, under offload."""
        return self.exact * self.kept(self.length, 1)
