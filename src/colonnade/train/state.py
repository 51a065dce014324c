"""Everything that changes while a run goes on: the only mutable object that crosses folders."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from colonnade.architecture.families import architecture_of
from colonnade.config.schema import Config, ModelConfig
from colonnade.data_parallel.buckets import FlatUnit, Storage, flatten
from colonnade.data_parallel.pieces import pieces_of
from colonnade.data_parallel.zero import Ownership
from colonnade.mesh.mesh import Mesh
from colonnade.model.gpt import GPT, Inputs
from colonnade.model.initialize import initialize_
from colonnade.model.precision import DTYPES
from colonnade.model.transformer import residual_dtype
from colonnade.optim.adamw import AdamW
from colonnade.optim.lamb import Lamb
from colonnade.optim.loss_scale import LossScale
from colonnade.optim.piece import Optimizer, Piece, State
from colonnade.optim.schedule import LearningRate, learning_rate
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.inference import Inference
from colonnade.pipeline.partition import chunks_of_stage
from colonnade.pipeline.runner import Runner
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import named_placements

OPTIMIZERS: Mapping[str, Callable[[float, float, float, float], Optimizer]] = MappingProxyType(
    {"adamw": AdamW, "lamb": Lamb}
)


@dataclass
class TrainState:
    """This stage of the model, its flat buffers and optimizer state, and how far the run is."""

    model: GPT
    units: list[FlatUnit]
    optimizer_state: list[State]
    """One a unit: the rule's, of this rank's slice."""
    pieces: list[Piece]
    """What the optimizer steps through: views of the buffers."""
    ownership: Ownership
    runner: Runner
    inference: Inference
    """The same stages, forward only."""
    optimizer: Optimizer
    learning_rate: LearningRate
    loss_scale: LossScale
    step: int = 0
    """Steps done, skipped ones too: the place on the learning-rate curve."""
    skipped: int = 0
    """Steps whose gradients overflowed."""
    samples: int = 0
    """Samples consumed: the data position, and the number of the next sample."""

    def hidden(self, inputs: Inputs) -> Tensor | None:
        """The whole residual stream before the head, [s, b, h], on the last stage; None elsewhere. All ranks call."""
        x = self.inference.hidden(inputs)
        return None if x is None else self.model.parallel.gather(x)

    @property
    def num_weights(self) -> int:
        """Weights of this stage, by which the optimizer numbers them."""
        return sum(len(unit.slots) for unit in self.units)


def build_model(
    model: ModelConfig, vocab_size: int, parallel: Parallel, *, dtype: torch.dtype, units: Sequence[str]
) -> GPT:
    """This rank's shard of some units of the model, with empty weights, on the CPU."""
    return GPT(model, vocab_size, parallel, units=units).to(torch.promote_types(dtype, torch.float32))


def build_state(config: Config, mesh: Mesh, vocab_size: int, device: torch.device) -> TrainState:
    """The state before step 1: initial weights drawn, buffers laid out, moments zero."""
    parallel, dtype = config.parallel, DTYPES[config.train.precision]
    architecture = architecture_of(config.model, vocab_size)
    chunks = [[unit.name for unit in chunk] for chunk in chunks_of_stage(architecture, parallel, mesh.pp.rank)]
    names = [unit for chunk in chunks for unit in chunk]
    cut = Parallel(mesh.tp, parallel.sequence_parallel, parallel.recompute == "selective")
    model = build_model(config.model, vocab_size, cut, dtype=dtype, units=names)
    initialize_(model, mesh.tp, config.train.seed)
    units = flatten(named_placements(model.parts(), mesh.tp), mesh.reduce, _storage(config, dtype, device))
    owner = Ownership(
        units,
        {unit: model.needs(unit) for unit in names},
        mesh,
        zero=parallel.zero,
        sequence_parallel=parallel.sequence_parallel,
        tied=config.model.tie_embeddings,
    )
    runner = _runner(config, [_chunk(config, names, model, owner) for names in chunks], mesh, owner, device)
    optimizer = _optimizer(config)
    optimizer_state: list[State] = [optimizer.init(unit.master) for unit in units]
    return TrainState(
        model=model,
        units=units,
        optimizer_state=optimizer_state,
        pieces=pieces_of(units, optimizer_state, mesh.tp),
        ownership=owner,
        runner=runner,
        inference=Inference(runner.chunks, mesh.pp, owner, runner.stream),
        optimizer=optimizer,
        learning_rate=_learning_rate(config),
        loss_scale=_loss_scale(config),
    )


def _storage(config: Config, dtype: torch.dtype, device: torch.device) -> Storage:
    narrow = config.train.reduce_precision == "16-bit"
    return Storage(
        dtype=dtype,
        device=device,
        zero=config.parallel.zero,
        offload=config.parallel.offload,
        reduce_dtype=dtype if narrow else None,
    )


def _chunk(config: Config, units: list[str], model: GPT, owner: Ownership) -> Chunk:
    parallel = config.parallel
    every = parallel.recompute_every if parallel.recompute == "full" else 0
    return Chunk(units, model, owner, weight_gradients=model.parallel.weight_gradients, recompute_every=every)


def _runner(config: Config, chunks: list[Chunk], mesh: Mesh, owner: Ownership, device: torch.device) -> Runner:
    cut = mesh.tp.size if config.parallel.sequence_parallel else 1
    stream = stream_of(config.model, DTYPES[config.train.precision], device, cut=cut)
    return Runner(chunks=chunks, pp=mesh.pp, owner=owner, schedule=config.parallel.schedule, stream=stream)


def stream_of(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, *, cut: int = 1
) -> Callable[[Inputs], Tensor]:
    """Makes memory for the residual stream of a micro-batch, [s/cut, b, h]: what crosses from stage to stage."""
    kept = residual_dtype(dtype, model.fp32_residual)

    def stream(inputs: Inputs) -> Tensor:
        assert inputs.tokens is not None, "every stage is told the tokens"
        s, b = inputs.tokens.shape
        return torch.empty(s // cut, b, model.hidden_size, dtype=kept, device=device)

    return stream


def _optimizer(config: Config) -> Optimizer:
    optim = config.optim
    return OPTIMIZERS[optim.name](optim.beta1, optim.beta2, optim.epsilon, optim.weight_decay)


def _learning_rate(config: Config) -> LearningRate:
    optim = config.optim
    return learning_rate(
        peak=optim.learning_rate,
        floor=optim.min_learning_rate,
        warmup_steps=optim.warmup_steps,
        decay_steps=optim.decay_end(config.train.steps),
        decay=optim.decay,
    )


def _loss_scale(config: Config) -> LossScale:
    train = config.train
    if train.precision != "fp16":
        return LossScale()
    return LossScale(train.loss_scale, window=train.loss_scale_window, minimum=train.min_loss_scale)
