"""How the residual stream lies over ranks."""

import pytest
import torch

from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import paper_mesh
from colonnade.tensor_parallel.parallel import Parallel


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 4, 5, 8])
def test_tokens_are_filled_up_so_that_the_stream_is_cut_evenly(size: int, length: int) -> None:
    """Behind their end, and only where it is cut."""
    tokens = torch.arange(1, 1 + 2 * length).view(length, 2)
    tp = paper_mesh(Layout(tp=size), size - 1).tp
    assert Parallel(tp).pad(tokens) is tokens
    padded = Parallel(tp, sequence_parallel=True).pad(tokens)
    assert len(padded) % size == 0 and 0 <= len(padded) - length < size
    assert torch.equal(padded[:length], tokens) and not padded[length:].any()


def test_models_of_one_process_share_nothing_that_they_fill() -> None:
    """As a student and its teacher: what one reads at a measured step is not the other's."""
    one, other = (Parallel(paper_mesh(Layout(), 0).tp) for _ in range(2))
    for name in ("probe", "weight_gradients", "adapter_masks"):
        assert getattr(one, name) is not getattr(other, name)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_begins_where_the_one_before_ends(rank: int) -> None:
    tp = paper_mesh(Layout(tp=4), rank).tp
    assert Parallel(tp, sequence_parallel=True).first_position(5) == 5 * rank
    assert Parallel(tp).first_position(20) == 0, "every rank has all of it"
