"""Bars and dots stand where their numbers say, and what they are called is text."""

import re

import numpy as np

from colonnade.drawing import bars, scatter
from colonnade.drawing.bars import Box, Span
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


def test_parts_are_told_as_shares_of_what_is_there_and_what_is_below_nothing_takes_no_room() -> None:
    parts, colours = {"a": 2.0, "b": -1.0, "c": 3.0}, {"a": "p0", "b": "p1", "c": "p2"}
    found = bars.stacked(parts, colours, short, whole=10.0)
    assert re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', found) == [
        ("0.00", "200.00"), ("200.00", "0.00"), ("200.00", "300.00")
    ]  # fmt: skip
    assert re.findall(r"<title>(.*?)</title>", found) == ["a: 2, 50.0%", "b: -1, 0.0%", "c: 3, 75.0%"]
    assert "a: 0, 0.0%" in bars.stacked({"a": 0.0}, colours, short) == bars.stacked({"a": 0.0}, colours, short, whole=0)


def test_names_stand_in_the_middle_of_boxes_that_have_room() -> None:
    boxes = [Box(0.0, 0.5, "p0", "", "wide"), Box(0.5, 0.018, "p1", "", "narrow"), Box(0.6, 0.4, "p2", "")]
    assert re.findall(r'<b style="left:([\d.]+)%">(.*?)</b>', bars.bar(boxes)) == [("25.00", "wide")]


def test_what_all_rows_do_is_in_the_legend_and_times_are_written_as_asked() -> None:
    rows = [("stage 0", [Span("F", "F7", 0.0, 1.0)]), ("stage 1", [Span("warm", "", 1.0, 3.0)])]
    found = bars.gantt("g", "", iter(rows), 4.0, words=lambda seconds: f"{seconds:g} ticks")
    legend = re.findall(r'class="key (\w+)"></i>(\w+)', found)
    assert legend == [("kF", "forward"), ("kwarm", "warm"), ("idle", "idle")]
    assert re.findall(r"<title>(.*?)</title>", found) == ["forward 7 1 ticks", "warm  2 ticks"]
    assert re.findall(r'class="row"><span title="(.*?)">', found) == ["stage 0", "stage 1", ""]
    assert ">4 ticks</span>" in found and ">1 ticks</span>" in found


def test_dots_are_at_their_places_and_named() -> None:
    found = scatter.drawn(
        "t", "", [Dot(1.0, 10.0, EVIL, "c0")], [Curve([(0.0, 0.0), (2.0, 20.0)], "c1")],
        across=("x", Scale(0.0, 2.0), short), up=(Scale(0.0, 20.0), short), legend={"one": "c0"},
    )  # fmt: skip
    assert 'd="M500.0 500.0h0"' in found and 'd="M0.0 1000.0L1000.0 0.0"' in found
    assert "<script>" not in found and "data-axis" not in found


def test_what_dots_and_curves_are_is_told_and_numbers_of_each_axis_in_their_own_words() -> None:
    found = scatter.drawn(
        "Title", "what it is", [Dot(1.0, 10.0, "it", "c4")], [Curve([(0.0, 0.0), (2.0, 20.0)], "c5")],
        across=("the x", Scale(0.0, 2.0), lambda x: f"{x:g} m"), up=(Scale(0.0, 20.0), lambda y: f"{y:g} kg"),
        legend={"dots": "c4", "a curve": "c5"},
    )  # fmt: skip
    assert re.findall(r'class="key (c\d)"></i>([\w ]+)', found) == [("c4", "dots"), ("c5", "a curve")]
    assert "<b>Title</b> what it is" in found and "<em>the x</em>" in found
    labels = re.findall(r'style="(top|left):([\d.]+)%">([^<]*)<', found)
    assert ("top", "0.00", "20 kg") in labels and ("left", "100.00", "2 m") in labels
    assert found.index('class="line c5"') < found.index('class="dots c4"'), "dots are above curves"


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
