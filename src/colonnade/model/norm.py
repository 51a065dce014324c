"""The normalisations of a model as modules; `kernels/norm.py` computes them."""

import torch
from torch import Tensor, nn

from colonnade.config.model import ModelConfig
from colonnade.kernels.choice import Products
from colonnade.kernels.norm import layer_norm, rms_norm


def norm_of(model: ModelConfig, products: Products) -> "Norm | RMSNorm":
    """The normalisation of the residual stream that `model.norm` names."""
    if model.norm == "rmsnorm":
        return RMSNorm(model.hidden_size, epsilon=model.norm_epsilon, products=products)
    return Norm(model.hidden_size, epsilon=model.norm_epsilon, bias=model.bias, products=products)


class RMSNorm(nn.Module):
    """x / √(mean of squares + epsilon) · weight, over the last dim."""

    def __init__(self, hidden_size: int, *, epsilon: float, products: Products | None = None) -> None:
        super().__init__()
        self.epsilon, self.products = epsilon, products
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., h] -> [..., h] in `dtype`; None: in the weights' type, which is that of the computation."""
        return rms_norm(x, self.weight, self.epsilon, dtype or self.weight.dtype, products=self.products)


class Norm(nn.Module):
    """(x − mean) / √(variance + epsilon) · weight + bias, over the last dim."""

    def __init__(
        self, hidden_size: int, *, epsilon: float, bias: bool = True, products: Products | None = None
    ) -> None:
        super().__init__()
        self.epsilon, self.products = epsilon, products
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., h] -> [..., h] in `dtype`; None: in the weights' type, which is that of the computation."""
        return layer_norm(x, self.weight, self.bias, self.epsilon, dtype or self.weight.dtype, products=self.products)
