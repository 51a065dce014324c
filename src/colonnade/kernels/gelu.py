"""GELU (Hendrycks, Gimpel: "Gaussian Error Linear Units", 2016), exact or by tanh.

Where weight gradients are multiplied by compiled kernels it is one of these, and so is its backward; else torch's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from colonnade.kernels import compiled
from colonnade.kernels.choice import Products
from colonnade.mesh.autograd import apply


def gelu(x: Tensor, approximation: str, products: Products) -> Tensor:
    """[...] -> [...]. `approximation`: torch's name of it, "none" or "tanh"."""
    if products.of(x).weight_gradient != "compiled" or x.is_meta:  # a plan is of torch's operators
        return functional.gelu(x, approximate=approximation)
    return apply(_Compiled, x, approximation == "tanh")


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return compiled.gelu(x, tanh=tanh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return compiled.gelu_backward(grad, x, tanh=ctx.tanh), None
