"""Bars and dots stand where their numbers say, and what they are called is text."""

import re

import numpy as np

from colonnade.drawing import bars, scatter
from colonnade.drawing.bars import Span
from colonnade.drawing.chart import Chart, Series, drawn
from colonnade.drawing.html import table
from colonnade.drawing.scale import Scale, short
from colonnade.drawing.scatter import Curve, Dot

EVIL = '<script>alert("1")</script>'


def test_parts_lie_behind_each_other_and_fill_their_share_of_the_whole() -> None:
    found = bars.stacked({"a": 1.0, EVIL: 3.0}, {"a": "p0", EVIL: "p1"}, short, whole=8.0)
    places = re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', found)
    assert places == [("0.00", "125.00"), ("125.00", "375.00")]
    assert "<script>" not in found and "a: 1, 25.0%" in found


def test_actions_begin_and_end_where_they_do() -> None:
    found = bars.gantt("g", "", [("stage 0", [Span("F", "F0", 0.0, 1.0), Span("B", "B0", 3.0, 4.0)])], 4.0, words=short)
    assert re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', found) == [("0.00", "250.00"), ("750.00", "250.00")]
    assert "backward 0 1" in found and "<b style=" in found
    noted = bars.gantt("g", "", [("stage 0", [Span("F", "F0", 0.0, 1.0)])], 4.0, note=f"One alone {EVIL}.")
    assert noted.count('class="quiet"') == 1 and "One alone &lt;script&gt;" in noted
    assert 'class="quiet"' not in found, "nothing is left out"


def test_dots_are_at_their_places_and_named() -> None:
    found = scatter.drawn(
        "t", "", [Dot(1.0, 10.0, EVIL, "c0")], [Curve([(0.0, 0.0), (2.0, 20.0)], "c1")],
        across=("x", Scale(0.0, 2.0), short), up=(Scale(0.0, 20.0), short), legend={"one": "c0"},
    )  # fmt: skip
    assert 'd="M500.0 500.0h0"' in found and 'd="M0.0 1000.0L1000.0 0.0"' in found
    assert "<script>" not in found and "data-axis" not in found


def test_an_axis_may_always_begin_at_zero() -> None:
    values = np.array([90.0, 100.0])
    line = Series("a", values, {"x": np.array([0.0, 1.0])}, 0, is_filled=True)
    axes, names = {"x": Scale(0.0, 1.0)}, {"x": "place"}
    near, whole = (drawn(Chart("c", [line], from_zero=zero), axes, names=names) for zero in (False, True))
    assert ">0</span>" in whole.split('class="area"')[0] and ">0</span>" not in near.split('class="area"')[0]
    assert '"name":"place"' in whole and 'Z"' in whole


def test_numbers_under_bars_are_quarters_of_their_length() -> None:
    labels = re.findall(r'<span style="left:(\d+)%">(.*?)</span>', bars.across(8.0, short))
    assert labels == [("0", "0"), ("25", "2"), ("50", "4"), ("75", "6"), ("100", "8")]


def test_columns_of_numbers_stand_to_the_right() -> None:
    found = table(["a", "b"], [["x", "1"]], numbers=[1])
    assert re.findall(r"<t[hd]\b.*?>", found) == ["<th>", '<th class="number">', "<td>", '<td class="number">']
