"""What crosses from unit to unit: a tuple of tensors that the model describes, and its gradient.

A decoder-only model carries one tensor, the residual stream. A decoder that reads an encoder's output carries that as a
second one, which units hand on as it is. Integers may cross too. Floating-point tensors have gradients, others have
none:

    carry        (x [s, b, h], memory [m, b, h], lengths [b] int64)
    gradients    (dx,          dmemory,          None)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colonnade.mesh.autograd import apply

Carry = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]
"""One entry for each tensor of a carry; None where it has no gradient."""


def leaves(carry: Carry, *, gradients: bool = True) -> Carry:
    """The same numbers as the start of a graph of its own. No copy. `gradients`: whether anybody wants theirs."""
    return tuple(x.detach().requires_grad_(gradients and x.is_floating_point()) for x in carry)


def complete(entries: Gradients) -> Carry:
    """All entries, none of which may be missing."""
    present = tuple(x for x in entries if x is not None)
    assert len(present) == len(entries), "every tensor of a carry is there"
    return present


def gradient_buffers(carry: Carry) -> Gradients:
    """Memory for the gradients of a carry, given memory for the carry."""
    return tuple(x if x.is_floating_point() else None for x in carry)


def gradients_or_zeros(carry: Carry, gradients: Gradients) -> Gradients:
    """With zeros for what has a gradient and was not used by anybody: the receiver expects all of them."""
    return tuple(
        torch.zeros_like(x) if gradient is None and x.is_floating_point() else gradient
        for x, gradient in zip(carry, gradients, strict=True)
    )


def backward_from(out: Carry, gradients: Gradients | None) -> None:
    """Backward through the graph of `out`, given the gradients of its tensors. None: `out` is a loss."""
    if gradients is None:
        torch.autograd.backward([loss for loss in out if loss.requires_grad])
        return
    starts = [(x, g) for x, g in zip(out, gradients, strict=True) if g is not None and x.requires_grad]
    if starts:
        torch.autograd.backward(apply(_Start, *(x for x, _ in starts), *(g for _, g in starts)))


class _Start(torch.autograd.Function):
    """A number that nobody reads; its backward hands each x the gradient given for it. (`torch.autograd.backward(x,
    gradient)` does the same, and loads SymPy to compare two shapes: 35 MB and the better part of a second a rank.)
    """

    @staticmethod
    def forward(ctx: Any, *starts: Tensor) -> Tensor:
        ctx.gradients = starts[len(starts) // 2 :]
        return starts[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, unread: Tensor) -> Sequence[Tensor | None]:
        return *ctx.gradients, *(None for _ in ctx.gradients)
