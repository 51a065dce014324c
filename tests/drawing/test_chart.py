"""Lines and what befell a run stand where their numbers say."""

import json
import re

import numpy as np
import pytest

from colonnade.drawing.chart import Chart, Mark, Series, drawn, lane, scales
from colonnade.drawing.scale import Scale, scale_of

AXES = {"step": Scale(0.0, 4.0), "hours": Scale(0.0, 2.0)}


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
