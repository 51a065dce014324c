"""What the optimizer steps through: all of a rank's slices, each weight under a number that all ranks give it."""

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from colonnade.data_parallel.buckets import Bucket
from colonnade.data_parallel.param_slices import param_slices
from colonnade.kernels.choice import Kernels, Products
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, paper_mesh
from colonnade.optim.adamw import AdamW
from colonnade.optim.param_slice import ParamSlice
from tests.data_parallel.flat import flat_model, storage, weights

RULE = AdamW(0.9, 0.999, 1e-8, 0.1)

SHAPES = {"matrix": (7, 5), "bias": (7,), "other": (3, 11), "norm": (20,)}


def slices(buckets: list[Bucket], tp: Axis) -> list[ParamSlice]:
    return param_slices(buckets, [RULE.init(bucket.master) for bucket in buckets], tp)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("dp_size", [1, 2, 3, 5])
def test_spans_of_all_ranks_are_the_weights(dp_size: int, zero: int) -> None:
    """Put together by their numbers, in the order of the ranks, they are each weight once."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    for rank in range(dp_size if zero else 1):
        buckets = [
            Bucket(name, weights(SHAPES), Axis("dp", dp_size, rank), storage(zero=zero)) for name in ("one", "two")
        ]
        for params in slices(buckets, Axis("tp")):
            for number, at in params.ranges:
                found[number].append(params.weights[at])
    listed = [param.placement.parameter.shape.numel() for bucket in buckets for param in bucket.ranges]
    assert sorted(found) == list(range(len(listed)))
    for number, parts in found.items():
        whole = torch.cat(parts)
        assert len(whole) == listed[number] and (whole.diff() == 1.0).all(), "the weights here count up"


def test_weights_that_are_trained_are_numbered_and_no_others() -> None:
    """Also behind frozen ones: an optimizer has sums for as many as are trained."""
    frozen = weights(SHAPES)
    for each in frozen:
        each.parameter.requires_grad_(False)
    buckets = [Bucket("one", frozen, Axis("dp"), storage()), Bucket("two", weights(SHAPES), Axis("dp"), storage())]
    states: list[dict[str, Tensor]] = [{}, RULE.init(buckets[1].master)]
    found = param_slices(buckets, states, Axis("tp"))
    assert {each.part for each in found} == {"two"}
    assert sorted(number for each in found for number, _ in each.ranges) == list(range(len(SHAPES)))


def test_pieces_are_views_of_one_kind() -> None:
    tp = paper_mesh(Layout(tp=2), 1).tp
    _, buckets = flat_model(storage(zero=2), tp=tp, dp=Axis("dp", 2, 1, (0, 1)))
    for bucket in buckets:
        bucket.optimizer_gradients = bucket.reduced.clone()  # as where it works on the CPU beside a GPU
    states = [RULE.init(bucket.master) for bucket in buckets]
    for params in param_slices(buckets, states, tp):
        params.weights.fill_(1.0)
        params.gradients.fill_(2.0)
        params.state["exp_avg"].fill_(3.0)
        params.state["exp_avg_sq"].fill_(4.0)
    for bucket, state in zip(buckets, states, strict=True):
        for _, at in bucket.local_groups():
            assert (bucket.master[at] == 1.0).all() and (bucket.optimizer_gradients[at] == 2.0).all()
            assert (state["exp_avg"][at] == 3.0).all() and (state["exp_avg_sq"][at] == 4.0).all()


@pytest.mark.parametrize(("rank", "zero"), [(0, 0), (0, 1), (1, 1)])
def test_every_weight_is_in_a_slice_with_its_own_factors(rank: int, zero: int) -> None:
    """However they are mixed: matrices that are partial sums of tp ranks or not, biases, each with factors or not."""
    places = [
        replace(place, name=f"{place.name}.{number}", is_partial=partial, learning_rate=rate, weight_decay=decay)
        for number, (rate, decay, partial) in enumerate(product((1.0, 0.5), (3.0, 1.0), (True, False)))
        for place in weights(SHAPES)
    ]
    bucket = Bucket("bucket", places, Axis("dp", 2, rank), storage(zero=zero))
    ranges, found = [param.placement for param in bucket.ranges], 0
    for params in slices([bucket], Axis("tp")):
        for number, at in params.ranges:
            place, found = ranges[number], found + at.stop - at.start
            assert (params.learning_rate, params.weight_decay) == (place.learning_rate, place.weight_decay)
            assert params.decayed == (place.parameter.ndim == 2)
    assert found == sum(local.at.stop - local.at.start for local in bucket.local_ranges()) > 0
    for group, at in bucket.local_groups():
        inside = [each for each in bucket.local_ranges() if at.start <= each.at.start < at.stop]
        assert inside and {each.placement.is_partial for each in inside} == {group.is_partial}


@pytest.mark.parametrize("rank", [0, 1])
def test_what_tp_ranks_have_alike_counts_on_the_first(rank: int) -> None:
    tp = paper_mesh(Layout(tp=2), rank).tp
    _, buckets = flat_model(tp=tp)
    ranges = [param for bucket in buckets for param in bucket.ranges]
    for params in slices(buckets, tp):
        for number, _ in params.ranges:
            place = ranges[number].placement
            assert params.counted == (place.dim is not None or rank == 0)
            assert params.decayed == (place.parameter.ndim == 2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_layers_read_of_16_bits_is_the_slices_own(zero: int) -> None:
    """All of this rank's slice, at the places of its weights; fp32 weights are read where they are."""
    for dtype in (torch.bfloat16, torch.float32):
        buckets = [Bucket(name, weights(SHAPES), Axis("dp", 2, 1), storage(dtype, zero)) for name in ("one", "two")]
        for params in slices(buckets, Axis("tp")):
            if dtype is torch.float32:
                assert params.copied_to is None
            else:
                assert params.copied_to is not None and params.copied_to.dtype is dtype
                params.copied_to.copy_(params.weights * 2)
        for bucket in buckets if dtype is torch.bfloat16 else []:
            assert torch.equal(bucket.shard, (bucket.master * 2).to(dtype)), "padding is zero in both"


