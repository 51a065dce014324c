"""The loss of hidden states: what a student's blocks hand on, against what a teacher's do.

    Σ over tokens · weight · mean over features (A x − t)²        x [s, b, h], t [s, b, g], A [g, h] or none

It is computed behind the block that it is of, on the stage that has it, and enters the graph there: the stream passes
through an operator whose backward gives the loss a gradient of 1. So no pipeline schedule knows of it. (As losses of
experts' balance are added, e.g. in Megatron-LM's `MoEAuxLossAutoScaler`.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.mesh.autograd import apply
from colonnade.mesh.collectives import reduce_from
from colonnade.tensor_parallel.parallel import Parallel


@dataclass(frozen=True)
class HiddenTargets:
    """What a teacher's blocks hand on of a micro-batch, for blocks of this rank."""

    states: Mapping[str, Tensor]
    """[s, b, g] by the student's unit."""
    weights: Tensor
    """[s, b]: what each token's mean squared error counts in the result."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """[] by unit: of those that have run."""


def matched(x: Tensor, unit: str, targets: HiddenTargets, to_teacher: nn.Module | None, parallel: Parallel) -> Tensor:
    """x [s, b, h] (sequence parallel: [s/tp, b, h]) as it is, with the loss of what the unit hands on in its graph.
    Sequence parallel: forward all-reduces the loss over tp.
    """
    if unit not in targets.states:
        return x
    first = parallel.first_position(len(x))
    mine = slice(first, first + len(x))
    y = x if to_teacher is None else to_teacher(x)
    wide = torch.promote_types(y.dtype, torch.float32)
    errors = (y.to(wide) - targets.states[unit][mine].to(wide)).square().mean(-1)
    loss = (errors * targets.weights[mine].to(wide)).sum()
    loss = reduce_from(loss, parallel.tp) if parallel.sequence_parallel else loss
    targets.losses[unit] = loss.detach()
    return apply(_WithLoss, x, loss)


class _WithLoss(torch.autograd.Function):
    """x; its backward hands the loss a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=ctx.dtype)


def added_losses(targets: Iterable[HiddenTargets | None], like: Tensor) -> Tensor:
    """The sum of what blocks of this rank have added, [] of the type and device of `like`."""
    every = [loss.to(like) for each in targets if each is not None for loss in each.losses.values()]
    return torch.stack(every).sum() if every else like.new_zeros(())
