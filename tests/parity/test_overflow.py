"""Dynamic loss scaling on every layout: one rank's overflow is everybody's skipped step.

Exact, because the rules of fp16 are put on float64 training: a loss scale is a power of two, so that it rounds nothing.
An overflow is infinity in one element of one rank's gradients, before they are summed over ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi

import pytest
import torch

from colonnade.errors import ColonnadeError
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.optim.loss_scale import LossScale
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import StepResult, train_step
from tests.distributed import run_on_ranks
from tests.parity.compare import TOLERANCE, tensors
from tests.parity.runs import (
    CPU,
    SERIAL,
    STEPS,
    Case,
    LocalRanges,
    Way,
    configured,
    local_ranges,
    microbatches,
    parameters,
    whole,
)

CASE = Case(clipped=True)
SCALE = 1024.0
POISONED = 1  # the step that overflows, from 0
RATES = [5e-3, 1e-2, *(1e-3 + 9e-3 * (1 + cos(pi * k / 3)) / 2 for k in (1, 2, 3))]
"""Of the configuration's five steps."""
WAYS = {
    "serial": SERIAL,
    "tp2": Way(tp=2, micro_batch_size=4),
    "tp2 sequence parallel": Way(tp=2, micro_batch_size=4, sequence_parallel=True),
    "pp2": Way(pp=2, micro_batch_size=2),
    "pp2 zero_bubble dp2 zero3": Way(pp=2, dp=2, micro_batch_size=1, schedule="zero_bubble", zero=3),
    **{f"dp2 zero{zero}": Way(dp=2, micro_batch_size=2, zero=zero) for zero in (0, 1, 2, 3)},
}


@dataclass(frozen=True)
class Story:
    """What happened on a rank."""

    results: list[StepResult]
    unchanged: bool
    """Whether the poisoned step left every weight and moment as it was, to the bit."""
    final: LocalRanges
    counts: tuple[int, int]
    """Steps done, and skipped."""


def poison(state: TrainState) -> None:
    """Make a gradient of the next block whose backward is done infinite, on this rank alone, before any sum."""
    owner = state.ownership
    ready = owner.gradients_ready

    def poisoned(unit: str, *, last: bool) -> None:
        if unit.startswith("blocks."):
            owner.buckets[unit].gradients[0] = float("inf")
            owner.gradients_ready = ready  # type: ignore[method-assign]
        ready(unit, last=last)

    owner.gradients_ready = poisoned  # type: ignore[method-assign]


def everything(state: TrainState) -> list[torch.Tensor]:
    """Copies of what a step changes."""
    flat = [
        tensor
        for bucket, kept in zip(state.buckets, state.optimizer_state, strict=True)
        for tensor in (bucket.master, *kept.values())
    ]
    return [tensor.clone() for tensor in flat] + [each.values for each in parameters(state).values()]


def story(rank: int, num_ranks: int, way: Way, scale: LossScale | None, poisoned_rank: int | None) -> Story:
    """Five steps; in step `POISONED` one rank's gradients overflow."""
    mesh, config = build_mesh(way.layout, rank), configured(CASE, way)
    state = build_state(config, mesh, CASE.vocab_size, CPU)
    state.loss_scale = scale or state.loss_scale
    results, unchanged = [], True
    for step in range(STEPS):
        if step == POISONED and rank == poisoned_rank:
            poison(state)
        before = everything(state)
        results.append(train_step(state, microbatches(CASE, way, step, mesh), mesh, config.train))
        if step == POISONED:
            pairs = zip(before, everything(state), strict=True)
            unchanged = all(torch.equal(old, new) for old, new in pairs)
    return Story(results, unchanged, local_ranges(state, "master"), (state.step, state.skipped))


def dynamic(value: float = SCALE, minimum: float = 1.0) -> LossScale:
    """Doubles after three good steps."""
    return LossScale(value, window=3, minimum=minimum)


@pytest.fixture(scope="module")
def serial() -> dict[str, Story]:
    """One rank: without a scale; with one; and with an overflow."""

    def all_three(rank: int, num_ranks: int) -> list[Story]:
        runs = ((None, None), (dynamic(), None), (dynamic(), 0))
        return [story(0, 1, SERIAL, scale, poisoned) for scale, poisoned in runs]

    ((plain, scaled, overflowed),) = run_on_ranks(all_three, 1)
    return {"plain": plain, "scaled": scaled, "overflowed": overflowed}


def equal(one: Story, other: Story) -> bool:
    return all(torch.equal(one.final[name].values, other.final[name].values) for name in other.final)


