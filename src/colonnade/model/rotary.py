"""Rotary positions: queries and keys turned in planes by angles that grow with the position.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. Features i and i + d/2 of a
head are a plane (the order of Hugging Face's LLaMA). Longer contexts: "Extending Context Window of Large Language
Models via Positional Interpolation" (Chen et al., 2023: linear), "YaRN" (Peng et al., 2023), and LLaMA 3.1's rule ("The
Llama 3 Herd of Models", 2024).
"""

import math

import torch
from torch import Tensor

from colonnade.config.model import RotaryConfig
from colonnade.upload import upload


def inverse_wavelengths(rotary: RotaryConfig, head_dim: int) -> Tensor:
    """[radians a position] of each plane, float64 [d/2], on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = float(rotary.base) ** -exponents
    if rotary.scaling == "none":
        return plain
    if rotary.scaling == "linear":
        return plain / rotary.factor
    kept = (_yarn_kept if rotary.scaling == "yarn" else _llama3_kept)(rotary, plain, head_dim)
    return plain * kept + plain / rotary.factor * (1.0 - kept)


def attention_scale(rotary: RotaryConfig) -> float:
    """What queries and keys are multiplied with: YaRN's temperature (its equation 22), 1 without."""
    return 0.1 * math.log(rotary.factor) + 1.0 if rotary.scaling == "yarn" and rotary.factor > 1.0 else 1.0


def _yarn_kept(rotary: RotaryConfig, plain: Tensor, head_dim: int) -> Tensor:
    """How far each plane's angle is left alone, 0 … 1: a ramp over planes, between two numbers of turns.

    Its ends cross where they lie beside all planes: an original length of a few tokens, or a small base. As in the
    authors' code the ramp falls then, and no plane is divided, or all are.
    """
    assert rotary.original_length is not None, "checked with the configuration"

    def plane(turns: float) -> float:
        length = float(rotary.original_length or 0)
        return head_dim * math.log(length / (turns * 2.0 * math.pi)) / (2.0 * math.log(rotary.base))

    low, high = max(math.floor(plane(rotary.beta_fast)), 0), min(math.ceil(plane(rotary.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)
    return 1.0 - ramp.clamp(0.0, 1.0)


def _llama3_kept(rotary: RotaryConfig, plain: Tensor, head_dim: int) -> Tensor:
    """How far each plane's angle is left alone, 0 … 1: a ramp over turns in the original length."""
    assert rotary.original_length is not None, "checked with the configuration"
    turns = rotary.original_length * plain / (2.0 * math.pi)
    low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


class Rotary:
    """Turns the first `width` features of each of a layer's heads; features i and i + width/2 are a plane then."""

    def __init__(self, rotary: RotaryConfig, width: int) -> None:
        self.inverse, self.scale = inverse_wavelengths(rotary, width), attention_scale(rotary)

    def turn(self, positions: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
        """[b, n, s, d] each, at int64 positions [s] or [s, b] on their device -> the same, turned. Angles are computed
        in fp64.
        """
        places = positions.to(torch.float64)
        angles = places[..., None] * upload(self.inverse, places.device)  # [s, w/2] or [s, b, w/2]
        angles = angles[None, None] if positions.ndim == 1 else angles.transpose(0, 1)[:, None]  # [1 or b, 1, s, w/2]
        dtype = torch.promote_types(heads[0].dtype, torch.float32)
        cos, sin = ((of(angles) * self.scale).to(dtype) for of in (torch.cos, torch.sin))
        return tuple(_turn(x, cos, sin) for x in heads)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.to(cos.dtype).chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
