"""The formulas, held against schedules that are run on paper."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.pipeline import theory
from colonnade.pipeline.schedule import all_actions
from colonnade.pipeline.simulate import Durations, simulate
from tests.pipeline.shapes import Shape, shapes

TIMES = st.integers(1, 12).map(lambda quarters: quarters / 4)
"""Sums of quarters are exact."""


@pytest.mark.parametrize("durations", [Durations(), Durations(2.0, 3.0, 1.0)], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    "shape",
    [
        *(
            Shape(name, p, m, 1)
            for name in ("naive", "gpipe", "1f1b", "zero_bubble")
            for p, m in ((4, 8), (4, 2), (1, 3))
        ),
        *(Shape("interleaved", p, m, v) for p, m, v in ((4, 8, 2), (4, 4, 2), (3, 3, 3), (3, 6, 1))),
    ],
    ids=str,
)
def test_some_bubbles_and_peaks(shape: Shape, durations: Durations) -> None:
    """Of more micro-batches than stages, and of fewer: what does not run holds nothing, and fills nothing."""
    lists = all_actions(*shape)
    found = simulate(lists, shape.num_microbatches, virtual_stages=shape.virtual_stages, durations=durations)
    assert found.bubble == pytest.approx(theory.bubble(*shape, durations), abs=1e-9)
    assert list(found.peak) == [theory.peak(shape.name, stage, *shape[1:]) for stage in range(shape.num_stages)]


@pytest.mark.slow
@given(shapes(), TIMES, TIMES, TIMES)
@settings(deadline=None, max_examples=150)
def test_bubble_and_peaks_of_every_schedule(
    shape: Shape, forward: float, input_gradients: float, weight_gradients: float
) -> None:
    durations = Durations(forward, input_gradients, weight_gradients)
    found = simulate(
        all_actions(*shape), shape.num_microbatches, virtual_stages=shape.virtual_stages, durations=durations
    )
    assert found.bubble == pytest.approx(theory.bubble(*shape, durations), abs=1e-9)
    ideal = shape.num_microbatches * durations.microbatch
    assert found.makespan - ideal == pytest.approx(theory.bubble_time(*shape, durations), abs=1e-6)
    stages = range(shape.num_stages)
    assert list(found.peak) == [theory.peak(shape.name, stage, *shape[1:]) for stage in stages]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 64), (16, 16), (16, 3)])
def test_the_papers_numbers(p: int, m: int) -> None:
    assert theory.bubble("gpipe", p, m) == theory.bubble("1f1b", p, m) == pytest.approx((p - 1) / (m + p - 1))
    assert theory.bubble("naive", p, m) == pytest.approx(1 - 1 / p)
    assert [theory.peak("1f1b", stage, p, m) for stage in range(p)] == [min(p - stage, m) for stage in range(p)]


@pytest.mark.parametrize("v", [1, 2, 4])
def test_virtual_stages_divide_the_bubble(v: int) -> None:
    assert theory.bubble_time("interleaved", 4, 8, v) == theory.bubble_time("1f1b", 4, 8) / v
    assert theory.bubble("interleaved", 4, 8, v) == pytest.approx(3 / (8 * v + 3))


def test_zero_bubble_waits_a_third_of_1f1b_where_all_products_take_the_same_time() -> None:
    assert theory.bubble_time("zero_bubble", 4, 8) == theory.bubble_time("1f1b", 4, 8) / 3
    assert max(theory.peak("zero_bubble", stage, 4, 8) for stage in range(4)) == theory.peak("1f1b", 0, 4, 8)


def test_zero_bubble_is_the_papers_where_weight_gradients_are_the_shortest() -> None:
    durations = Durations(forward=1, input_gradients=1.5, weight_gradients=0.5)
    assert theory.bubble_time("zero_bubble", 4, 8, 1, durations) == 3 * (1 + 1.5 - 0.5)
