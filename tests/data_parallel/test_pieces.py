"""What the optimizer steps through: all of a rank's slices, each weight under a number that all ranks give it."""

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from colonnade.data_parallel.buckets import Bucket
from colonnade.data_parallel.pieces import pieces_of
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, paper_mesh
from colonnade.optim.adamw import AdamW
from colonnade.optim.piece import Piece
from tests.data_parallel.flat import flat_model, storage, weights

RULE = AdamW(0.9, 0.999, 1e-8, 0.1)

SHAPES = {"matrix": (7, 5), "bias": (7,), "other": (3, 11), "norm": (20,)}


def pieces(buckets: list[Bucket], tp: Axis) -> list[Piece]:
    return pieces_of(buckets, [RULE.init(bucket.master) for bucket in buckets], tp)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("dp_size", [1, 2, 3, 5])
def test_spans_of_all_ranks_are_the_weights(dp_size: int, zero: int) -> None:
    """Put together by their numbers, in the order of the ranks, they are each weight once."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    for rank in range(dp_size if zero else 1):
        buckets = [
            Bucket(name, weights(SHAPES), Axis("dp", dp_size, rank), storage(zero=zero)) for name in ("one", "two")
        ]
        for piece in pieces(buckets, Axis("tp")):
            for number, at in piece.spans:
                found[number].append(piece.weights[at])
    listed = [slot.placement.parameter.shape.numel() for bucket in buckets for slot in bucket.slots]
    assert sorted(found) == list(range(len(listed)))
    for number, parts in found.items():
        whole = torch.cat(parts)
        assert len(whole) == listed[number] and (whole.diff() == 1.0).all(), "the weights here count up"


def test_pieces_are_views_of_one_kind() -> None:
    tp = paper_mesh(Layout(tp=2), 1).tp
    _, buckets = flat_model(storage(zero=2), tp=tp, dp=Axis("dp", 2, 1, (0, 1)))
    states = [RULE.init(bucket.master) for bucket in buckets]
    for piece in pieces_of(buckets, states, tp):
        piece.weights.fill_(1.0)
        piece.gradients.fill_(2.0)
        piece.state["exp_avg"].fill_(3.0)
        piece.state["exp_avg_sq"].fill_(4.0)
    for bucket, state in zip(buckets, states, strict=True):
        for _, at in bucket.my_segments():
            assert (bucket.master[at] == 1.0).all() and (bucket.applied[at] == 2.0).all()
            assert (state["exp_avg"][at] == 3.0).all() and (state["exp_avg_sq"][at] == 4.0).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_tp_ranks_have_alike_counts_on_the_first(rank: int) -> None:
    tp = paper_mesh(Layout(tp=2), rank).tp
    _, buckets = flat_model(tp=tp)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    for piece in pieces(buckets, tp):
        for number, _ in piece.spans:
            place = slots[number].placement
            assert piece.counted == (place.dim is not None or rank == 0)
            assert piece.decayed == (place.parameter.ndim == 2)


def test_padding_is_stepped_over_without_leaving_zero() -> None:
    bucket = Bucket("bucket", weights(SHAPES), Axis("dp", 3, 2), storage(zero=1))
    bucket.reduced.fill_(0.0)
    before = {span.name: bucket.master[span.at].clone() for span in bucket.my_spans()}
    AdamW(0.9, 0.999, 1e-8, 0.1).update_(
        pieces([bucket], Axis("tp")), step=1, learning_rate=0.5, factor=torch.ones((), dtype=torch.float64)
    )
    rest = bucket.master.clone()
    for span in bucket.my_spans():
        assert torch.allclose(
            bucket.master[span.at], before[span.name] * (0.95 if span.placement.parameter.ndim == 2 else 1)
        )
        rest[span.at] = 0.0
    assert not rest.any()
