"""Everything that changes while a run goes on: the only mutable object that crosses folders."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, ParallelConfig, TrainConfig
from colonnade.data_parallel.buckets import Bucket, Storage, flatten
from colonnade.data_parallel.param_slices import param_slices
from colonnade.data_parallel.zero import Ownership
from colonnade.kernels.choice import Products, usual
from colonnade.mesh.mesh import Axis, Mesh
from colonnade.model.initialize import initialize_
from colonnade.model.model import Transformer
from colonnade.model.precision import DTYPES
from colonnade.optim.adamw import AdamW
from colonnade.optim.lamb import Lamb
from colonnade.optim.loss_scale import LossScale
from colonnade.optim.param_slice import Optimizer, ParamSlice, State
from colonnade.optim.schedule import LearningRate, learning_rate, rewarmed
from colonnade.pipeline.chunk import Chunk, Model, Owner, WeightGradients
from colonnade.pipeline.inference import Inference
from colonnade.pipeline.partition import chunks, first_trained, holders
from colonnade.pipeline.runner import Runner
from colonnade.tasks.task import Task, Teaching
from colonnade.tasks.tasks import TASKS
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.train.base import Base
from colonnade.train.change import Change
from colonnade.train.corpus import step_by
from colonnade.train.divergence import LossWatch, lowered
from colonnade.train.metadata import PublishedMetadata
from colonnade.train.rollback import Rollback
from colonnade.train.thermometers import Thermometers, thermometers

OPTIMIZERS: Mapping[str, Callable[[float, float, float, float], Optimizer]] = MappingProxyType(
    {"adamw": AdamW, "lamb": Lamb}
)


@dataclass
class TrainState:
    """This stage of the model, its flat buffers and optimizer state, and how far the run is."""

    task: Task
    model: Transformer
    buckets: list[Bucket]
    optimizer_state: list[State]
    """One per bucket: the rule's, of this rank's slice; nothing of frozen weights."""
    param_slices: list[ParamSlice]
    """What the optimizer steps through: views of the buffers."""
    ownership: Ownership
    runner: Runner
    inference: Inference
    """The same stages, forward only."""
    optimizer: Optimizer
    learning_rate: LearningRate
    loss_scale: LossScale
    thermometers: Thermometers
    teacher: Teaching | None = None
    """Whom it learns from besides the labels."""
    base: Base | None = None
    """What is not saved with it; None: everything is."""
    published: PublishedMetadata | None = None
    """With the weights that it began from; None: it began from none that were published."""
    end_of_document: int | None = None
    """That the weights it began from, or goes on with, know; None: unknown."""
    drawn: bool = True
    """Whether the weights began as initial weights; False where they were to be loaded."""
    step: int = 0
    """Steps done, skipped ones too: the place on the learning-rate curve."""
    skipped: int = 0
    """Steps whose gradients overflowed."""
    samples: int = 0
    """Samples consumed or passed over: the data position, and the number of the next sample."""
    rollbacks: list[Rollback] = field(default_factory=list)
    """That have brought the run here."""
    passed_over: int = 0
    """Of `samples`, what these have passed over."""
    changes: list[Change] = field(default_factory=list)
    """Of the configuration, that are in force."""
    watch: LossWatch = field(default_factory=LossWatch)

    @property
    def num_weights(self) -> int:
        """Trained weights of this stage, by which the optimizer numbers them."""
        return sum(len(bucket.ranges) for bucket in self.trained)

    @property
    def trained(self) -> list[Bucket]:
        """The buckets that have gradients."""
        return [bucket for bucket in self.buckets if not bucket.is_frozen]

    @property
    def trained_on(self) -> int:
        """As `samples`, without what rollbacks have passed over."""
        return self.samples - self.passed_over


def parallel_of(parallel: ParallelConfig, tp: Axis, products: Products | None = None) -> Parallel:
    """How layers are cut and run. `products`: the kernels (None: the usual ones); so below."""
    return Parallel(tp, parallel.sequence_parallel, parallel.recompute == "selective", products=products or usual())


def build_model(
    model: ModelConfig,
    vocab_size: int,
    parallel: Parallel,
    *,
    dtype: torch.dtype,
    units: Sequence[str],
    architecture: Architecture | None = None,
) -> Transformer:
    """This rank's shard of some units of the model, with empty weights, on the CPU. `architecture`: with what of it is
    trained; None: all.
    """
    built = TASKS[model.kind_and_head].build(model, vocab_size, parallel, units)
    if architecture is not None:
        built.train_as(architecture)
    return built.to(torch.promote_types(dtype, torch.float32))


def build_state(
    config: Config,
    mesh: Mesh,
    vocab_size: int,
    device: torch.device,
    *,
    draw: bool = True,
    products: Products | None = None,
) -> TrainState:
    """The state before step 1: initial weights drawn, buffers laid out, moments zero. `draw` False: weights are zero,
    for who has others to load.
    """
    parallel, dtype = config.parallel, DTYPES[config.train.precision]
    architecture = trained_architecture(config, vocab_size)
    every = chunks(architecture, parallel)
    held = every[mesh.pp.rank :: mesh.pp.size]
    names = [unit.name for units in held for unit in units]
    layers = parallel_of(parallel, mesh.tp, products)
    model = build_model(config.model, vocab_size, layers, dtype=dtype, units=names, architecture=architecture)
    if draw:
        initialize_(model, mesh.tp, config.train.seed, device)
    else:
        _clear_(model)
    buckets = flatten(model.placements(), mesh.reduce, storage_of(config.train, parallel, device))
    owner = Ownership(
        buckets,
        {unit.name: list(unit.buckets) for units in held for unit in units},
        mesh,
        zero=parallel.zero,
        sequence_parallel=parallel.sequence_parallel,
        shared=_axes_of(holders(architecture, every, mesh.pp.size), mesh),
    )
    runner = runner_of(parallel, every, model, owner, model.parallel.weight_gradients, mesh.pp, device)
    optimizer = optimizer_of(config)
    optimizer_state: list[State] = [{} if each.is_frozen else optimizer.init(each.master) for each in buckets]
    return TrainState(
        task=TASKS[config.model.kind_and_head],
        model=model,
        drawn=draw,
        buckets=buckets,
        optimizer_state=optimizer_state,
        param_slices=param_slices(buckets, optimizer_state, mesh.tp, products),
        ownership=owner,
        runner=runner,
        inference=Inference(runner.chunks, model, mesh.pp, owner),
        optimizer=optimizer,
        learning_rate=learning_rate_of(config),
        loss_scale=_loss_scale(config),
        thermometers=thermometers(
            config.thermometers, config.model, architecture, owned=owner, probe=layers.probe, dtype=dtype
        ),
    )


def _axes_of(stages: Mapping[str, tuple[int, ...]], mesh: Mesh) -> dict[str, Axis]:
    """The axis of each bucket that these stages share: one for all buckets of the same stages."""
    axes = {each: mesh.holders(each) for each in dict.fromkeys(stages.values())}
    return {bucket: axes[each] for bucket, each in stages.items()}


@torch.no_grad()
def _clear_(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter.zero_()


def storage_of(train: TrainConfig, parallel: ParallelConfig, device: torch.device) -> Storage:
    """How flat buffers are kept."""
    dtype = DTYPES[train.precision]
    return Storage(
        dtype=dtype,
        device=device,
        zero=parallel.zero,
        offload=parallel.offload,
        reduce_dtype=dtype if train.reduce_precision == "16-bit" else None,
    )


def runner_of(
    parallel: ParallelConfig,
    every: Sequence[Sequence[Unit]],
    model: Model,
    owner: Owner,
    weight_gradients: WeightGradients,
    pp: Axis,
    device: torch.device,
) -> Runner:
    """This stage's runner, given the units of every chunk of the model."""
    return Runner(
        chunks=[
            Chunk(units, model, owner, weight_gradients=weight_gradients, recompute_every=parallel.recompute_group)
            for units in every[pp.rank :: pp.size]
        ],
        starts=[units[0].name for units in every],
        model=model,
        pp=pp,
        owner=owner,
        schedule=parallel.schedule,
        device=device,
        first_trained=first_trained(every),
        num_losses=len(every[-1][-1].losses),
    )


