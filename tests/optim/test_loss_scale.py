"""The loss scale: its rules by examples, and what always holds."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.errors import ColonnadeError
from colonnade.optim.loss_scale import MAXIMUM, LossScale

SCALES = st.builds(
    LossScale,
    value=st.integers(0, 40).map(lambda power: 2.0**power),
    good_steps=st.integers(0, 4),
    window=st.integers(5, 9),
    minimum=st.sampled_from([0.25, 1.0, 3.0]),
)


def after(scale: LossScale, steps: str) -> LossScale:
    """`steps`: a letter a step, o overflow, g good."""
    for step in steps:
        scale = scale.next(step == "o")
    return scale


def test_an_overflow_halves() -> None:
    assert after(LossScale(1024.0, 3, window=5), "o") == LossScale(512.0, 0, window=5)


def test_a_window_without_overflow_doubles() -> None:
    start = LossScale(1024.0, window=3)
    assert [after(start, "g" * n).value for n in range(8)] == [1024] * 3 + [2048] * 3 + [4096] * 2
    shortest = LossScale(1024.0, window=1)
    assert shortest.is_dynamic and [after(shortest, steps).value for steps in ("g", "gg", "ggo")] == [2048, 4096, 2048]


def test_an_overflow_starts_the_window_anew() -> None:
    start = LossScale(1024.0, window=3)
    assert [after(start, steps).value for steps in ("ggo", "ggogg", "ggoggg")] == [512, 512, 1024]


def test_the_largest_scale() -> None:
    assert after(LossScale(MAXIMUM, window=1), "ggg").value == MAXIMUM
    assert after(LossScale(MAXIMUM * 8, window=1), "g").value == MAXIMUM * 8  # what the user set is kept


def test_halving_stops_at_the_minimum() -> None:
    start = LossScale(8.0, window=5, minimum=3.0)
    assert [after(start, steps).value for steps in ("o", "oo")] == [4.0, 3.0]


def test_an_overflow_at_the_minimum_ends_the_run_with_what_to_do() -> None:
    with pytest.raises(ColonnadeError, match=r"loss scale of 1, and train.min_loss_scale = 1 .*learning_rate.*bf16"):
        after(LossScale(2.0, window=5), "oo")


def test_a_constant_scale_is_constant() -> None:
    assert not LossScale().is_dynamic
    assert LossScale().value == 1.0
    assert after(LossScale(), "oggo") == LossScale()


@given(SCALES, st.text("og", max_size=60))
def test_every_scale_is_a_step_from_the_last(scale: LossScale, steps: str) -> None:
    for step in steps:
        if step == "o" and scale.value <= scale.minimum:
            with pytest.raises(ColonnadeError):
                scale.next(True)
            return
        new = scale.next(step == "o")
        assert scale.minimum <= new.value <= MAXIMUM or new.value >= scale.value
        assert 0 <= new.good_steps < new.window
        assert new.value in (scale.value, 2 * scale.value, max(scale.value / 2, scale.minimum))
        assert (new.value < scale.value) == (step == "o")
        scale = new


@given(SCALES, st.integers(1, 200))
def test_growth_is_one_doubling_a_window(scale: LossScale, steps: int) -> None:
    doublings = (scale.good_steps + steps) // scale.window
    assert after(scale, "g" * steps).value == min(scale.value * 2.0**doublings, MAXIMUM)


@given(SCALES, st.text("g", max_size=20))
def test_powers_of_two_stay_so_above_the_minimum(scale: LossScale, steps: str) -> None:
    new = after(scale, steps)
    assert new.value == scale.minimum or math.frexp(new.value)[0] == 0.5


@given(SCALES, SCALES)
def test_metadata_through_json(ran: LossScale, configured: LossScale) -> None:
    metadata = json.loads(json.dumps(ran.metadata()))
    resumed = configured.resumed(metadata)
    assert (resumed.value, resumed.good_steps) == (ran.value, ran.good_steps)
    assert (resumed.window, resumed.minimum) == (configured.window, configured.minimum)


def test_metadata_of_other_number_formats() -> None:
    start = LossScale(65536.0, window=1000)
    assert LossScale().metadata() == {}
    assert start.resumed({}) == start
    assert LossScale().resumed(start.metadata()) == LossScale()
