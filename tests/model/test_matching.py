"""The loss of hidden states beside the sentence that says it, and what is told of several."""

import pytest
import torch
from torch import nn

from colonnade.mesh.mesh import Axis
from colonnade.model.matching import HiddenTargets, added_losses, matched
from colonnade.tensor_parallel.parallel import Parallel
from tests.tensor_parallel.shards import drawn

S, B, H, G = 5, 3, 4, 6
PARALLEL = Parallel(Axis("tp"))


@pytest.mark.parametrize("mapped", [False, True])
def test_the_loss_is_the_weighted_mean_square_and_joins_what_follows(mapped: bool) -> None:
    """Its gradient comes on top of that of the stream, whatever that is."""
    to_teacher = nn.Linear(H, G, bias=False).double() if mapped else None
    theirs, weights = drawn(S, B, G if mapped else H, seed=1), drawn(S, B, seed=2).abs()
    x, twin = (drawn(S, B, H, seed=3).requires_grad_() for _ in range(2))
    targets = HiddenTargets({"blocks.1": theirs}, weights)
    y = matched(x, "blocks.1", targets, to_teacher, PARALLEL)
    assert torch.equal(y, x)
    (y * drawn(S, B, H, seed=4)).sum().backward()
    mapped_twin = twin if to_teacher is None else twin @ to_teacher.weight.detach().t()
    expected = ((mapped_twin - theirs).square().mean(-1) * weights).sum()
    (expected + (twin * drawn(S, B, H, seed=4)).sum()).backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(targets.losses, {"blocks.1": expected.detach()}, rtol=1e-12, atol=0.0)
    assert matched(x, "blocks.0", targets, None, PARALLEL) is x, "nothing is said of this one"


def test_what_is_told_is_the_sum_over_blocks_and_microbatches() -> None:
    like = torch.zeros(2, dtype=torch.float64)
    told = [{"blocks.0": 1.0, "blocks.2": 2.0}, None, {}, {"blocks.0": 4.0}]
    targets = [
        None if each is None else HiddenTargets({}, torch.ones(1), {name: torch.tensor(x) for name, x in each.items()})
        for each in told
    ]
    found, nothing = added_losses(targets, like), added_losses([None], like)
    assert found.dtype is nothing.dtype is torch.float64 and found.shape == nothing.shape == ()
    assert (found.item(), nothing.item()) == (7.0, 0.0)
