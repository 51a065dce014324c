"""One training step: batch → loss → local gradients → reduced gradients → parameters.

One call a folder, in this order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from colonnade.config.schema import TrainConfig
from colonnade.data.loader import Batch
from colonnade.data_parallel.clip import clip_factor, gradient_norm
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Mesh
from colonnade.model.dropout import Masks
from colonnade.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What a step tells, equal on all ranks."""

    loss: float
    """Mean over the loss tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    loss_tokens: int


def train_step(state: TrainState, microbatches: Sequence[Batch], mesh: Mesh, train: TrainConfig) -> StepResult:
    """One optimizer step on this rank's share of the global batch. `microbatches` are in the order of their samples."""
    loss_tokens = all_reduce(torch.stack([batch.loss_mask.sum().double() for batch in microbatches]).sum(), mesh.dp)
    for unit in state.units:
        unit.gradients.zero_()

    loss = torch.zeros_like(loss_tokens)
    for batch in microbatches:
        if batch is microbatches[-1]:
            state.reducer.arm()  # each unit's gradients are summed over dp as soon as this backward leaves it
        masks = Masks(train.seed, batch.samples.cpu().numpy())
        weights = batch.loss_mask.double() / loss_tokens.clamp(min=1.0)
        part = state.model(batch.tokens, batch.labels, weights, masks)
        part.backward()
        loss += part.detach()
    state.reducer.finish()

    norm = gradient_norm(state.units, mesh)
    rate = update_(state, clip_factor(norm, train.gradient_clip))
    state.samples += train.global_batch_size
    return StepResult(float(all_reduce(loss, mesh.dp)), float(norm), rate, int(loss_tokens))


def update_(state: TrainState, factor: torch.Tensor) -> float:
    """Apply the reduced gradients, scaled by `factor`, to every unit; returns the learning rate used."""
    state.step += 1
    rate = state.learning_rate(state.step)
    for unit, moments in zip(state.units, state.moments, strict=True):
        for segment in unit.segments:
            span = slice(segment.start, segment.stop)
            state.optimizer.update_(
                unit.master[span],
                unit.gradients[span],
                moments.of(span),
                step=state.step,
                learning_rate=rate,
                decayed=segment.decayed,
                factor=factor,
            )
        unit.publish()
    return rate
