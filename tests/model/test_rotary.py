"""Rotary positions beside the sentence that says them: a pair of features, as a complex number, times e^(i·angle)."""

import pytest
import torch
from torch import Tensor

from colonnade.config.model import RotaryConfig
from colonnade.model.rotary import Rotary, attention_scale
from tests.tensor_parallel.shards import drawn

WIDTH = 8
FAR = torch.tensor([0, 1, 100_003, (1 << 24) + 1])  # the last one is no number of 32 bits


def turned(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """[..., s, d], a position each -> the same, in float64."""
    waves = base ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    first, second = x.double().chunk(2, -1)
    angles = positions[:, None].double() * waves
    planes = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([planes.real, planes.imag], -1)


def test_far_positions_are_turned_exactly() -> None:
    x = drawn(2, 3, len(FAR), WIDTH, seed=0)
    (y,) = Rotary(RotaryConfig(base=5e5), WIDTH).turn(FAR, x)
    torch.testing.assert_close(y, turned(x, FAR, 5e5), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_16_bits_only_the_result_is_rounded(dtype: torch.dtype) -> None:
    x = drawn(2, 3, len(FAR), WIDTH, seed=0).to(dtype)
    (y,) = Rotary(RotaryConfig(), WIDTH).turn(FAR, x)
    assert y.dtype is dtype
    half_a_digit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(y.double(), turned(x, FAR, 1e4), rtol=1.01 * half_a_digit, atol=1e-6)


def test_each_sample_has_positions_of_its_own() -> None:
    x, positions = drawn(3, 2, 5, WIDTH, seed=0), torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2], [0, 0, 1, 2, 0]])
    rotary = Rotary(RotaryConfig(), WIDTH)
    (y,) = rotary.turn(positions.t(), x)
    for sample, at in enumerate(positions):
        torch.testing.assert_close(y[sample], turned(x[sample], at, 1e4), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [2, 8, 4096, 10**9])
def test_yarns_ramp_stays_between_its_ends_whatever_the_length(length: int) -> None:
    """Also where both ends are one plane, before the first or behind the last: fast planes are left alone at least."""
    plain = Rotary(RotaryConfig(), WIDTH).inverse
    yarn = Rotary(RotaryConfig(scaling="yarn", factor=4.0, original_length=length), WIDTH).inverse
    share = yarn / plain
    assert bool(share.isfinite().all()) and float(share.min()) >= 0.25 and float(share.max()) <= 1.0
    assert bool((share.diff() <= 1e-12).all()), "the slower a plane, the more it is slowed down"


@pytest.mark.parametrize(("factor", "scale"), [(0.5, 1.0), (1.0, 1.0), (4.0, 1.1386294361)])
def test_yarn_sharpens_attention_only_where_texts_grow(factor: float, scale: float) -> None:
    """Its equation 22, as transformers reads it."""
    rotary = RotaryConfig(scaling="yarn", factor=factor, original_length=64)
    assert attention_scale(rotary) == pytest.approx(scale, rel=1e-9)
    assert attention_scale(RotaryConfig(scaling="linear", factor=factor)) == 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_features_behind_those_that_are_turned_stay_to_the_bit(dtype: torch.dtype) -> None:
    """A share of each head is turned as a head of that width would be."""
    x = torch.randn(2, 3, len(FAR), 3 * WIDTH, dtype=torch.float64).to(dtype)
    rotary = Rotary(RotaryConfig(), WIDTH)
    (whole,), (alone,) = rotary.turn(FAR, x), rotary.turn(FAR, x[..., :WIDTH])
    assert whole.dtype is alone.dtype is dtype and whole.shape == x.shape
    assert torch.equal(whole[..., :WIDTH], alone) and torch.equal(whole[..., WIDTH:], x[..., WIDTH:])
    assert not torch.equal(alone, x[..., :WIDTH])
