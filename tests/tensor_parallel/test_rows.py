"""Adding to rows of a table, on both kinds of device."""

from contextlib import nullcontext

import pytest
import torch

from colonnade.tensor_parallel.rows import add_rows_
from tests.emulated import NoWaiting, emulated_cuda


@pytest.mark.parametrize("device", [nullcontext, emulated_cuda])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_mine_are_added(device: type, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5, (40, 3), generator=generator)
    values = torch.randint(-8, 8, (40, 3, 4), generator=generator).to(dtype)  # whose sums are exact in any order
    values[0, 0] = torch.inf
    mine = torch.rand(40, 3, generator=generator) < 0.5
    mine[0, 0] = False  # what is not mine is nothing at all
    for given in (None, mine):
        expected = torch.ones(5, 4)
        for at in torch.ones_like(mine).nonzero() if given is None else given.nonzero():
            expected[rows[*at]] += values[*at].float()
        total = torch.ones(5, 4)
        with device():
            add_rows_(total, rows, values, given)
        assert torch.equal(total, expected)


def test_on_cuda_nothing_is_waited_for() -> None:
    """No operator whose result's shape depends on numbers, which the program would have to read."""
    rows, mine = torch.arange(6), torch.arange(6) < 3
    with emulated_cuda(), NoWaiting():
        add_rows_(torch.zeros(6, 2), rows, torch.ones(6, 2), mine)
    with pytest.raises(AssertionError, match="nonzero"), NoWaiting():
        add_rows_(torch.zeros(6, 2), rows, torch.ones(6, 2), mine)
