"""What turns numbers into colours: pure, and held against what it must keep."""

import base64
import math
import re
import struct
import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from colonnade.report import heat as heat_module
from colonnade.report.heat import Thinned, drawn, heats
from colonnade.report.pictures import NOTHING, indices, palette, png


def test_a_picture_is_a_png_with_a_colour_a_cell() -> None:
    table = np.array([[0.0, 0.5, 1.0], [1.0, math.nan, 0.0]])
    cells = indices(table, 0.0, 1.0)
    content = base64.b64decode(png(cells).removeprefix("data:image/png;base64,"))
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        name, inside = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        assert struct.unpack(">I", content[at + 8 + length : at + 12 + length])[0] == zlib.crc32(name + inside)
        chunks[name] = inside
        at += 12 + length
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (3, 2, 8, 3, 0, 0, 0)
    lines = zlib.decompress(chunks[b"IDAT"])
    assert lines == b"\0" + bytes([0, 126, 253]) + b"\0" + bytes([253, NOTHING, 0])
    assert len(chunks[b"PLTE"]) == 3 * 256 and chunks[b"tRNS"][NOTHING] == 0
    assert (palette()[0], palette()[-1]) == ((68, 1, 84), (253, 231, 37))


def test_heat_maps_have_a_row_a_unit_and_keep_the_highest_of_steps_that_share_a_column() -> None:
    lines = [
        {
            "step": step,
            "activations": {"blocks.0": {"logits": {"maximum": float(step == 501), "minimum": -float(step == 502)}}},
            "updates": {"blocks.0": 1.0, "blocks.1": 2.0},
        }
        for step in range(1, 1001)
    ]
    found = {(heat.site, heat.statistic): heat for heat in heats(lines)}
    assert set(found) == {("logits", "maximum"), ("logits", "minimum"), ("updates", "ratio")}
    highest = found["logits", "maximum"].table
    assert highest.shape[1] == 240 and highest.max() == 1.0 and np.argmax(highest) == 500 * 240 // 999
    assert found["logits", "minimum"].table.min() == -1.0
    assert found["updates", "ratio"].units == ["blocks.0", "blocks.1"]
    assert found["updates", "ratio"].table[:, 0].tolist() == [1.0, 2.0]


def test_what_is_the_same_everywhere_is_a_number_and_not_a_map() -> None:
    lines = [{"step": step, "activations": {"blocks.0": {"logits": {"maximum": 3.0, "rms": step}}}} for step in (1, 2)]
    page = str(drawn(lines))
    assert "The same in every unit and step: maximum 3." in page and page.count("<img") == 1


@pytest.mark.parametrize("lines", [[], [{"step": 1}], [{"step": 1, "activations": {}}, {"step": 2, "updates": {}}]])
def test_lines_without_numbers_have_no_maps(lines: list[dict[str, Any]]) -> None:
    assert heats(lines) == []


def test_a_step_that_was_measured_twice_has_one_column() -> None:
    """As where a run went back: there is a colour everywhere."""
    (heat,) = heats([{"step": step, "updates": {"blocks.0": float(step)}} for step in (1, 2, 3, 4, 3, 4, 5)])
    assert heat.table.tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0]]


def test_lines_that_became_one_have_the_extremes_of_all() -> None:
    """With the step of the first; the newest is there for itself too. What one lacks or has as a gap is the other's."""
    lines: list[dict[str, Any]] = [
        {"step": step, "activations": {"b": {"logits": {"maximum": float(step % 4), "minimum": -float(step % 3)}}}}
        for step in range(1, 10)
    ]
    lines[2]["activations"]["b"]["logits"]["maximum"] = math.nan
    lines[3]["updates"] = {"late": 5.0}
    thinned = Thinned(5)
    for line in lines:
        thinned.append(line)
    found = thinned.lines
    assert [line["step"] for line in found] == [1, 3, 5, 7, 9, 9] and found[-2:] == [lines[-1]] * 2
    logits = [line["activations"]["b"]["logits"] for line in found]
    assert [each["maximum"] for each in logits] == [2.0, 0.0, 2.0, 3.0, 1.0, 1.0]
    assert [each["minimum"] for each in logits] == [-2.0, -1.0, -2.0, -2.0, -0.0, -0.0]
    assert [line.get("updates") for line in found] == [None, {"late": 5.0}, None, None, None, None]


@pytest.mark.parametrize("most", [7, 8])
def test_each_line_that_is_held_stands_for_as_many(most: int) -> None:
    """Also where lines have become one many times: the beginning of a long run is as fine as its end."""
    thinned = Thinned(most)
    for step in range(1, 1001):
        thinned.append({"step": step, "updates": {"b": float(step)}})
        *held, newest = thinned.lines
        assert newest["step"] == step and len(held) <= most
    steps = [line["step"] for line in held]
    assert len(held) > most // 2 and len({after - before for before, after in pairwise(steps)}) == 1
    assert [line["updates"]["b"] for line in held] == [*(step - 1.0 for step in steps[1:]), 1000.0]


