"""Ownership: parameters are there when they are used and not long before, gradients are summed while nobody adds to
them, and what was freed is not needed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from colonnade.architecture.stack import TABLE
from colonnade.data_parallel.buckets import flatten
from colonnade.data_parallel.zero import Ownership
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.pipeline.schedule import NAMES
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step
from tests.data_parallel.flat import allocated, storage, toy_buckets, weights
from tests.data_parallel.late import PunctualTransport, late_mesh
from tests.distributed import run_on_ranks
from tests.parity.runs import CPU, SERIAL, Case, Way, configured, microbatches

NEEDS = {
    "embedding": [TABLE, "embedding"],
    "blocks.0": ["blocks.0"],
    "blocks.1": ["blocks.1"],
    "blocks.2": ["blocks.2"],
    "head": [TABLE, "head"],
}
UNITS = list(NEEDS)
LENGTHS = {TABLE: 160, "embedding": 320, "blocks.0": 480, "blocks.1": 640, "blocks.2": 800, "head": 960}
FORWARD_AND_BACK = [*UNITS, *UNITS[::-1]]


def owner(mesh: Mesh, zero: int, **settings: Any) -> Ownership:
    """Of buckets that differ in size, so that the ledger tells which one was gathered."""
    return Ownership(toy_buckets(LENGTHS, mesh.dp, storage(zero=zero)), NEEDS, mesh, zero=zero, **settings)


def use(owned: Ownership, uses: Sequence[str], *, gradients: bool = False) -> Iterator[str]:
    """Acquire and release one unit after the other; in between, the caller looks."""
    owned.expect(uses)
    for unit in uses:
        owned.acquire(unit, gradients=gradients)
        yield unit
        owned.release(unit)


def sent(mesh: Mesh, operation: str) -> list[tuple[str, str]]:
    """(the unit at work, the bucket that was sent), in order."""
    buckets = {length * 8: bucket for bucket, length in LENGTHS.items()}
    times = mesh.dp.size if operation == "all_gather" else 1  # there, each rank puts in its slice
    return [(e.unit, buckets[e.bytes * times]) for e in mesh.ledger.entries if e.operation == operation]


# --- parameters -------------------------------------------------------------------------------------------------------


def test_the_next_unit_is_gathered_while_this_one_runs() -> None:
    mesh = paper_mesh(Layout(dp=2), 0)
    for _ in use(owner(mesh, 3), FORWARD_AND_BACK):
        pass
    assert sent(mesh, "all_gather") == [
        ("embedding", TABLE),
        ("embedding", "embedding"),  # the first of all: nobody could ask for them earlier
        ("embedding", "blocks.0"),
        ("blocks.0", "blocks.1"),
        ("blocks.1", "blocks.2"),
        ("blocks.2", TABLE),
        ("blocks.2", "head"),  # the head's backward is next: both are kept
        ("head", "blocks.2"),
        ("blocks.2", "blocks.1"),
        ("blocks.1", "blocks.0"),
        ("blocks.0", TABLE),
        ("blocks.0", "embedding"),
    ]


@pytest.mark.parametrize("uses", [FORWARD_AND_BACK, UNITS * 2, [*UNITS[:3], *UNITS[2::-1]]], ids=len)
def test_stage_3_holds_this_unit_and_the_next_and_nothing_at_rest(uses: list[str]) -> None:
    owned = owner(paper_mesh(Layout(dp=2), 1), 3)
    buckets = list(owned.buckets.values())
    assert allocated(buckets, "parameters") == set()
    for number, unit in enumerate(use(owned, uses)):
        behind = NEEDS[uses[number + 1]] if number + 1 < len(uses) else []
        assert allocated(buckets, "parameters") == {*NEEDS[unit], *behind}
    assert allocated(buckets, "parameters") == set()


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_other_stages_keep_parameters(zero: int) -> None:
    mesh = paper_mesh(Layout(dp=2), 0)
    owned = owner(mesh, zero)
    for _ in use(owned, FORWARD_AND_BACK):
        assert allocated(list(owned.buckets.values()), "parameters") == set(LENGTHS)
    assert sent(mesh, "all_gather") == []


@pytest.mark.parametrize("zero", [1, 2])
def test_new_parameters_arrive_behind_the_next_forward(zero: int) -> None:
    """Publishing starts all gathers at once; each is waited for by the unit that needs it."""
    mesh, transport = late_mesh(Layout(dp=2), 0)
    owned = owner(mesh, zero)
    for bucket in owned.buckets.values():
        bucket.master.fill_(3.0)
    owned.publish()
    assert len(transport.under_way) == len(LENGTHS) and mesh.ledger.unit == ""
    assert sent(mesh, "all_gather") == [(name, name) for name in LENGTHS]
    left = [len(transport.under_way) for _ in use(owned, UNITS)]
    assert left == [4, 3, 2, 1, 0]
    assert all((bucket.parameters == 3.0).all() for bucket in owned.buckets.values())


@pytest.mark.parametrize("zero", [1, 2])
def test_before_others_change_master_weights_all_that_was_published_is_there(zero: int) -> None:
    """What arrived afterwards would be the weights from before the change."""
    mesh, transport = late_mesh(Layout(dp=2), 0)
    owned = owner(mesh, zero)
    for value in (3.0, 4.0):
        for bucket in owned.buckets.values():
            bucket.master.fill_(value)
        owned.publish()
        owned.settle()
        assert transport.under_way == []
        assert all((bucket.parameters == value).all() for bucket in owned.buckets.values())


def reading(name: str) -> Callable[[nn.Module], object]:
    return lambda model: [getattr(each, name) for each in model.parameters()]


READS: dict[str, Callable[[nn.Module], object]] = {
    **{name: reading(name) for name in ("T", "H", "mT", "mH", "real", "imag")},
    "a norm": lambda model: [each.norm() for each in model.parameters()],
    "print": lambda model: [str(each) for each in model.parameters()],
    "data": lambda model: [each.data.sum() for each in model.parameters()],
    "deepcopy": deepcopy,
    "state_dict": lambda model: model.state_dict(),
    "another's": lambda model: [each.copy_(torch.ones(())) for each in model.parameters()],
}


@pytest.mark.parametrize("read", READS)
def test_weights_that_are_not_there_are_not_read(read: str) -> None:
    """Torch would read freed memory, which ends the interpreter. Their shapes are known all the same."""
    mesh, case = Mesh(), Case(parts="upper")
    state = build_state(configured(case, Way(zero=3)), mesh, case.vocab_size, CPU)
    said = r"under ZeRO 3 .* read it within `with state\.ownership\.gathered\(\):`, which every rank enters"
    with pytest.raises(RuntimeError, match=said):
        READS[read](state.model)
    whole = build_state(configured(case, SERIAL), mesh, case.vocab_size, CPU).model
    for mine, theirs in zip(state.model.parameters(), whole.parameters(), strict=True):
        assert (mine.shape, mine.dtype, mine.numel()) == (theirs.shape, theirs.dtype, theirs.numel())
        assert (mine.device, mine.requires_grad, hash(mine)) == (theirs.device, theirs.requires_grad, id(mine))
        assert (mine.size(), mine.dim(), mine.stride()) == (theirs.size(), theirs.dim(), theirs.stride())
        assert mine.element_size() == theirs.element_size()


def test_gradients_of_weights_that_are_not_there_are_listened_to() -> None:
    """A hook reads no weight: it is called in the steps that follow."""
    mesh, case, way = Mesh(), Case(), Way(zero=3, micro_batch_size=2)
    config, heard = configured(case, way), list[Tensor]()
    state = build_state(config, mesh, case.vocab_size, CPU)
    weights = list(state.model.parameters())
    for weight in weights:
        weight.register_hook(heard.append)
        weight.register_post_accumulate_grad_hook(heard.append)
    batches = microbatches(case, way, 0, mesh)
    train_step(state, batches, mesh, config.train)
    assert len(heard) >= 2 * len(weights) * len(batches)
    assert sum(each.nelement() for each in weights if each.is_floating_point()) > 0


@pytest.mark.parametrize("parts", ["all", "lora"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_weights_can_be_gathered_to_be_read(zero: Literal[0, 1, 2, 3], parts: Literal["all", "lora"]) -> None:
    """Also those that an update has just sent on their way, and frozen ones beside adapters."""

    def on_a_rank(rank: int, num_ranks: int) -> list[Tensor]:
        case, way = Case(parts=parts), Way(dp=num_ranks, micro_batch_size=2, zero=zero)
        config, mesh = configured(case, way), build_mesh(way.layout, rank)
        state, read = build_state(config, mesh, case.vocab_size, CPU), []
        for number in range(2):
            train_step(state, microbatches(case, way, number, mesh), mesh, config.train)
            with state.ownership.gathered():
                read = [each.detach().clone() for each in deepcopy(state.model).parameters()]
            held = allocated(state.buckets, "parameters")
            assert held == (set() if zero == 3 else {bucket.name for bucket in state.buckets})
        return read

    (alone,), *others = run_on_ranks(on_a_rank, 1), *run_on_ranks(on_a_rank, 2)
    for rank in others:
        for mine, theirs in zip(rank, alone, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_another_unit_than_expected_is_an_error() -> None:
    owned = owner(paper_mesh(Layout(dp=2), 0), 3)
    owned.expect(UNITS)
    owned.acquire("embedding", gradients=False)
    with pytest.raises(AssertionError, match=r"blocks\.1 comes where blocks\.0 was expected"):
        owned.acquire("blocks.1", gradients=False)


# --- gradients --------------------------------------------------------------------------------------------------------


def grads(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


GRADIENT_READS: dict[str, Callable[[nn.Module], object]] = {
    "a norm": lambda model: [each.norm() for each in grads(model)],
    "print": lambda model: [str(each) for each in grads(model)],
    "data": lambda model: [each.data.sum() for each in grads(model)],
    "an element": lambda model: [each[0] for each in grads(model)],
    "a clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("read", GRADIENT_READS)
@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_are_not_there_are_not_read(zero: Literal[2, 3], read: str) -> None:
    """Torch would read freed memory. Before the first step and between steps; their shapes are known all the same."""
    mesh, case, way = Mesh(), Case(parts="upper"), Way(zero=zero, micro_batch_size=2)
    config = configured(case, way)
    state = build_state(config, mesh, case.vocab_size, CPU)
    for number in range(2):
        with pytest.raises(RuntimeError, match="under ZeRO 2 and 3 a rank has a slice of the summed gradients"):
            GRADIENT_READS[read](state.model)
        trained = [each for each in state.model.parameters() if each.requires_grad]
        assert [each.shape for each in grads(state.model)] == [each.shape for each in trained]
        train_step(state, microbatches(case, way, number, mesh), mesh, config.train)


def back(owned: Ownership, microbatches: int) -> None:
    """Backward of some micro-batches, each adding 1 to every gradient."""
    owned.begin()
    for number in range(microbatches):
        for unit in use(owned, UNITS[::-1], gradients=True):
            for bucket in NEEDS[unit]:
                owned.buckets[bucket].gradients.add_(1.0)
            owned.gradients_ready(unit, last=number == microbatches - 1)
    owned.finish()


ORDER = [
    ("head", "head"),
    *((f"blocks.{i}", f"blocks.{i}") for i in (2, 1, 0)),
    ("embedding", TABLE),
    ("embedding", "embedding"),
]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_bucket_is_summed_once_backward_has_left_the_first_unit_that_needs_it(zero: int) -> None:
    """After the last micro-batch alone; under stages 2 and 3, which keep no whole gradients, after each. The token
    table is complete behind the embedding, not behind the head.
    """
    mesh = paper_mesh(Layout(dp=2), 0)
    back(owner(mesh, zero), 3)
    assert sent(mesh, "reduce_scatter" if zero else "all_reduce") == ORDER * (3 if zero >= 2 else 1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_use_of_a_bucket_is_in_its_sum(zero: int) -> None:
    """Two ranks, three micro-batches, and the table is used twice in each."""

    def on_a_rank(rank: int, num_ranks: int) -> dict[str, Tensor]:
        owned = owner(build_mesh(Layout(dp=2), rank), zero)
        for _ in range(2):  # the second step begins anew
            back(owned, 3)
        return {name: bucket.reduced.clone() for name, bucket in owned.buckets.items()}

    for rank in run_on_ranks(on_a_rank, 2):
        for name, reduced in rank.items():
            assert (reduced == (12.0 if name == TABLE else 6.0)).all(), name


@pytest.mark.parametrize("left_at", UNITS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_begins_with_nothing_of_one_that_was_broken_off(zero: int, left_at: str) -> None:
    """Neither with gradients that are there, nor with sums that are under way, which find what they send unchanged."""
    mesh, transport = late_mesh(Layout(dp=2), 0)
    owned = owner(mesh, zero)
    owned.begin()
    for unit in use(owned, UNITS[::-1], gradients=True):
        for name in NEEDS[unit]:
            owned.buckets[name].gradients.add_(1.0)
        if unit == left_at:
            break
        owned.gradients_ready(unit, last=True)
    back(owned, 1)
    for name, bucket in owned.buckets.items():
        assert (bucket.reduced == (4.0 if name == TABLE else 2.0)).all(), name
    assert transport.under_way == []


@pytest.mark.parametrize("zero", [2, 3])
def test_at_most_three_units_have_whole_gradients(zero: int) -> None:
    """One that is being filled, and two that are on their way; with tied embeddings the table beside them."""
    mesh, _ = late_mesh(Layout(dp=2), 0)
    owned = owner(mesh, zero)
    owned.begin()
    for unit in use(owned, UNITS[::-1], gradients=True):
        whole = allocated(list(owned.buckets.values()), "gradients") - {TABLE}
        assert len(whole) <= 3 and unit in whole
        owned.gradients_ready(unit, last=False)
    owned.finish()
    assert allocated(list(owned.buckets.values()), "gradients") == set()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_sums_wait_for_each_other_only_where_they_hold_memory(zero: int, narrow: torch.dtype | None) -> None:
    """Under stages 0 and 1 the buffers are there anyway: all sums go on behind backward."""
    mesh, _ = late_mesh(Layout(dp=2), 0)
    dtype = torch.float64 if narrow is None else torch.bfloat16
    buckets = toy_buckets(LENGTHS, mesh.dp, storage(dtype, zero=zero, reduce_dtype=narrow))
    owned = Ownership(buckets, NEEDS, mesh, zero=zero)
    owned.begin()
    for unit in use(owned, UNITS[::-1], gradients=True):
        owned.gradients_ready(unit, last=True)
        sums = [each for each in buckets if each._summing is not None]
        assert len(sums) <= (2 if zero >= 2 or narrow else len(buckets))
    assert len(sums) == (2 if zero >= 2 or narrow else len(buckets))
    owned.finish()


def test_partial_sums_over_tp_are_summed_where_the_stream_is_cut() -> None:
    def on_a_rank(rank: int, num_ranks: int) -> list[float]:
        mesh = build_mesh(Layout(tp=2), rank)
        owned = owner(mesh, 0, sequence_parallel=True)
        back(owned, 1)
        assert [(e.axis, e.unit) for e in mesh.ledger.entries] == [("tp", "")], "one sum, of no unit more than another"
        return [bucket.reduced.max().item() for bucket in owned.buckets.values()]

    for rank in run_on_ranks(on_a_rank, 2):
        assert rank == [4.0, 2.0, 2.0, 2.0, 2.0, 2.0], "all weights here are replicated"


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_of_shards_are_never_summed_and_partial_ones_always(sequence_parallel: bool) -> None:
    """Of replicated weights that every rank uses whole, those of ranks that have seen a part of the sequence."""

    def on_a_rank(rank: int, num_ranks: int) -> dict[str, list[float]]:
        mesh = build_mesh(Layout(tp=2), rank)
        whole, partial, shard, bias = weights({"whole": (3, 5), "partial": (4, 5), "shard": (2, 5), "bias": (7,)})
        places = [whole, replace(partial, is_partial=True), replace(shard, shape=(4, 5), dim=0, offset=2 * rank), bias]
        (bucket,) = flatten({"head": places}, mesh.dp, storage())
        owned = Ownership([bucket], {"head": ["head"]}, mesh, zero=0, sequence_parallel=sequence_parallel)
        for local in bucket.local_ranges():
            bucket.gradients[local.at] = 10.0**rank
        owned.finish()
        return {each.placement.name: bucket.reduced[each.at].unique().tolist() for each in bucket.local_ranges()}

    for rank, found in enumerate(run_on_ranks(on_a_rank, 2)):
        own = [10.0**rank]
        seen = [11.0] if sequence_parallel else own
        assert found == {"whole": seen, "bias": seen, "partial": [11.0], "shard": own}


@pytest.mark.parametrize("tied", [True, False])
def test_the_table_of_both_ends_gets_the_gradient_of_both(tied: bool) -> None:
    def on_a_rank(rank: int, num_ranks: int) -> float:
        mesh = build_mesh(Layout(pp=3), rank)
        units = [["embedding"], ["blocks.0"], ["head"]][rank]
        lengths = {bucket: LENGTHS[bucket] for unit in units for bucket in NEEDS[unit]}
        buckets = toy_buckets(lengths, mesh.dp, storage())
        shared = {"embedding.tokens": mesh.ends} if tied else {}
        owned = Ownership(buckets, {unit: NEEDS[unit] for unit in units}, mesh, zero=0, shared=shared)
        for bucket in owned.buckets.values():
            bucket.gradients.add_(10.0**rank)
        owned.finish()
        assert mesh.ledger.unit == ""
        return next(iter(owned.buckets.values())).reduced.max().item()

    assert run_on_ranks(on_a_rank, 3) == ([101.0, 10.0, 101.0] if tied else [1.0, 10.0, 100.0])


# --- a whole step on the slowest network ------------------------------------------------------------------------------

HOW = [
    *({"schedule": schedule} for schedule in NAMES if schedule != "interleaved"),
    {"schedule": "interleaved", "virtual_stages": 2},
    {"recompute": "full"},
    {"recompute": "full", "recompute_every": 2},
]


def two_steps(way: Way, mesh: Mesh) -> tuple[TrainState, list[float]]:
    """Two steps of training on paper: (the state, losses and norms)."""
    case = Case(num_layers=4)
    config = configured(case, way)
    state = build_state(config, mesh, case.vocab_size, CPU)
    told = []
    for number in range(2):
        result = train_step(state, microbatches(case, way, number, mesh), mesh, config.train)
        told += [result.loss, result.grad_norm]
    for bucket in state.buckets:
        bucket.unshard()
    return state, told


@pytest.mark.one_in(11)
@pytest.mark.parametrize("how", HOW, ids=lambda how: " ".join(map(str, how.values())))
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_nothing_is_used_before_it_is_there_nor_changed_while_it_is_sent(
    zero: Literal[0, 1, 2, 3], how: dict[str, Any]
) -> None:
    """Every gather and reduction of two steps arrives only when it is waited for, and finds what it sends unchanged:
    the published race of stage 2, a micro-batch that adds to a buffer that is still being summed, would be seen.
    The numbers are those of sums that arrive at once.
    """
    way = Way(dp=2, micro_batch_size=1, zero=zero, **how)
    mesh, transport = late_mesh(way.layout, 1)
    state, late = two_steps(way, mesh)
    other, expected = two_steps(way, late_mesh(way.layout, 1, PunctualTransport)[0])
    assert late == expected and all(number == number for number in late)
    for mine, theirs in zip(state.buckets, other.buckets, strict=True):
        assert torch.equal(mine.parameters, theirs.parameters) and torch.equal(mine.master, theirs.master)
    assert transport.under_way == []


def test_stage_2_sums_each_microbatch_into_memory_of_its_own() -> None:
    """Between two micro-batches a bucket's whole gradients are freed, and begin at zero again."""
    mesh, _ = late_mesh(Layout(dp=2), 0)
    owned = owner(mesh, 2)
    owned.begin()
    bucket = owned.buckets["blocks.1"]
    for microbatch in range(3):
        for unit in use(owned, ["blocks.1"], gradients=True):
            assert not bucket.gradients.any(), "nothing of an earlier micro-batch"
            bucket.gradients.add_(1.0)
            owned.gradients_ready(unit, last=False)
        assert (bucket.reduced == 2.0 * microbatch).all(), "the last sum is still under way"
    owned.finish()
    assert (bucket.reduced == 6.0).all() and bucket.gradients.untyped_storage().size() == 0


@pytest.mark.slow
def test_every_bucket_of_a_real_model_is_summed() -> None:
    """The last micro-batch is reduced like the others, in every schedule and stage."""
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    for zero in stages:
        way = Way(dp=2, micro_batch_size=1, zero=zero, schedule="zero_bubble")
        mesh = paper_mesh(way.layout, 0)
        two_steps(way, mesh)
        operation = "reduce_scatter" if zero else "all_reduce"
        over_dp = [e for e in mesh.ledger.entries if e.axis == "dp"]
        sums = Counter(e.shape for e in over_dp if e.operation == operation and prod(e.shape) > 1)
        assert sum(sums.values()) == 2 * (4 if zero >= 2 else 1) * 7, "two steps, four micro-batches, seven buckets"