def optimizer_of(config: Config) -> Optimizer:
    """The rule, as [optim] says; it keeps nothing."""
    optim = config.optim
    return OPTIMIZERS[optim.name](optim.beta1, optim.beta2, optim.epsilon, optim.weight_decay)


def learning_rate_of(config: Config, rollbacks: Sequence[Rollback] = ()) -> LearningRate:
    """The rate of each step, as [optim] and train.steps say, and as rollbacks lower it. Tokens are those that its steps
    have used up.
    """
    optim = config.optim
    peak, floor, at = optim.learning_rate, optim.floor, optim.rewarm_at
    step_of = partial(_step_of, config, rollbacks)
    start = step_of(optim.decay_start_tokens, optim.decay_start or 0)
    end = step_of(optim.decay_tokens, optim.decay_end(config.train.steps))
    curve = partial(learning_rate, peak=peak, floor=floor, decay_steps=end, decay=optim.decay)
    once = curve(warmup_steps=step_of(optim.warmup_tokens, optim.warmup), decay_start=start)
    if at is None:
        return lowered(once, rollbacks)
    again = curve(warmup_steps=0, decay_start=max(start, at + optim.rewarm_steps))
    twice = rewarmed(once, at=at, steps=optim.rewarm_steps, floor=floor, peak=peak, behind=again)
    return lowered(twice, rollbacks)


def decay_begin(config: Config, rollbacks: Sequence[Rollback] = ()) -> int:
    """The step behind which the rate begins to fall: behind a new warm-up, which cuts the first one short, too."""
    optim, step_of = config.optim, partial(_step_of, config, rollbacks)
    start = step_of(optim.decay_start_tokens, optim.decay_start or 0)
    warm = step_of(optim.warmup_tokens, optim.warmup)
    again = warm if optim.rewarm_at is None else optim.rewarm_at + optim.rewarm_steps
    return max(start, min(warm, again))


def _step_of(config: Config, rollbacks: Sequence[Rollback], tokens: int | None, steps: int) -> int:
    return steps if tokens is None else step_by(config, tokens, rollbacks)


def _loss_scale(config: Config) -> LossScale:
    train = config.train
    if train.precision != "fp16":
        return LossScale()
    return LossScale(train.loss_scale, window=train.loss_scale_window, minimum=train.min_loss_scale)
