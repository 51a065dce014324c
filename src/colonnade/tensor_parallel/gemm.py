"""The matrix products of a linear layer, and where their weight gradients go.

Every parameter owns its gradient from the start (`parameter.grad`, a view of a flat buffer, fp32 for 16-bit weights),
so a weight gradient is added by the product itself: `grad += gᵀ x` is one GEMM with its sum, where autograd would
make a second tensor of the weight's size and add that. Nothing else in the program may replace `parameter.grad`.

bf16 on a CPU without AMX: its bf16 units are slower than its fp32 units (measured on 2048 × 2048 matrices: 188
against 365 GFLOP/s on two cores of an Emerald Rapids without AMX), so bf16 operands are multiplied in fp32 and the
result is rounded to bf16. The sums are at least as exact as the hardware's own.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.mesh.autograd import apply


@cache
def multiplies_natively(dtype: torch.dtype, device_type: str) -> bool:
    """Whether matrices of `dtype` are multiplied fastest as they are; otherwise they are widened to fp32 first."""
    if dtype is not torch.bfloat16 or device_type != "cpu":
        return True
    return bool(torch.cpu._is_amx_tile_supported())


def widen(x: Tensor) -> Tensor:
    """`x` in the type that its products are computed in."""
    return x if multiplies_natively(x.dtype, x.device.type) else x.float()


def gradient_of(parameter: Tensor) -> Tensor:
    """The parameter's gradient, zeros at first where nobody gave it a buffer: fp32 for 16-bit weights."""
    if parameter.grad is None:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        parameter.grad_dtype = dtype
        parameter.grad = torch.zeros_like(parameter, dtype=dtype)
    return parameter.grad


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += aᵀ b, summed in the type of `total`: a [k, m], b [k, n], total [m, n]."""
    a, b = widen(a), widen(b)
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b)
    elif a.is_cuda:
        total.add_(torch.mm(a.t(), b, out_dtype=total.dtype))
    else:
        total.add_(a.t() @ b)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        rows = widen(x.reshape(-1, x.shape[-1]))
        wide_bias = None if bias is None else bias.to(rows.dtype)
        y = nn.functional.linear(rows, widen(weight), wide_bias)
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight, bias = ctx.saved_tensors
        rows = widen(grad.reshape(-1, grad.shape[-1]))
        dx = (rows @ widen(weight)).to(x.dtype).view(x.shape) if ctx.needs_input_grad[0] else None
        add_product_(gradient_of(weight), rows, x.reshape(-1, x.shape[-1]))
        if bias is not None:
            gradient = gradient_of(bias)
            gradient.add_(rows.sum(0, dtype=gradient.dtype))
        return dx, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b: [..., i] -> [..., o]. Backward adds to `weight.grad` and `bias.grad` directly."""
    y: Tensor = apply(_Linear, x, weight, bias)
    return y
