"""Bars and curves of a page: every mark where its number says, and within the picture."""

from __future__ import annotations

import re

import pytest

from colonnade.corpus.pictures import Bar, bars, curve, page, table


def rects(svg: str) -> list[tuple[float, float, float, float]]:
    """(x, y, width, height) of each bar."""
    found = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)
    return [(float(x), float(y), float(width), float(height)) for x, y, width, height in found]


def test_what_is_lost_stands_behind_what_is_kept() -> None:
    svg = bars([Bar("read", 60, lost=20, note="(−20)"), Bar("filter", 40, lost=20), Bar("write", 40)])
    first, lost, second, lost_too, third = rects(svg)
    assert lost[0] == pytest.approx(first[0] + first[2], abs=0.1) and lost[1] == first[1]
    assert first[2] == pytest.approx(3 * lost[2], abs=0.2) and lost_too[2] == pytest.approx(lost[2], abs=0.1)
    assert second[2] == third[2] == pytest.approx(first[2] * 40 / 60, abs=0.1)
    assert second[1] >= first[1] + first[3] and third[1] >= second[1] + second[3], "one under the other"
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
    assert third[1] + third[3] <= height and lost[0] + lost[2] < width
    assert ">60 (−20)</text>" in svg and ">40</text>" in svg


def test_bars_of_nothing_are_a_picture_too() -> None:
    assert rects(bars([Bar("read", 0)]))[0][2] == 0 and "<rect" not in bars([])


def test_a_curve_rises_from_left_to_right_with_its_mark_at_a_place_of_the_axis() -> None:
    svg = curve({1.0: 1.0, 0.0: 0.0, 0.5: 0.25}, at=0.5, label="similarity")
    points = [tuple(map(float, each.split(","))) for each in re.findall(r'points="([^"]*)"', svg)[0].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x0 < x1 < x2 and x1 - x0 == pytest.approx(x2 - x1)
    assert y0 > y1 > y2 and y0 - y1 == pytest.approx((y0 - y2) / 4), "what is more is higher"
    assert float(re.findall(r'M([\d.]+) 10V\d+" stroke="#c8553d"', svg)[0]) == pytest.approx(x1)
    ends = {text: float(y) for y, text in re.findall(r'y="(\d+)" text-anchor="end">([01])<', svg)}
    assert ends["1"] < ends["0"] and abs(ends["0"] - y0) < 10 and abs(ends["1"] - y2) < 10


def test_numbers_of_a_table_are_grouped_and_stand_to_the_right() -> None:
    found = table(["name", "count"], [["a", 12_345], ["b", 6]])
    assert '<th>name</th><th class="n">count</th>' in found
    assert '<tr><td>a</td><td class="n">12,345</td></tr>' in found


def test_what_the_text_of_a_page_says_is_no_markup() -> None:
    head, rows = ["<i>", "n"], [["a <b> & c", 1], ["</table>", 2]]
    found = table(head, rows)
    assert "<th>&lt;i&gt;</th>" in found and "<td>a &lt;b&gt; &amp; c</td>" in found
    assert "<td>&lt;/table&gt;</td>" in found and found.count("</table>") == 1
    drawn = bars([Bar("<b>", 1, note="<u>")]) + curve({0.0: 0.0}, at=0.5, label="<s>")
    assert all(f"&lt;{each}&gt;" in drawn and f"<{each}>" not in drawn for each in "bus")
    whole = page("A & <b>", ["<p>block</p>"])
    assert "<title>A &amp; &lt;b&gt;</title>" in whole and "<h1>A &amp; &lt;b&gt;</h1>\n<p>block</p>" in whole
