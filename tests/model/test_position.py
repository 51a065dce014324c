"""Learned positions and ALiBi's slopes."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade.model.position import Positions, alibi_slopes
from tests.emulated import backward, emulated_cuda
from tests.model.plain import plain_slopes
from tests.tensor_parallel.shards import drawn


def test_the_papers_slopes() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]  # section 3 of the paper
    assert alibi_slopes(16) == [2.0 ** (-i / 2) for i in range(1, 17)]
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


@given(st.integers(1, 200))
def test_slopes_of_any_number_of_heads_are_the_published_codes(num_heads: int) -> None:
    slopes = alibi_slopes(num_heads)
    assert slopes == pytest.approx(plain_slopes(num_heads), rel=1e-12)
    assert len(set(slopes)) == num_heads and all(0 < slope < 1 for slope in slopes)


@pytest.mark.parametrize("first", [0, 2])
def test_positions_are_added(first: int) -> None:
    positions = Positions(6, 4).double()
    with torch.no_grad():
        positions.weight.copy_(drawn(6, 4, seed=0))
    x, grad = drawn(3, 2, 4, seed=1).requires_grad_(), drawn(3, 2, 4, seed=2)
    y = positions(x, first)
    torch.testing.assert_close(y, x + positions.weight[first : first + 3, None], rtol=0, atol=0)
    y.backward(grad)
    assert torch.equal(x.grad, grad)  # type: ignore[arg-type]
    expected = torch.zeros(6, 4, dtype=torch.float64)
    expected[first : first + 3] = grad.sum(1)
    torch.testing.assert_close(positions.weight.grad, expected, rtol=1e-14, atol=1e-14)
    positions(x[:2], first + 1).backward(grad[:2])
    expected[first + 1 : first + 3] += grad[:2].sum(1)
    torch.testing.assert_close(positions.weight.grad, expected, rtol=1e-14, atol=1e-14)


def test_positions_that_were_not_learned_do_not_exist() -> None:
    with pytest.raises(AssertionError, match="positions 4 to 7 of 6"):
        Positions(6, 4)(torch.zeros(3, 2, 4), 4)


def test_gradients_of_16_bits_are_summed_in_32() -> None:
    positions, grad = Positions(3, 4).bfloat16(), drawn(3, 256, 4, seed=2).bfloat16()
    positions(drawn(3, 256, 4, seed=1).bfloat16().requires_grad_(), 0).backward(grad)
    assert positions.weight.grad is not None and positions.weight.grad.dtype is torch.float32
    torch.testing.assert_close(positions.weight.grad.double(), grad.double().sum(1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("at", [1, torch.tensor([[1, 1], [2, 2], [0, 3]])], ids=["one after the other", "drawn"])
def test_a_frozen_table_has_no_gradient(at: int | torch.Tensor) -> None:
    positions, grad = Positions(6, 4).double().requires_grad_(False), drawn(3, 2, 4, seed=2)
    x = drawn(3, 2, 4, seed=1).requires_grad_()
    positions(x, at).backward(grad)
    assert torch.equal(x.grad, grad) and positions.weight.grad is None  # type: ignore[arg-type]


class InOneOrder(TorchDispatchMode):
    """Within: what adds to rows of a CUDA tensor with atomics, in any order, fails."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert not name.startswith(("index_add", "scatter_add", "scatter_reduce")), f"{name} adds in any order"
        return function(*args, **(kwargs or {}))


def test_on_a_gpu_gradients_of_drawn_positions_are_added_in_one_order() -> None:
    """So that a run that is resumed is the same to the bit."""
    positions, grad = Positions(4, 2), torch.arange(12.0).view(3, 2, 2)
    at, x = torch.tensor([[1, 1], [2, 1], [0, 2]]), torch.zeros(3, 2, 2, requires_grad=True)
    with emulated_cuda(), InOneOrder():
        backward(positions(x, at), grad)
    assert positions.weight.grad is not None
    assert positions.weight.grad.tolist() == [[8.0, 9.0], [8.0, 11.0], [14.0, 16.0], [0.0, 0.0]]
