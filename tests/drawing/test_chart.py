"""Lines and what befell a run stand where their numbers say."""

import json
import re
from typing import Any

import numpy as np
import pytest

from colonnade.drawing.chart import Chart, Mark, Series, drawn, lane, scales, thinning
from colonnade.drawing.html import tag
from colonnade.drawing.scale import Scale, scale_of

AXES = {"step": Scale(0.0, 4.0), "hours": Scale(0.0, 2.0)}
STEP = {"step": Scale(0.0, 4.0)}


def line(*values: float, name: str = "a", colour: int = 0) -> Series:
    """A number at each step from 0."""
    return Series(name, np.array(values), {"step": np.arange(float(len(values)))}, colour)


def told(text: str) -> dict[str, Any]:
    """What the page's script is given."""
    found: dict[str, Any] = json.loads(re.findall(r"<script.*?>(.*?)</script>", text)[0])
    return found


def test_lines_and_marks_are_at_their_places_on_each_axis() -> None:
    places = {"step": np.array([0.0, 2.0]), "hours": np.array([0.0, 0.5])}
    line = Series("a", np.array([0.0, 10.0]), places, 0, dots=True, is_filled=True)
    marks = [Mark("saved", "s", {"step": 0.0, "hours": 0.0}), Mark("trouble", "t", {"step": 1.0}),
             Mark("resumed", "r", {"step": 4.0, "hours": 1.5})]  # fmt: skip
    text = drawn(Chart("c", [line]), AXES, marks)
    by_step, by_hours = re.findall(r"<svg.*?</svg>", text)
    marked = r'class="mark ([a-z]+)" d="M([\d.]+) 0V1000"'
    assert re.findall(marked, by_step) == [("saved", "0.0"), ("trouble", "250.0"), ("resumed", "1000.0")]
    assert re.findall(marked, by_hours) == [("saved", "0.0"), ("resumed", "750.0")]
    highest = f"{1000 * (1 - 10 / 10.6):.1f}"  # there is some room above it
    for plot, last in ((by_step, "500.0"), (by_hours, "250.0")):
        path = f"M0.0 1000.0L{last} {highest}"
        assert f'class="line c0" d="{path}"' in plot
        assert f'class="band c0" d="{path}L{last} 1000.0L0.0 1000.0Z"' in plot
        assert f'class="dots c0" d="M0.0 1000.0h0M{last} {highest}h0"' in plot


@pytest.mark.parametrize("num_series", [1, 3, 4])
def test_a_band_goes_from_the_lowest_to_the_highest_of_what_a_point_stands_for(num_series: int) -> None:
    """Of few lines: more bands would hide them, and the axis has room for the lines alone. The numbers are all told."""
    lines = [Series(f"a{n}", np.tile([2.0, 4.0], 400), {"step": np.arange(800.0)}, n) for n in range(num_series)]
    text = drawn(Chart("c", lines), {"step": Scale(0.0, 900.0)})
    bands = re.findall(r'class="band c\d" d="M(.*?)Z"', text)
    assert len(bands) == (num_series if num_series < 4 else 0) and text.count('class="line c') == num_series
    for band in bands:
        low, high = (1000 * (1 - scale_of([2.0, 4.0]).at(value)) for value in (2.0, 4.0))
        heights = [point.split()[1] for point in band.split("L")]
        assert heights == [f"{high:.1f}"] * 400 + [f"{low:.1f}"] * 400, "there along the top, back along the bottom"
    highest = max(float(each) for each in re.findall(r'style="top:[\d.]+%">([\d.]+)<', text))
    assert (highest >= 4.0) is (num_series < 4), "the means are 3"
    told = json.loads(re.findall(r"<script.*?>(.*?)</script>", text)[0])
    assert told["axes"] == {"step": {"high": 900.0, "name": "steps"}}
    for each in told["series"]:
        assert [set(each[key]) for key in ("low", "y", "high")] == [{2.0}, {3.0}, {4.0}]
        assert each["x"]["step"] == [float(2 * n + 1) for n in range(400)]


