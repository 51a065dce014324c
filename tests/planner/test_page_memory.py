"""Memory and traffic of a plan as pictures: what is drawn where, and what is told of it."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.mesh.layout import Layout
from colonnade.pipeline.schedule import Action
from colonnade.planner.memory import Memory
from colonnade.planner.page_memory import Course, by_kind, over_time, traffic
from colonnade.planner.ranks import RankKind, RankPlan


def drawn(
    *, limit: float | None = None, action: Action | None = None, course: Course | None = None, parameters: int = 100
) -> tuple[str, dict[str, Any]]:
    """A rank that holds 123 bytes all the time and 1,000 at most; and what the page's script is given."""
    walk: Any = SimpleNamespace(
        memory=Memory(parameters, 20, 3, 50, 60, 70, host=80), peak=SimpleNamespace(bytes=1_000, action=action)
    )
    found = course or Course([0.0, 1.0, 3.0], [200, 1_000, 300], 4.0)
    text = over_time("rank 0", walk, found, axis="seconds", limit=limit)
    return text, json.loads(re.findall(r"<script.*?>(.*?)</script>", text)[0])


def test_memory_is_drawn_from_where_it_changes_to_the_steps_end() -> None:
    """From 0, in bytes, and never logarithmic: beside what is always there."""
    text, told = drawn(course=Course([0.0, 1.0, 3.0], [200, 1_000, 7], 4.0))
    assert told["axes"] == {"place": {"high": 4.0, "name": "seconds"}}
    first, always = told["series"]
    assert (first["name"], first["x"]["place"], first["y"]) == ("rank 0", [0.0, 1.0, 3.0, 4.0], [200, 1_000, 7, 7])
    assert (always["name"], always["x"]["place"], always["y"]) == ("always there", [0.0, 4.0], [123, 123])
    assert "logarithmic" not in text
    high = drawn(course=Course([0.0, 1.0, 3.0], [900, 1_000, 950], 4.0), parameters=800)[0]
    labels = re.findall(r'style="top:[\d.]+%">([^<]*)<', high)
    assert labels[0] == "0 B" and labels[-1] == "1 kB"


@pytest.mark.parametrize(("limit", "is_drawn"), [(None, False), (3_999.0, True), (4_000.0, False)])
def test_the_devices_memory_is_drawn_where_a_rank_takes_more_than_a_quarter_of_it(
    limit: float | None, is_drawn: bool
) -> None:
    names = [each["name"] for each in drawn(limit=limit)[1]["series"]]
    assert names == ["rank 0", "always there"] + ["the device's memory"] * is_drawn


@pytest.mark.parametrize(("action", "words"), [(Action("B", 2), "in B2"), (None, "in outside of the schedule")])
def test_the_most_is_told_with_its_moment(action: Action | None, words: str) -> None:
    assert f"<b>Memory of rank 0</b> at most 1 kB, {words}<" in drawn(action=action)[0]


@pytest.mark.parametrize(("changes", "each"), [(399, 1), (400, 2), (900, 3)])
def test_a_line_of_many_changes_says_what_its_points_stand_for(changes: int, each: int) -> None:
    course = Course([float(number) for number in range(changes)], [200] * changes, float(changes))
    text = drawn(course=course)[0]
    assert re.findall(r"is the mean of up to (\d+) changes", text) == [str(each)] * (each > 1)
    assert ('<p class="quiet">' in text) is (each > 1)


LARGE, SMALL = ("all_reduce", "tp"), ("send", "pp")


def test_bars_of_ranks_are_named_by_their_stages_with_a_colour_of_each_kind() -> None:
    kinds = RankKind((0, 1), 2, Memory(1, 2, 3, 4, 5, 6), {}), RankKind((2,), 1, Memory(1, 2, 3, 4, 5, 7), {})
    text = by_kind(RankPlan(Layout(pp=3), 7, 7, kinds), None)
    assert re.findall(r'<div class="row"><span title="(.*?)">', text) == ["stage 0–1", "stage 2", ""]
    assert re.findall(r'<rect .*?class="(\w+)"', text) == [f"p{number}" for number in range(6)] * 2
    names = ["parameters", "gradients", "optimizer", "buffers", "activations", "operators"]
    keys = re.findall(r'class="key (\w+)"></i>(\w+)', text)
    assert keys == [(f"p{number}", name) for number, name in enumerate(names)]


def test_traffic_of_all_ranks_is_drawn_to_one_scale_with_a_colour_of_each_flow() -> None:
    """Whatever the last of them sends; after ten colours the first comes again."""
    few = {("all_gather", f"axis{number}"): (1, 100) for number in range(10)}
    kinds = RankKind((0,), 1, Memory(0, 0, 0, 0, 0), {LARGE: (2, 3_000), **few})
    less = RankKind((1,), 1, Memory(0, 0, 0, 0, 0), {SMALL: (1, 500)})
    text = traffic(RankPlan(Layout(pp=2), 7, 7, (kinds, less)))
    keys = re.findall(r'class="key (\w+)"></i>([\w ]+)', text)
    assert keys == [
        *((f"p{number}", f"axis{number} all_gather") for number in range(10)),
        ("p0", "tp all_reduce"), ("p1", "pp send"),
    ]  # fmt: skip
    widths = [float(each) for each in re.findall(r'<rect [^>]*width="([\d.]+)"', text)]
    assert widths == pytest.approx([25.0] * 10 + [750.0, 125.0]) and ">4 kB</span>" in text
    assert re.findall(r'<div class="row"><span title="(.*?)">', text) == ["stage 0", "stage 1", ""]
