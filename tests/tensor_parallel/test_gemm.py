"""Products that add their weight gradients themselves, against torch's own."""

import pytest
import torch
from torch import Tensor, nn

from colonnade.tensor_parallel.gemm import add_product_, gradient_of, linear, widen
from tests.tensor_parallel.shards import drawn


def both(bias: bool, seed: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(y, dx, dW[, db]) of ours and of torch."""
    results = []
    for product in (linear, nn.functional.linear):
        x = drawn(3, 2, 8, seed=seed).requires_grad_()
        weight = nn.Parameter(drawn(5, 8, seed=seed + 1))
        offset = nn.Parameter(drawn(5, seed=seed + 2)) if bias else None
        y = product(x, weight, offset)
        y.backward(drawn(3, 2, 5, seed=seed + 3))
        parameters = [weight] if offset is None else [weight, offset]
        gradients = [t.grad for t in (x, *parameters) if t.grad is not None]
        assert len(gradients) == len(parameters) + 1
        results.append((y.detach(), *gradients))
    return results[0], results[1]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_torchs(bias: bool) -> None:
    ours, theirs = both(bias)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-13, atol=1e-13)


def test_an_input_without_gradient() -> None:
    weight = nn.Parameter(drawn(5, 8, seed=1))
    linear(drawn(2, 8, seed=0), weight).sum().backward()
    torch.testing.assert_close(weight.grad, drawn(2, 8, seed=0).sum(0).expand(5, 8), rtol=1e-13, atol=1e-13)


def test_gradients_are_added_to_the_buffer_that_is_there() -> None:
    weight = nn.Parameter(drawn(5, 8, seed=1))
    flat = torch.ones(40, dtype=torch.float64)
    weight.grad = flat.view(5, 8)
    x = drawn(2, 8, seed=0)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(flat.view(5, 8), 1 + x.sum(0).expand(5, 8), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_gradients_are_at_least_fp32(dtype: torch.dtype, wide: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    gradient = gradient_of(weight)
    assert gradient.dtype is wide and not gradient.any() and gradient_of(weight) is gradient is weight.grad


def test_products_are_added_in_the_type_of_the_total() -> None:
    a, b = drawn(64, 3, seed=1).bfloat16(), drawn(64, 4, seed=2).bfloat16()
    total = torch.full((3, 4), 1000.0)
    add_product_(total, a, b)
    expected = 1000 + a.double().t() @ b.double()
    # where bf16 products are rounded to bf16, that is half a unit in the 8th bit of a product of size ~ 20
    assert (total - expected).abs().max() <= 2.0**-9 * (expected - 1000).abs().max()


def test_bf16_results_are_the_rounded_exact_ones() -> None:
    x, weight, bias = (drawn(*shape, seed=seed).bfloat16() for seed, shape in enumerate([(7, 64), (5, 64), (5,)]))
    exact = x.double() @ weight.double().t() + bias.double()
    y = linear(x, weight, bias)
    assert y.dtype is torch.bfloat16
    # one rounding of the sum (2⁻⁹), and one of the product before it where the bias is added apart
    assert ((y - exact).abs() <= 2.0**-8 * (exact.abs() + bias.double().abs()) + 1e-5).all()


def test_only_bf16_is_ever_widened() -> None:
    assert widen(torch.ones(1)).dtype is torch.float32 and widen(torch.ones(1).double()).dtype is torch.float64
    assert widen(torch.ones(1).bfloat16()).dtype in (torch.float32, torch.bfloat16)