def test_where_nothing_is_most_telling_what_there_is_is_shown_at_once() -> None:
    """Two at most."""
    names = ("zeros", "near_limit", "mean")
    for count, titles in ((1, ["share of zeros"]), (3, ["share of zeros", "share near the format&#x27;s limit"])):
        numbers = [dict.fromkeys(names[:count], step) for step in (1, 2)]
        lines = [{"step": step, "activations": {"a": {"logits": numbers[step - 1]}}} for step in (1, 2)]
        shown, *more = str(drawn(lines)).split("<details")
        assert re.findall("<figcaption><b>(.*?)<", shown) == titles and len(more) == (count > 2)


def test_what_is_most_telling_comes_first_and_the_rest_is_a_click_away() -> None:
    numbers = ("zeros", "maximum", "near_limit", "rms")
    lines = [{"step": step, "activations": {"a": {"logits": dict.fromkeys(numbers, step)}}} for step in (1, 2)]
    shown, more = str(drawn(lines)).split("<details")
    assert re.findall("<figcaption><b>(.*?)<", shown) == ["RMS", "maximum"]
    assert re.findall("<figcaption><b>(.*?)<", more) == ["share of zeros", "share near the format&#x27;s limit"]


def test_numbers_without_a_site_are_those_of_a_unit_s_output() -> None:
    """As earlier versions wrote them."""
    (heat,) = heats([{"step": step, "activations": {"blocks.0": {"rms": float(step)}}} for step in (1, 2)])
    assert (heat.site, heat.statistic, heat.units, heat.table.tolist()) == ("output", "rms", ["blocks.0"], [[1.0, 2.0]])


def test_a_number_that_is_not_finite_hides_none_of_the_same_column() -> None:
    (heat,) = heats([{"step": step, "updates": {"a": value}} for step, value in ((1, 1.0), (1, math.inf), (2, 3.0))])
    assert heat.table.tolist() == [[1.0, 3.0]]


@pytest.mark.parametrize(
    ("lowest", "highest", "is_log"),
    [(1.0, 10.0, False), (1.0, 1000.0, True), (0.0, 1000.0, False), (-1.0, 1000.0, False), (-1000.0, -1.0, False)],
)
def test_numbers_far_apart_have_colours_by_powers_of_ten(lowest: float, highest: float, is_log: bool) -> None:
    """Where all are above 0. And the page's script is told so."""
    values = ((1, lowest), (2, highest))
    page = str(drawn([{"step": step, "updates": {"blocks.0": value}} for step, value in values]))
    assert ('data-log="1"' in page, " log<" in page) == (is_log, is_log)


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0, 4.0), (20.0, 200.0, 2e3, 2e4)], ids=["evenly", "by powers of ten"])
def test_colours_go_from_the_lowest_number_to_the_highest(values: tuple[float, ...]) -> None:
    page = str(drawn([{"step": step, "updates": {"blocks.0": value}} for step, value in enumerate(values, 1)]))
    assert png(np.array([[0, 84, 169, 253]], dtype=np.uint8)) in page


def test_a_whole_number_that_no_float_can_hold_is_a_gap() -> None:
    (heat,) = heats([{"step": step, "updates": {"a": value}} for step, value in ((1, 1), (2, 10**400), (3, 3.0))])
    assert heat.table[0, 0] == 1.0 and math.isnan(heat.table[0, 1]) and heat.table[0, 2] == 3.0


def test_what_was_never_finite_is_a_gap_and_no_picture() -> None:
    lines = [{"step": step, "updates": {"a": math.nan, "b": float(step)}} for step in (1, 2)]
    (heat,) = heats(lines)
    assert heat.units == ["a", "b"] and np.isnan(heat.table[0]).all() and heat.table[1].tolist() == [1.0, 2.0]
    assert "<img" not in drawn([{"step": step, "updates": {"a": math.inf}} for step in (1, 2)])


def test_what_is_nothing_everywhere_is_said_to_be_so() -> None:
    lines = [{"step": step, "activations": {"a": {"logits": {"zeros": 0.0, "rms": step}}}} for step in (1, 2)]
    assert "The same in every unit and step: share of zeros 0." in drawn(lines)


def test_a_map_names_its_ends_and_as_many_units_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beside the middle of its row."""
    monkeypatch.setattr(heat_module, "MOST_ROWS", 25)
    units = [f"blocks.{number}" for number in range(30)]
    lines = [{"step": step, "updates": dict.fromkeys(units, step / 1000)} for step in (1000, 2000)]
    text = str(drawn(lines))
    rows = "\n".join(units[:25])
    assert f'data-rows="{rows}"' in text
    names = re.findall(r'<span style="top:([\d.]+)%">(.*?)</span>', text)
    assert names == [(f"{100 * (row + 0.5) / 25:.2f}", units[row]) for row in range(0, 25, 3)]
    assert '<span class="legend">1<i class="ramp"></i>2<' in text
    assert "<span>step 1,000</span><em>2,000</em>" in text
