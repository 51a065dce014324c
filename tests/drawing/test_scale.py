"""What turns numbers into places and words: pure, and held against what it must keep."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.drawing.scale import (
    Scale,
    axis_of,
    bytes_in_words,
    length_of_time,
    percent,
    round_step,
    scale_of,
    short,
)
from colonnade.drawing.thin import thin

numbers = st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf))


@given(st.lists(numbers, max_size=300), st.integers(1, 40))
def test_few_points_keep_every_extreme_and_the_mean(values: list[float], most: int) -> None:
    found = thin(np.array(values, dtype=np.float64), most)
    finite = [value for value in values if math.isfinite(value)]
    assert len(found.rows) <= most
    if not finite:
        assert len(found.rows) == 0
        return
    assert (found.low.min(), found.high.max()) == (min(finite), max(finite))
    assert np.all(found.low <= found.mean + 1e-6) and np.all(found.mean <= found.high + 1e-6)
    assert np.all(np.diff(found.rows) > 0)
    counts = np.full(len(found.rows), found.each)
    counts[-1] = len(finite) - found.each * (len(counts) - 1)
    assert float(found.mean @ counts) == pytest.approx(sum(finite), abs=1e-3)


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=20))
def test_a_scale_shows_all_values_and_has_round_numbers_within(values: list[float]) -> None:
    scale = scale_of(values)
    assert all(-1e-9 <= scale.at(value) <= 1 + 1e-9 for value in values)
    assert all(-1e-6 <= scale.at(tick) <= 1 + 1e-6 for tick in scale.ticks(5))
    assert len(scale.ticks(5)) <= 16


def test_numbers_far_apart_get_powers_of_ten() -> None:
    scale = scale_of([0.01, 5.0, 300.0])
    assert scale.log and scale.ticks(5) == pytest.approx([0.01, 0.1, 1.0, 10.0, 100.0])
    assert not scale_of([0.01, 300.0], may_be_log=False).log


@pytest.mark.parametrize("values", [[0.0, 1e-320], [0.0, 2.5e-323], [5e-324], [5e-324, 1.0]])
def test_the_smallest_numbers_have_a_scale_too(values: list[float]) -> None:
    scale = scale_of(values)
    assert all(0 <= scale.at(value) <= 1 for value in values)
    assert all(0 <= scale.at(tick) <= 1 for tick in scale.ticks(5))


@pytest.mark.parametrize("values", [[1e-9, 9.9e299], [1e-299, 1.7e308], [1e307, 1.7e308], [0.0, 1.7e308]])
def test_numbers_as_far_apart_as_they_can_be_have_a_scale_too(values: list[float]) -> None:
    scale = scale_of(values)
    low, high = map(scale.at, values)
    assert 0 <= low < 0.1 and 0.9 < high <= 1
    assert all(0 <= scale.at(tick) <= 1 for tick in scale.ticks(5)) and scale.ticks(5)


def test_zero_is_on_a_scale_where_it_is_near_unless_it_is_not_wanted() -> None:
    assert scale_of([1.0, 11.0]) == Scale(0.0, 11.6)
    assert scale_of([1.0, 11.0], from_zero=False) == Scale(pytest.approx(0.4), 11.6)  # type: ignore[arg-type]
    assert scale_of([9.0, 11.0]).low > 8.0, "it is far"


@pytest.mark.parametrize("highest", [0.25, 1.0, 40.0])
def test_an_axis_ends_where_its_series_does(highest: float) -> None:
    """Of a step that takes a fourth of a second, or a run of a fourth of an hour, too."""
    assert axis_of(highest) == Scale(0.0, highest)


def test_a_series_of_zeros_has_an_axis_of_some_length() -> None:
    assert axis_of(0.0) == Scale(0.0, 1.0)


@pytest.mark.parametrize(
    ("high", "ticks"),
    [
        (100.0, [1, 2, 5, 10, 20, 50, 100]),
        (1e3, [1, 10, 100, 1e3]),
        (1e12, [1, 1e2, 1e4, 1e6, 1e8, 1e10, 1e12]),
    ],
)
def test_the_longer_a_logarithmic_scale_the_fewer_of_its_numbers_are_told(high: float, ticks: list[float]) -> None:
    scale = Scale(1.0, high, log=True)
    assert scale.ticks(5) == pytest.approx(ticks)
    assert scale.at(0.0) < 0.0, "far below, but somewhere"


@pytest.mark.parametrize(
    ("wanted", "step"), [(1.0, 1), (1.1, 2), (2.1, 2.5), (26.0, 50), (5.1, 10), (0.3, 0.5), (0.002, 0.002), (700, 1000)]
)
def test_a_step_is_the_next_round_number(wanted: float, step: float) -> None:
    assert round_step(wanted) == pytest.approx(step)
    assert round_step(wanted * (1 + 1e-12)) == pytest.approx(step), "what was rounded is not more"


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1.0, 30.0], (0.0, 31.74, False)),
        ([1.0, 31.0], (1 / 1.1, 34.1, True)),
        ([0.0, 31.0], (0.0, 32.86, False)),
        ([5.0, 15.0], (0.0, 15.6, False)),
        ([5.1, 15.0], (5.1 - 0.594, 15.594, False)),
        ([5.0, 5.0], (4.5, 5.5, False)),
        ([-5.0, -5.0], (-5.5, -4.5, False)),
        ([0.0], (0.0, 1.0, False)),
        ([], (0.0, 1.06, False)),
    ],
)
def test_a_scale_has_some_room_beside_its_values(values: list[float], scale: tuple[float, float, bool]) -> None:
    found = scale_of(values)
    assert (found.low, found.high, found.log) == (pytest.approx(scale[0]), pytest.approx(scale[1]), scale[2])


def test_a_point_stands_in_the_middle_of_its_share_of_the_finite_numbers() -> None:
    found = thin(np.array([1.0, 2.0, 3.0, np.nan, 4.0, 5.0, 6.0, 7.0]), 3)
    assert (found.rows.tolist(), found.each) == ([1, 5, 7], 3), "the last share has one number"
    assert [each.tolist() for each in (found.low, found.mean, found.high)] == [
        [1.0, 4.0, 7.0], [2.0, 5.0, 7.0], [3.0, 6.0, 7.0]
    ]  # fmt: skip


def test_a_line_has_at_most_400_points() -> None:
    assert [thin(np.arange(float(count))).each for count in (400, 401, 800, 801)] == [1, 2, 2, 3]


def test_words() -> None:
    assert [short(x) for x in (0, 1.5, 0.0003, 12_345, 5000, 2.5e9, -4e-5)] == [
        "0", "1.5", "3e-4", "12.35k", "5k", "2.5G", "-4e-5",
    ]  # fmt: skip
    assert [length_of_time(x) for x in (0.0123, 12.34, 200, 7500, 200_000)] == [
        "12.3 ms", "12.3 s", "3 min 20 s", "2 h 05 min", "2 d 7 h",
    ]  # fmt: skip
    assert [bytes_in_words(x) for x in (12, 12_300, 4.56e9)] == ["12 B", "12.3 kB", "4.56 GB"]


def test_words_of_what_is_nearly_the_next_unit() -> None:
    assert [short(x) for x in (999_940, 999_960, 1e6)] == ["999.9k", "1M", "1M"]
    assert [percent(x) for x in (0.0, 0.994, 0.999, 1.0)] == ["0.0%", "99.4%", "100%", "100%"]
    assert [length_of_time(3600 * x) for x in (1, 24, 47.9, 48)] == [
        "1 h 00 min",
        "24 h 00 min",
        "47 h 54 min",
        "2 d 0 h",
    ]
    times = (0.9994, 0.9996, 59.94, 59.96, 3599.4, 3599.6)
    assert [length_of_time(x) for x in times] == ["999 ms", "1 s", "59.9 s", "1 min 00 s", "59 min 59 s", "1 h 00 min"]
    sizes = (999.4, 999.9, 999_400, -999_600, 999_600_000, 999.6e9)
    assert [bytes_in_words(x) for x in sizes] == ["999 B", "1 kB", "999 kB", "-1 MB", "1 GB", "1 TB"]


def test_words_of_what_is_very_large_or_small_or_no_number() -> None:
    values = (math.nan, -math.inf, 1e15, -2.5e17, 3.2e12, 4e6, 0.001, 0.0009994, 1.234e-5, 0.12345)
    assert [short(x) for x in values] == [
        "–", "–", "1e15", "-2.5e17", "3.2T", "4M", "0.001", "9.99e-4", "1.23e-5", "0.1235",
    ]  # fmt: skip
    assert [percent(x) for x in (-0.25, -2.0, 1.5)] == ["-25.0%", "-200%", "150%"]
    assert [length_of_time(x) for x in (math.inf, 0.9, 1, 59.4, 65, 89.6, 3660)] == [
        "–", "900 ms", "1 s", "59.4 s", "1 min 05 s", "1 min 30 s", "1 h 01 min",
    ]  # fmt: skip
    assert [bytes_in_words(x) for x in (999, 1000, 4.56e6, -2e9, 1.5e12)] == [
        "999 B",
        "1 kB",
        "4.56 MB",
        "-2 GB",
        "1.5 TB",
    ]
