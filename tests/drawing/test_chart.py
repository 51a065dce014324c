"""Lines and what befell a run stand where their numbers say."""

import re

import numpy as np

from colonnade.drawing.chart import Chart, Mark, Series, drawn, lane
from colonnade.drawing.scale import Scale

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


def test_a_band_goes_from_the_lowest_to_the_highest_of_what_a_point_stands_for() -> None:
    values = np.tile([2.0, 4.0], 400)
    line = Series("a", values, {"step": np.arange(800.0)}, 0)
    (band,) = re.findall(r'class="band c0" d="M(.*?)Z"', drawn(Chart("c", [line]), {"step": Scale(0.0, 800.0)}))
    heights = [float(point.split()[1]) for point in band.split("L")]
    assert len(heights) == 800 and heights[:400] == [heights[0]] * 400 and heights[400:] == [heights[-1]] * 400
    assert heights[0] < heights[-1], "it goes there along the top, and back along the bottom"


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