def test_where_a_point_is_one_number_there_is_no_band() -> None:
    text = drawn(
        Chart("c", [Series("a", np.array([1.0, 2.0]), {"step": np.array([1.0, 2.0])}, 0)]), {"step": AXES["step"]}
    )
    (series,) = json.loads(re.findall(r"<script.*?>(.*?)</script>", text)[0])["series"]
    assert "band" not in text and series.keys() == {"name", "colour", "x", "y"} and series["y"] == [1.0, 2.0]


def test_an_axis_ends_where_the_longest_run_does_and_is_there_if_one_has_it() -> None:
    places = [{"step": np.array([1.0, 2.0])}, {"step": np.array([1.0, 9.0]), "tokens": np.array([5.0, np.nan])}]
    assert scales(places) == {"step": Scale(0.0, 9.0), "tokens": Scale(0.0, 5.0)}
    assert scales([{"step": np.array([]), "hours": np.zeros(3)}]) == {}


def test_lines_are_named_where_there_are_several() -> None:
    lines = [Series(name, np.array([1.0, 2.0]), {"step": np.array([1.0, 2.0])}, n) for n, name in enumerate("ab")]
    one, both = (drawn(Chart("c", lines[:number]), {"step": AXES["step"]}) for number in (1, 2))
    assert re.findall(r'class="key c(\d)"></i>(\w)', both) == [("0", "a"), ("1", "b")] and "legend" not in one


def test_signs_are_at_their_places_and_those_that_would_cover_each_other_are_one() -> None:
    marks = [Mark("saved", f"s{number}", {"step": 1.0 + number / 1000}) for number in range(15)]
    found = lane([*marks, Mark("best", "b", {"step": 3.0}), Mark("other", "o", {"step": 9.0})], {"step": AXES["step"]})
    assert re.findall(r'class="sign (\w+)" style="left:([\d.]+)%"', found) == [
        ("saved", "25.00"),
        ("best", "75.00"),
        ("other", "100.00"),
    ]
    (words,) = re.findall(r'title="(s0[^"]*)"', found)
    assert words.split("\n") == [*(f"s{number}" for number in range(12)), "and 3 more"]


def test_a_chart_without_numbers_says_so() -> None:
    for chart, axes in ((Chart("c", [line(np.nan)], unit="GB"), STEP), (Chart("c", [line(1.0)], unit="GB"), {})):
        text = drawn(chart, axes)
        assert "<b>c</b> GB" in text and "No numbers yet." in text and "<svg" not in text
    text = drawn(Chart("c", [line(1.0, 2.0), line(np.nan, np.inf, name="none")]), STEP)
    assert [each["name"] for each in told(text)["series"]] == ["a"] and "legend" not in text


def test_an_axis_of_numbers_far_apart_is_logarithmic_where_it_may_be_and_that_is_told() -> None:
    far, near = [line(1.0, 1000.0)], [line(1.0, 2.0)]
    heads = [
        drawn(Chart("c", lines, "s", may_be_log=may), STEP).partition("</figcaption>")[0]
        for lines, may in ((far, True), (far, False), (near, True))
    ]
    assert [head.rpartition(">")[2] for head in heads] == [" s logarithmic", " s", " s"]


