"""What crosses from unit to unit: where its gradients begin, and what has none."""

import pytest
import torch
from torch import Tensor

from colonnade.pipeline.carry import backward_from, complete, gradient_buffers, gradients_or_zeros, leaves


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


def test_backward_takes_the_losses_that_have_a_graph() -> None:
    """Where only one head is trained, the other's loss is a number."""
    x = leaf(2.0, 3.0)
    backward_from((torch.tensor(5.0), (x * x).sum()), None)
    assert x.grad is not None and x.grad.tolist() == [4.0, 6.0]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_gradient_of_what_is_not_trained_goes_nowhere(frozen: int) -> None:
    """Behind frozen weights the carry has no graph, and who reads it sends a gradient all the same."""
    x, grad = leaf(2.0, 3.0), torch.tensor([1.0, 10.0], dtype=torch.float64)
    out = [x * x, x * x]
    out[frozen] = out[frozen].detach()
    backward_from(tuple(out), (grad, grad))
    assert x.grad is not None and x.grad.tolist() == [4.0, 60.0]


def test_backward_without_any_graph_does_nothing() -> None:
    out = torch.ones(2), torch.ones(3)
    backward_from(out, (torch.ones(2), None))
    assert [x.grad for x in out] == [None, None]


def test_backward_adds_what_all_tensors_of_a_carry_send_back() -> None:
    """Each gradient goes to its own tensor; what has none, and integers, are passed over."""
    x, y = leaf(2.0), leaf(3.0)
    out = x * y, torch.tensor([7]), x * x, y * y
    ones = torch.ones(1, dtype=torch.float64)
    backward_from(out, (ones, None, 10.0 * ones, None))
    assert x.grad is not None and y.grad is not None
    assert (x.grad.item(), y.grad.item()) == (3.0 + 10.0 * 4.0, 2.0)


def test_leaves_are_the_same_numbers_without_the_graph_before_them() -> None:
    x, lengths = leaf(2.0), torch.tensor([3])
    for wanted in (True, False):
        start, numbers = leaves((x * x, lengths), gradients=wanted)
        assert start.is_leaf and start.requires_grad is wanted and not numbers.requires_grad
    (again,) = leaves((x,))
    assert again.data_ptr() == x.data_ptr() and again is not x


def test_only_floating_point_tensors_have_gradients() -> None:
    carry = torch.ones(2, dtype=torch.bfloat16), torch.tensor([3]), torch.ones(2, 3)
    assert [x is not None for x in gradient_buffers(carry)] == [True, False, True]
    given = torch.full((2,), 4.0, dtype=torch.bfloat16)
    first, second, third = gradients_or_zeros(carry, (given, None, None))
    assert first is given and second is None
    assert third is not None and torch.equal(third, torch.zeros(2, 3))
    assert complete((given,)) == (given,)
    with pytest.raises(AssertionError, match="is there"):
        complete((given, None))
