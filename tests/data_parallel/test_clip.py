"""The gradient norm counts each weight once, whoever holds it."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.data_parallel.buckets import flatten
from colonnade.data_parallel.clip import clip_factor, gradient_norm, is_copy
from colonnade.data_parallel.zero import Ownership
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh, paper_mesh
from tests.data_parallel.flat import flat_model, storage, weights
from tests.distributed import run_on_ranks
from tests.parity.runs import LocalRange
from tests.tensor_parallel.shards import drawn

UNITS = ["embedding", "blocks.0", "blocks.1", "head"]


def owned(mesh: Mesh, *, tied: bool = False, zero: int = 0, dtype: torch.dtype = torch.float64) -> Ownership:
    """This rank's stage of a small model: two stages have two units each."""
    share = len(UNITS) // mesh.pp.size
    units = UNITS[mesh.pp.rank * share : (mesh.pp.rank + 1) * share]
    gpt, buckets = flat_model(storage(dtype, zero), tp=mesh.tp, dp=mesh.dp, tied=tied, units=units)
    needs = {unit.name: list(unit.buckets) for unit in gpt.architecture.named(units)}
    shared = {"embedding.tokens": mesh.ends} if tied and mesh.pp.size > 1 else {}
    return Ownership(buckets, needs, mesh, zero=zero, shared=shared)


def whole_gradients(tied: bool) -> dict[str, Tensor]:
    gpt, _ = flat_model(tied=tied)
    return {name: drawn(*w.shape, seed=i) for i, (name, w) in enumerate(gpt.named_parameters())}


def norm_on_a_rank(rank: int, num_ranks: int, layout: Layout, tied: bool, zero: int) -> float:
    mesh = build_mesh(layout, rank)
    owner, whole = owned(mesh, tied=tied, zero=zero), whole_gradients(tied)
    for bucket in owner.buckets.values():
        for local in bucket.local_ranges():
            mine = bucket.reduced[local.at]
            mine.copy_(LocalRange.at(local.placement, local.first, mine).of(whole[local.name]))
    return gradient_norm(owner).item()


def test_of_several_stages_the_first_that_has_a_bucket_counts_it() -> None:
    """Be it the first of all stages or not. A T5's tied table may be on three: under both stacks and in the head."""
    bucket: Any = SimpleNamespace(name="decoder.positions")
    for holders in ((2, 3), (0, 2, 3)):
        for rank, stage in enumerate(holders):
            owner: Any = SimpleNamespace(
                shared={"decoder.positions": Axis("holders", size=len(holders), rank=rank)},
                mesh=paper_mesh(Layout(pp=4), stage),
            )
            assert is_copy(bucket, owner) == (rank > 0)
    alone: Any = SimpleNamespace(shared={}, mesh=paper_mesh(Layout(pp=4), 3))
    assert not is_copy(bucket, alone)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("layout", "zero"),
    [
        (Layout(), 0),
        (Layout(tp=2), 0),
        (Layout(tp=4), 0),
        (Layout(dp=2), 0),
        (Layout(dp=2), 1),
        (Layout(dp=4), 3),
        (Layout(pp=2), 0),
        (Layout(tp=2, dp=2), 2),
        (Layout(pp=2, dp=2), 3),
        (Layout(pp=2, tp=2), 0),
    ],
    ids=str,
)
def test_the_norm_is_torchs_norm_of_the_whole(layout: Layout, zero: int, tied: bool) -> None:
    """A table on both ends of the pipeline counts once."""
    expected = torch.nn.utils.get_total_norm(list(whole_gradients(tied).values())).item()
    norms = run_on_ranks(norm_on_a_rank, layout.num_ranks, layout, tied, zero)
    assert len(set(norms)) == 1, "equal to the bit on all ranks, or they would clip differently"
    assert norms[0] == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("value", [torch.inf, torch.nan, -1e200])
def test_a_number_that_is_not_finite_is_seen_in_a_copy(value: float, zero: int) -> None:
    """tp rank 1's of a weight that rank 0 counts for both: its gradient is in no sum, and it would be updated by it.
    One that is finite, but for its square, is no such number.
    """

    def on_a_rank(rank: int, num_ranks: int) -> list[float]:
        owner = owned(build_mesh(Layout(tp=num_ranks), rank), zero=zero)
        for bucket in owner.buckets.values():
            bucket.reduced.fill_(0.5)
        norms = [gradient_norm(owner).item()]
        if rank == 1:
            bucket = owner.buckets["blocks.1"]
            next(bucket.reduced[at] for group, at in bucket.local_groups() if not group.cut)[-1] = value
        return [*norms, gradient_norm(owner).item()]

    (first, second), others = run_on_ranks(on_a_rank, 2)
    assert math.isfinite(first) and (second == first if math.isfinite(value) else math.isnan(second))
    assert others[0] == first and (others[1] == first if math.isfinite(value) else math.isnan(others[1]))


def test_a_stage_that_counts_nothing_takes_part_where_its_weights_are() -> None:
    """All of them frozen, or counted by others: the sum over ranks is of numbers on one kind of device."""
    meta = torch.device("meta")
    (whole,) = weights({"weight": (4,)})
    place = replace(whole, parameter=nn.Parameter(whole.parameter.to(meta), requires_grad=False))
    buckets = flatten({"head": [place]}, Mesh().dp, replace(storage(), device=meta))
    assert gradient_norm(Ownership(buckets, {"head": ["head"]}, Mesh(), zero=0)).is_meta


@pytest.mark.parametrize(("zero", "axis"), [(0, "model"), (1, "world"), (2, "world"), (3, "world")])
def test_it_sends_one_number(zero: int, axis: str) -> None:
    mesh = paper_mesh(Layout(tp=4, dp=2), 5)
    gradient_norm(owned(mesh, zero=zero))
    assert [(e.operation, e.axis, e.bytes) for e in mesh.ledger.entries] == [("all_reduce", axis, 8)]


@pytest.mark.parametrize("exponent", [-30, 30])
def test_norms_far_from_one(exponent: int) -> None:
    """Squares of fp32 gradients would overflow at 2⁶⁴ and vanish at 2⁻⁷⁵; their sum is made in float64."""
    owner = owned(paper_mesh(Layout(), 0), dtype=torch.float32)
    for bucket in owner.buckets.values():
        bucket.reduced.fill_(2.0**exponent)
    count = sum(group.stop - group.start for bucket in owner.buckets.values() for group in bucket.groups)
    assert gradient_norm(owner).item() == pytest.approx(2.0**exponent * count**0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("norm", "limit", "factor"),
    [
        (4.0, 1.0, 0.25),
        (0.5, 1.0, 1.0),
        (1.0, 1.0, 1.0),
        (0.0, 1.0, 1.0),
        (1e9, 0.0, 1.0),
        (0.5, 0.125, 0.25),
        (3.0, 4.0, 1.0),
        (3.0, 1.0, 1 / 3),
    ],
)
def test_clip_factor(norm: float, limit: float, factor: float) -> None:
    assert clip_factor(torch.tensor(norm, dtype=torch.float64), limit).item() == factor
