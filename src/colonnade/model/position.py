"""How positions enter the model: learned vectors, ALiBi's slopes, or rotary angles (`rotary.py`)."""

from typing import Any

import torch
from torch import Tensor, nn

from colonnade.kernels.products import gradient_of
from colonnade.mesh.autograd import apply
from colonnade.tensor_parallel.rows import add_rows_


class Positions(nn.Module):
    """A learned vector for each position: [seq_length, h]."""

    def __init__(self, seq_length: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(seq_length, hidden_size))

    def forward(self, x: Tensor, at: int | Tensor) -> Tensor:
        """Add to x [s, b, h] the vectors of its positions: those from `at` on, or int64 [s, b]."""
        if isinstance(at, int):
            assert at + len(x) <= len(self.weight), f"positions {at} to {at + len(x)} of {len(self.weight)}"
            return apply(_AddPositions, x, self.weight, at)
        assert at.shape == x.shape[:2], f"positions {tuple(at.shape)} of a stream {tuple(x.shape)}"
        return apply(_AddPositionsAt, x, self.weight, at)


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.rows = slice(first, first + len(x))
        return x + weight[ctx.rows, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        if weight.requires_grad:
            gradient = gradient_of(weight)
            gradient[ctx.rows].add_(grad.sum(1, dtype=gradient.dtype))
        return grad, None, None


class _AddPositionsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(weight, at)
        return x + nn.functional.embedding(at, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, at = ctx.saved_tensors
        if weight.requires_grad:
            add_rows_(gradient_of(weight), at, grad)
        return grad, None, None


def alibi_slopes(num_heads: int) -> list[float]:
    """How much a head lowers a score for each token of distance: one positive number a head.

    A geometric sequence for a power of two, 2^(−8/n), 2^(−16/n), … 2^(−8); for other numbers of heads, that of the next
    smaller power of two, and then every other one of the next larger (Press, Smith, Lewis: "Train Short, Test Long",
    2022, and their code).
    """
    power = 1 << (num_heads.bit_length() - 1)
    return _geometric(power) + _geometric(2 * power)[::2][: num_heads - power]


def _geometric(count: int) -> list[float]:
    return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]