def test_numbers_along_the_axes_stand_where_they_are_and_in_the_charts_words() -> None:
    """Beside their lines of the grid, the highest at the top; steps are numbers whatever the chart's are."""
    for keys, words in (
        ({}, ["0", "0.25", "0.5", "0.75", "1"]),
        ({"is_share": True}, ["0.0%", "25.0%", "50.0%", "75.0%", "100%"]),
        ({"in_words": lambda value: f"{value:g} kg"}, ["0 kg", "0.25 kg", "0.5 kg", "0.75 kg", "1 kg"]),
    ):
        text = drawn(Chart("c", [line(0.0, 1.0)], from_zero=True, **keys), STEP)  # type: ignore[arg-type]
        up = re.findall(r'style="top:([\d.]+)%">([^<]*)<', text)
        assert [word for _, word in up] == words
        places = [100 * (1 - number / 4 / 1.06) for number in range(5)]
        assert [float(at) for at, _ in up] == pytest.approx(places, abs=0.01)
        grid = re.findall(r'class="grid" d="M0.0 ([\d.]+)L1000.0 ([\d.]+)"', text)
        assert [float(end) for ends in grid for end in ends] == pytest.approx(
            [10 * place for place in places for _ in range(2)], abs=0.1
        )
        under = re.findall(r'style="left:([\d.]+)%">([^<]*)<', text)
        assert under == [("0.00", "0"), ("25.00", "1"), ("50.00", "2"), ("75.00", "3"), ("100.00", "4")]
        assert told(text)["share"] is ("is_share" in keys)


def test_after_the_eighth_colour_comes_the_first_again() -> None:
    text = drawn(Chart("c", [line(*[1.0, 2.0] * 300, colour=9), line(3.0, colour=15, name="b")]), STEP)
    assert set(re.findall(r"class=\"(\w+) c(\d+)\"", text)) == {
        ("key", "1"), ("key", "7"), ("band", "1"), ("line", "1"), ("line", "7"), ("dots", "7")
    }  # fmt: skip
    assert [each["colour"] for each in told(text)["series"]] == [1, 7]


def test_a_number_alone_is_a_dot_and_several_are_a_line() -> None:
    one, two = (drawn(Chart("c", [line(*values)]), STEP) for values in ((1.0,), (1.0, 2.0)))
    assert 'class="dots c0" d="M0.0 ' in one and "dots" not in two


def test_a_line_is_drawn_over_the_axes_that_it_has() -> None:
    """One whose place is not known at first begins where the axis does, and the script is told that it is not."""
    places = {"step": np.array([0.0, 2.0]), "hours": np.array([np.nan, 1.0])}
    text = drawn(Chart("c", [Series("a", np.array([1.0, 2.123456789]), places, 0), line(3.0, 4.0, name="b")]), AXES)
    by_step, by_hours = re.findall(r"<svg.*?</svg>", text)
    assert (by_step.count('class="line'), by_hours.count('class="line')) == (2, 1)
    assert re.search(r'class="line c0" d="M0.0 [\d.]+L500.0 ', by_hours)
    assert re.findall(r'class="plot (by-\w+)"', text) == ["by-step", "by-hours"]
    first, second = told(text)["series"]
    assert first["x"] == {"step": [0.0, 2.0], "hours": [None, 1.0]} and second["x"] == {"step": [0.0, 1.0]}
    assert first["y"] == [1.0, 2.12346], "six digits"


def test_a_text_stands_under_each_drawing() -> None:
    text = drawn(Chart("c", [line(1.0, 2.0)]), STEP, below=tag("p", "below it"))
    assert text.index("</svg>") < text.index("<p>below it</p>") < text.index("<script")


def test_what_a_point_stands_for_is_told_where_it_is_more_than_one_number() -> None:
    few, many, more = (Chart("c", [line(*[1.0] * count)]) for count in (400, 401, 1201))
    assert thinning([few]) == thinning([]) == ""
    assert thinning([few, many]).startswith("A point of a line is the mean of up to 2 steps;")
    assert "up to 4 steps" in thinning([many, more, few])


def test_each_axis_has_a_lane_of_the_signs_that_are_on_it() -> None:
    marks = [Mark("saved", "before", {"step": -1.0}), Mark("best", "b", {"step": 2.0, "hours": 0.5})]
    lanes = re.findall(r'<div class="lane by-(\w+)">(.*?)</div>', lane(marks, AXES))
    assert [(axis, re.findall(r'class="sign (\w+)" style="left:([\d.]+)%"', signs)) for axis, signs in lanes] == [
        ("step", [("saved", "0.00"), ("best", "50.00")]),
        ("hours", [("best", "25.00")]),
    ]