def test_a_scale_changes_no_bit(serial: dict[str, Story]) -> None:
    plain, scaled = serial["plain"], serial["scaled"]
    assert [(r.loss, r.grad_norm) for r in scaled.results] == [(r.loss, r.grad_norm) for r in plain.results]
    assert [r.loss_scale for r in scaled.results] == [SCALE, SCALE, SCALE, 2 * SCALE, 2 * SCALE]
    assert equal(plain, scaled)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS)
def test_one_ranks_overflow_skips_the_step_on_all(way: str, serial: dict[str, Story]) -> None:
    """Weights and moments stay to the bit, the scale halves, and the steps that follow are the serial run's."""
    how, expected = WAYS[way], serial["overflowed"]
    last = how.layout.num_ranks - 1
    ranks = run_on_ranks(story, how.layout.num_ranks, how, dynamic(), last)
    for told in ranks:
        assert [r.skipped for r in told.results] == [step == POISONED for step in range(STEPS)]
        assert [r.loss_scale for r in told.results] == [SCALE, SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
        assert told.unchanged and told.counts == (STEPS, 1)
        assert told.results[POISONED].grad_norm == float("inf")
        rates = [result.learning_rate for result in told.results]
        assert rates == pytest.approx(RATES, rel=1e-14), "a skipped step moves on, too"
        for mine, other in zip(told.results, expected.results, strict=True):
            assert mine.loss == pytest.approx(other.loss, rel=TOLERANCE)
            assert mine.learning_rate == other.learning_rate
        wholes = whole(expected.final)
        assert max(difference.size for difference in tensors("weight", told.final, wholes)) <= TOLERANCE
    assert not equal(expected, serial["plain"]), "a step is missing"


def test_a_skipped_step_leaves_no_trace() -> None:
    """At a constant learning rate, skipping the first batch is never having seen it: it is no step of the optimizer's
    running means, whose first steps count for more.
    """
    plain = configured(CASE, SERIAL)
    config = plain.model_copy(update={"optim": plain.optim.model_copy(update={"warmup_steps": 0, "decay": "constant"})})

    def after(steps: Sequence[int], poisoned: bool) -> LocalRanges:
        state = build_state(config, Mesh(), CASE.vocab_size, CPU)
        state.loss_scale = dynamic()
        if poisoned:
            poison(state)
        for step in steps:
            train_step(state, microbatches(CASE, SERIAL, step, Mesh()), Mesh(), config.train)
        return local_ranges(state, "master")

    skipped, never_seen = after([0, 1, 2], True), after([1, 2], False)
    assert all(torch.equal(each.values, never_seen[name].values) for name, each in skipped.items())


def ended(rank: int, num_ranks: int, way: Way, poisoned_rank: int) -> str:
    """What a rank is told when gradients overflow at the smallest scale."""
    mesh, config = build_mesh(way.layout, rank), configured(CASE, way)
    state = build_state(config, mesh, CASE.vocab_size, CPU)
    state.loss_scale = dynamic(2.0, minimum=2.0)
    if rank == poisoned_rank:
        poison(state)
    try:
        train_step(state, microbatches(CASE, way, 0, mesh), mesh, config.train)
    except ColonnadeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("way", ["tp2", "pp2", "dp2 zero0", "dp2 zero2", "dp2 zero3"])
def test_an_overflow_at_the_smallest_scale_ends_all_ranks_alike(way: str) -> None:
    messages: Sequence[str] = run_on_ranks(ended, 2, WAYS[way], 0)
    assert len(set(messages)) == 1
    assert "at a loss scale of 2" in messages[0] and "train.min_loss_scale = 2" in messages[0]


@pytest.mark.slow
def test_fp16_itself_overflows_and_recovers() -> None:
    """No poison: a scale of 2³⁰ is too much for fp16, and halves until gradients fit."""

    def on_a_rank(rank: int, num_ranks: int) -> list[StepResult]:
        case, way = Case(precision="fp16", loss_scale=2.0**30), Way(tp=2, dp=2, micro_batch_size=2, zero=2)
        mesh, config = build_mesh(way.layout, rank), configured(case, way)
        state = build_state(config, mesh, case.vocab_size, CPU)
        return [train_step(state, microbatches(case, way, 0, mesh), mesh, config.train) for _ in range(24)]

    ranks = run_on_ranks(on_a_rank, 4)
    assert len({str(results) for results in ranks}) == 1  # as text: a NaN equals no other
    skipped = [result.skipped for result in ranks[0]]
    first_good = skipped.index(False)
    assert 5 < first_good < 24 and not any(skipped[first_good:])
    scales = [result.loss_scale for result in ranks[0]]
    assert scales == [2.0 ** (30 - min(step, first_good)) for step in range(24)]
    assert ranks[0][-1].loss < ranks[0][0].loss
