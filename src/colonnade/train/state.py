"""Everything that changes while a run goes on: the only mutable object that crosses folders."""

from dataclasses import dataclass

import torch

from colonnade.config.schema import Config, ModelConfig
from colonnade.data_parallel.buckets import FlatUnit, flatten
from colonnade.data_parallel.reduce import GradientReducer
from colonnade.mesh.mesh import Axis, Mesh
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.optim.adamw import AdamW, Moments
from colonnade.optim.schedule import LearningRate, learning_rate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass
class TrainState:
    """Model, flat buffers, optimizer state, and how far the run is."""

    model: GPT
    units: list[FlatUnit]
    moments: list[Moments]
    """One a unit."""
    reducer: GradientReducer
    optimizer: AdamW
    learning_rate: LearningRate
    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples consumed: the data position, and the number of the next sample."""


def build_model(model: ModelConfig, vocab_size: int, tp: Axis, *, dtype: torch.dtype) -> GPT:
    """The model's shard of this rank with empty weights, on the CPU."""
    return GPT(model, vocab_size, tp).to(torch.promote_types(dtype, torch.float32))


def build_state(config: Config, mesh: Mesh, vocab_size: int, device: torch.device) -> TrainState:
    """The state before step 1: initial weights drawn, buffers laid out, moments zero."""
    dtype = DTYPES[config.train.precision]
    model = build_model(config.model, vocab_size, mesh.tp, dtype=dtype)
    initialize_(model, mesh.tp, config.train.seed)
    units = flatten(model.units(), mesh.tp, dtype=dtype, device=device)
    optim = config.optim
    return TrainState(
        model=model,
        units=units,
        moments=[Moments.zeros_like(unit.master) for unit in units],
        reducer=GradientReducer(model.units(), units, mesh.dp),
        optimizer=AdamW(optim.beta1, optim.beta2, optim.epsilon, optim.weight_decay),
        learning_rate=learning_rate(
            peak=optim.learning_rate,
            floor=optim.min_learning_rate,
            warmup_steps=optim.warmup_steps,
            decay_steps=optim.decay_end(config.train.steps),
            decay=optim.decay,
        ),
    )