def test_slices_are_compiled_where_weight_gradients_are() -> None:
    """Of the format in which the layers compute."""
    kernels = Kernels(weight_gradient="compiled")
    for dtype, products, compiled in (
        (torch.bfloat16, Products(bf16=kernels), True),
        (torch.bfloat16, Products(fp32=kernels), False),
        (torch.bfloat16, Products(bf16=Kernels("compiled", "compiled")), False),
        (torch.float32, Products(fp32=kernels), True),
        (torch.float64, Products(kernels, kernels, kernels), False),
        (torch.bfloat16, None, False),
    ):
        bucket = Bucket("bucket", weights(SHAPES), Axis("dp"), storage(dtype))
        found = param_slices([bucket], [RULE.init(bucket.master)], Axis("tp"), products)
        assert found and all(params.compiled is compiled for params in found)


def test_padding_is_stepped_over_without_leaving_zero() -> None:
    bucket = Bucket("bucket", weights(SHAPES), Axis("dp", 3, 2), storage(zero=1))
    bucket.reduced.fill_(0.0)
    before = {local.name: bucket.master[local.at].clone() for local in bucket.local_ranges()}
    AdamW(0.9, 0.999, 1e-8, 0.1).update_(
        slices([bucket], Axis("tp")), step=1, learning_rate=0.5, factor=torch.ones((), dtype=torch.float64)
    )
    rest = bucket.master.clone()
    for local in bucket.local_ranges():
        assert torch.allclose(
            bucket.master[local.at], before[local.name] * (0.95 if local.placement.parameter.ndim == 2 else 1)
        )
        rest[local.at] = 0.0
    assert not rest.any()
