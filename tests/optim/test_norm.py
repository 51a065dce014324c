"""Norms against sums in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from colonnade.optim.norm import squared_norm, squared_norms, zero_if_finite
from tests.emulated import emulated_cuda


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_is_the_sum_of_squares(length: int, dtype: torch.dtype) -> None:
    x = torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(length)).to(dtype)
    rtol = 1e-14 if dtype is torch.float64 else 1e-6
    torch.testing.assert_close(squared_norm(x), x.double().square().sum(), rtol=rtol, atol=0)


def test_who_counts_no_vector_adds_a_zero_of_the_same_type() -> None:
    """A rank whose weights are all counted by others."""
    some, none = squared_norms([torch.tensor([3.0, 4.0]), torch.ones(2)]), squared_norms([])
    assert some.tolist() == pytest.approx([25.0, 2.0]) and none.tolist() == []
    assert some.sum().dtype == none.sum().dtype == torch.float64


def test_long_fp32_vectors() -> None:
    x = torch.full((20_000_001,), 0.02)
    torch.testing.assert_close(squared_norm(x), x.double().square().sum(), rtol=1e-7, atol=0)
    assert not torch.isclose(torch.linalg.vector_norm(x).double().square(), x.double().square().sum(), rtol=1e-4)


def test_squares_beyond_the_range_of_fp32() -> None:
    assert squared_norm(torch.full((300,), 1e18)).item() == pytest.approx(3e38, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", [nullcontext, emulated_cuda], ids=["cpu", "cuda"])
def test_zero_is_told_of_numbers_that_are_finite_alone(
    device: Callable[[], AbstractContextManager[None]], dtype: torch.dtype
) -> None:
    large = torch.finfo(dtype).max
    for value, is_finite in (
        (large, True),
        (-large, True),
        (torch.inf, False),
        (-torch.inf, False),
        (torch.nan, False),
    ):
        with device():
            told = zero_if_finite([torch.full((3,), large, dtype=dtype), torch.tensor([1.0, value], dtype=dtype)])
        assert told.dtype == torch.float64 and told.isnan() == (not is_finite) and (not is_finite or told == 0)
    assert zero_if_finite([]) == 0
