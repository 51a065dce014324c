"""The learning rate at every step, against closed values."""

from math import cos, isclose, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.optim.schedule import Decay, learning_rate, rewarmed

DECAYS: list[Decay] = ["cosine", "linear", "constant"]


def rates(decay: Decay, steps: range, *, floor: float = 1.0) -> list[float]:
    rate = learning_rate(peak=9.0, floor=floor, warmup_steps=4, decay_steps=12, decay=decay)
    return [rate(step) for step in steps]


def test_warm_up_is_a_straight_line_to_the_peak() -> None:
    for decay in DECAYS:
        assert rates(decay, range(1, 5)) == [2.25, 4.5, 6.75, 9.0]


def test_linear() -> None:
    assert rates("linear", range(4, 15)) == [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0]


def test_constant() -> None:
    assert rates("constant", range(4, 15)) == [9.0] * 11


def test_cosine() -> None:
    expected = [1.0 + 8.0 * (1 + cos(pi * k / 8)) / 2 for k in range(9)] + [1.0, 1.0]
    assert all(isclose(a, b, rel_tol=1e-15) for a, b in zip(rates("cosine", range(4, 15)), expected, strict=True))
    assert isclose(rates("cosine", range(8, 9))[0], 5.0)


def test_without_warm_up_the_first_step_is_on_the_curve() -> None:
    rate = learning_rate(peak=1.0, floor=0.0, warmup_steps=0, decay_steps=10, decay="linear")
    assert [rate(step) for step in (1, 5, 10, 11)] == [0.9, 0.5, 0.0, 0.0]


def test_a_decay_that_ends_with_the_warm_up() -> None:
    rate = learning_rate(peak=1.0, floor=0.1, warmup_steps=10, decay_steps=10, decay="cosine")
    assert rate(9) == 0.9 and rate(10) == 1.0 and isclose(rate(11), 0.1)


@given(
    st.floats(1e-6, 1.0), st.floats(0.0, 1.0), st.integers(0, 50), st.integers(1, 100), st.sampled_from(DECAYS)
)  # fmt: skip
def test_up_to_the_peak_and_down_to_the_floor(
    peak: float, share: float, warmup_steps: int, length: int, decay: Decay
) -> None:
    floor = peak * share
    rate = learning_rate(
        peak=peak, floor=floor, warmup_steps=warmup_steps, decay_steps=warmup_steps + length, decay=decay
    )
    up = [rate(step) for step in range(1, warmup_steps + 1)]
    down = [rate(step) for step in range(max(1, warmup_steps), warmup_steps + length + 20)]
    assert up == sorted(up) and down == sorted(down, reverse=True)
    assert all(0 < value <= peak * (1 + 1e-12) for value in up)
    assert all(floor * (1 - 1e-12) <= value <= peak * (1 + 1e-12) for value in down)
    assert isclose(down[-1], peak if decay == "constant" else floor, rel_tol=1e-12)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_longer_run_with_the_same_decay_end_has_the_same_past(decay: Decay) -> None:
    assert rates(decay, range(1, 9)) == rates(decay, range(1, 30))[:8]


def test_warm_up_stable_decay() -> None:
    rate = learning_rate(peak=8.0, floor=0.0, warmup_steps=2, decay_steps=10, decay="linear", decay_start=6)
    assert [rate(step) for step in range(1, 12)] == [4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]


def test_a_decay_begins_behind_the_warm_up_at_the_earliest() -> None:
    rate = learning_rate(peak=8.0, floor=0.0, warmup_steps=4, decay_steps=8, decay="linear", decay_start=2)
    assert [rate(step) for step in range(1, 10)] == [2.0, 4.0, 6.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]


def test_a_decay_that_would_begin_behind_its_end_begins_with_none() -> None:
    rate = learning_rate(peak=8.0, floor=1.0, warmup_steps=2, decay_steps=10, decay="linear", decay_start=20)
    assert [rate(step) for step in (2, 10, 20)] == [8.0, 8.0, 8.0]


def test_warming_up_once_more() -> None:
    once = learning_rate(peak=4.0, floor=1.0, warmup_steps=0, decay_steps=6, decay="linear")
    again = learning_rate(peak=4.0, floor=1.0, warmup_steps=0, decay_steps=11, decay="linear", decay_start=8)
    rate = rewarmed(once, at=5, steps=3, floor=1.0, peak=4.0, behind=again)
    assert [rate(step) for step in range(1, 13)] == [3.5, 3.0, 2.5, 2.0, 1.5, 2.0, 3.0, 4.0, 3.0, 2.0, 1.0, 1.0]
