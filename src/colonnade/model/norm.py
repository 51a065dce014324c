"""Layer normalisation, computed in fp32 whatever the type of its input (YaLM's list of what stays exact).

(Ba, Kiros, Hinton: "Layer Normalization", 2016.) Its weight gradients are added to `weight.grad` and `bias.grad` in
their own type, as those of linear layers are: never rounded to 16 bits between micro-batches or ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn

from colonnade.mesh.autograd import apply
from colonnade.tensor_parallel.gemm import gradient_of


class Norm(nn.Module):
    """(x − mean) / √(variance + epsilon) · weight + bias, over the last dim."""

    def __init__(self, hidden_size: int, *, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., h] -> [..., h] in `dtype`; None: in the weights' type, which is that of the computation."""
        y: Tensor = apply(_LayerNorm, x, self.weight, self.bias, self.epsilon, dtype or self.weight.dtype)
        return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        operands = x, weight.shape, _beside(weight, x), _beside(bias, x), epsilon
        y, mean, deviation = torch.native_layer_norm(*operands)
        ctx.save_for_backward(x, weight, bias, mean, deviation)
        return y.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, deviation = ctx.saved_tensors
        if x.is_cuda and x.dtype.itemsize == 2:
            return _backward_of_16_bits(grad.to(x.dtype), *ctx.saved_tensors), None, None, None, None
        # in fp32, inputs too: beside 16-bit inputs the kernels know weight gradients to 16 bits only
        wide = _exact(grad), _exact(x), weight.shape, _exact(mean), _exact(deviation), _exact(weight), _exact(bias)
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(*wide, [True, True, True])
        gradient_of(weight).add_(dw)
        gradient_of(bias).add_(db)
        return dx.to(x.dtype), None, None, None, None


def _backward_of_16_bits(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, deviation: Tensor
) -> Tensor:
    """dx by CUDA's kernel, which computes in fp32 inside; weight gradients in fp32 apart, with one fp32 copy of x."""
    operands = grad, x, weight.shape, mean, deviation, weight.to(x.dtype), bias.to(x.dtype)
    dx: Tensor = torch.ops.aten.native_layer_norm_backward(*operands, [True, False, False])[0]
    rows = tuple(range(x.ndim - 1))
    gradient_of(bias).add_(grad.sum(rows, dtype=torch.float32))
    gradient_of(weight).add_((x - mean).mul_(deviation).mul_(grad).sum(rows))  # mean [..., 1] in fp32 widens
    return dx


def _exact(x: Tensor) -> Tensor:
    """`x` in fp32, or in fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _beside(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in the type that the kernel wants beside x.

    On CUDA that is x's own: it computes in fp32 inside. On CPUs it is fp32, or mean and deviation would be rounded.
    """
    return weight.to(x.dtype) if x.is_cuda else _exact(weight)
