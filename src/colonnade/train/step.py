"""One training step: batch → loss → local gradients → reduced gradients → parameters.

One call a folder, in this order.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.config.schema import TrainConfig
from colonnade.data_parallel.clip import clip_factor, gradient_norm
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Mesh
from colonnade.model.matching import added_losses
from colonnade.tasks.task import Microbatch
from colonnade.train.state import TrainState
from colonnade.train.thermometers import Reading

DATA, GRADIENTS, OPTIMIZER = "data", "gradients", "optimizer"
"""Parts of a step in its profile, beside forward and backward."""


@dataclass(frozen=True)
class StepResult:
    """What a step tells, equal on all ranks."""

    loss: float | None
    """The sum of `losses`; None where one of them is."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    losses: tuple[float | None, ...]
    """Each the mean over what counts in it in the global batch, in the order of the architecture's `Unit.losses`; None
    where nothing does."""
    counts: tuple[int, ...]
    """How much counted in each loss; of a language model, labels."""
    loss_scale: float
    """What the loss was multiplied with; 1 but under fp16."""
    skipped: bool
    """Whether gradients overflowed, so that no weight was changed."""
    reading: Reading | None = None
    """Of the thermometers, at a step that is measured."""


def train_step(
    state: TrainState,
    microbatches: Iterable[Microbatch],
    mesh: Mesh,
    train: TrainConfig,
    *,
    before_update: Callable[[], object] = lambda: None,
) -> StepResult:
    """One optimizer step on this rank's share of the global batch. `microbatches` are in the order of their samples.

    The data position, `state.samples`, is the caller's to move on. `before_update` is called when weights and moments
    are about to change: a save in the background copies until then.
    """
    task, microbatches = state.task, list(microbatches)
    assert microbatches, "a step takes at least one micro-batch on each dp rank, and has been given none"
    counts = all_reduce(torch.stack([task.counts(batch) for batch in microbatches], -1).sum(-1), mesh.reduce)
    assert not _is_negative(counts), (
        f"what counts in each loss adds up to {counts.tolist()}, and the loss is the mean by it: weights of both signs "
        "take a task whose `counts` are something else, and whose `inputs` weigh (docs/extend.md)"
    )
    scale = state.loss_scale.value
    inputs = [task.inputs(batch, scale / counts.where(counts > 0, 1.0), train.seed) for batch in microbatches]
    if state.teacher is not None:
        inputs = state.teacher.teach(microbatches, inputs, scale)

    with mesh.ledger.part(GRADIENTS):
        state.ownership.begin()
    state.thermometers.begin(state.step + 1)
    losses = state.runner.run(inputs)  # forward and backward; gradients are summed over dp as it goes
    losses[0] += added_losses((each.hidden for each in inputs), losses)
    losses /= scale
    with mesh.ledger.part(GRADIENTS):
        state.ownership.finish()
        norm = gradient_norm(state.ownership) / scale
    state.thermometers.gradients(scale)
    before_update()
    with mesh.ledger.part(OPTIMIZER):
        rate, skipped = update_(state, norm, mesh, train)
    means = all_reduce(all_reduce(losses, mesh.reduce), mesh.pp).tolist()  # only the last stage has any
    counted = counts.tolist()
    mesh.ledger.rest()
    reading = state.thermometers.finish(mesh)
    each = tuple(mean if count > 0 else None for mean, count in zip(means, counted, strict=True))
    total = None if None in each else sum(means)
    return StepResult(total, float(norm), rate, each, tuple(map(int, counted)), scale, skipped, reading)


def _is_negative(counts: Tensor) -> bool:
    """Whether one of these sums is. On CUDA, where the host would wait for the answer, nobody asks."""
    return not (counts.is_cuda or counts.is_meta) and bool((counts < 0).any())


def update_(state: TrainState, norm: Tensor, mesh: Mesh, train: TrainConfig) -> tuple[float, bool]:
    """Apply the reduced gradients, of this norm, to the weights; returns (learning rate, whether the step is skipped).

    All ranks see the same norm, so that all skip or none. A skipped step moves the learning rate and the data on, and
    does not count for the optimizer's running means.
    """
    step, scale = state.step + 1, state.loss_scale
    rate = state.learning_rate(step)
    if scale.is_dynamic:
        overflow = not math.isfinite(float(norm))
        state.loss_scale = scale.next(overflow)
        if overflow:
            state.step, state.skipped = step, state.skipped + 1
            return rate, True
    for bucket in state.buckets:
        bucket.copy_to_optimizer()
    shared = mesh.stage if state.ownership.zero else mesh.tp  # the ranks that have shards of the same weights
    state.optimizer.update_(
        state.param_slices,
        step=step - state.skipped,
        learning_rate=rate,
        factor=clip_factor(norm, train.gradient_clip) / scale.value,
        num_weights=state.num_weights,
        total=lambda sums: all_reduce(sums, shared),
        watch=state.thermometers.watch,
    )
    state.step = step
    state.ownership.publish(copied=True)
    return rate, False
