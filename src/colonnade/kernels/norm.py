"""Normalisations, computed in fp32 whatever the type of their input (YaLM's list of what stays exact).

LayerNorm (Ba, Kiros, Hinton, 2016) and RMSNorm (Zhang, Sennrich: "Root Mean Square Layer Normalization", 2019).
Their weight gradients are added to `weight.grad` and `bias.grad` in
their own type, as those of linear layers are: never rounded to 16 bits between micro-batches or ranks. Where theirs are
multiplied by compiled kernels, backward is one pass of another, without copies in fp32.
"""

from typing import Any

import torch
from torch import Tensor

from colonnade.kernels import compiled, gpu
from colonnade.kernels.choice import Products, usual
from colonnade.kernels.products import gradient_of, in_type
from colonnade.mesh.autograd import apply


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, *, products: Products | None = None
) -> Tensor:
    """[..., h], weight [h] -> [..., h] in `dtype`. Backward adds to `weight.grad` directly. `products`: the kernels
    (None: the usual ones); so below.
    """
    y: Tensor = apply(_RMSNorm, x, weight, epsilon, dtype, products or usual())
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, products: Products) -> Tensor:
        ctx.products = products
        if x.is_cuda:
            y, scale = gpu.rms_norm(x, _beside(weight, x), epsilon)
            ctx.save_for_backward(x, weight, scale)
            return in_type(y, dtype)
        wide = _exact(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(_exact(weight)).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        if gpu.differentiates(x):
            dx, of_weight, _ = gpu.norm_backward(in_type(grad, x.dtype), x, weight, None, scale)
            if weight.requires_grad:
                gradient_of(weight).add_(of_weight)
            return dx, None, None, None, None
        if _is_compiled(grad, x, ctx.products):
            return _compiled_backward(grad, x, weight, None, None, scale), None, None, None, None
        normed, g = _exact(x) * scale, _exact(grad)
        rows = tuple(range(x.ndim - 1))
        if weight.requires_grad:
            gradient_of(weight).add_((g * normed).sum(rows))
        g = g * _exact(weight)
        dx = g.sub_(normed.mul_((g * normed).mean(-1, keepdim=True))).mul_(scale)
        return in_type(dx, x.dtype), None, None, None, None


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
    *,
    products: Products | None = None,
) -> Tensor:
    """[..., h], weight and bias [h] -> [..., h] in `dtype`. Backward adds to their `grad` directly."""
    y: Tensor = apply(_LayerNorm, x, weight, bias, epsilon, dtype, products or usual())
    return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        dtype: torch.dtype,
        products: Products,
    ) -> Tensor:
        ctx.products = products
        operands = x, weight.shape, _beside(weight, x), None if bias is None else _beside(bias, x), epsilon
        y, mean, deviation = torch.native_layer_norm(*operands)
        ctx.save_for_backward(x, weight, bias, mean, deviation)
        return in_type(y, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, deviation = ctx.saved_tensors
        if x.is_cuda and x.dtype.itemsize == 2:
            return _backward_of_16_bits(in_type(grad, x.dtype), *ctx.saved_tensors), None, None, None, None, None
        if _is_compiled(grad, x, ctx.products):
            return _compiled_backward(grad, x, weight, bias, mean, deviation), None, None, None, None, None
        # in fp32, inputs too: beside 16-bit inputs the kernels know weight gradients to 16 bits only
        wide_bias = None if bias is None else _exact(bias)
        wide = _exact(grad), _exact(x), weight.shape, _exact(mean), _exact(deviation), _exact(weight), wide_bias
        trained = weight.requires_grad, bias is not None and bias.requires_grad
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(*wide, [True, *trained])
        if weight.requires_grad:
            gradient_of(weight).add_(dw)
        if trained[1]:
            gradient_of(bias).add_(db)
        return in_type(dx, x.dtype), None, None, None, None, None


def _backward_of_16_bits(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, deviation: Tensor
) -> Tensor:
    """By a kernel of our own where it is there. Else dx is by CUDA's, which computes in fp32 inside, and weight
    gradients are computed in fp32 apart, with one fp32 copy of x.
    """
    if gpu.differentiates(x):
        found, *gradients = gpu.norm_backward(grad, x, weight, mean, deviation)
        for parameter, gradient in zip((weight, bias), gradients, strict=True):
            if parameter is not None and parameter.requires_grad:
                gradient_of(parameter).add_(gradient)
        return found
    narrow_bias = None if bias is None else bias.to(x.dtype)
    operands = grad, x, weight.shape, mean, deviation, weight.to(x.dtype), narrow_bias
    dx: Tensor = torch.ops.aten.native_layer_norm_backward(*operands, [True, False, False])[0]
    rows = tuple(range(x.ndim - 1))
    if bias is not None and bias.requires_grad:
        gradient_of(bias).add_(grad.sum(rows, dtype=torch.float32))
    if weight.requires_grad:
        gradient_of(weight).add_((x - mean).mul_(deviation).mul_(grad).sum(rows))  # mean [..., 1] in fp32 widens
    return dx


def _is_compiled(grad: Tensor, x: Tensor, products: Products) -> bool:
    """A plan is of torch's operators."""
    return products.of(x).weight_gradient == "compiled" and grad.dtype == x.dtype and not x.is_meta


def _compiled_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None, scale: Tensor
) -> Tensor:
    of_weight, of_bias = (
        gradient_of(each) if each is not None and each.requires_grad else None for each in (weight, bias)
    )
    return compiled.norm_backward(grad, x, _exact(weight), mean, scale, of_weight=of_weight, of_bias=of_bias)


def _exact(x: Tensor) -> Tensor:
    """`x` in fp32, or in fp64."""
    return x if x.dtype.itemsize > 2 else x.float()


def _beside(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in the type that the kernel wants beside x.

    On CUDA that is x's own: it computes in fp32 inside. On CPUs it is fp32, or mean and deviation would be rounded.
    """
    return in_type(weight, x.dtype) if x.is_cuda else _exact(weight)
