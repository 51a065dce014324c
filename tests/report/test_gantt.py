"""Where a profiled step goes, as numbers."""

import math
import re
from typing import Any

import pytest

from colonnade.report import gantt


def test_the_rest_of_a_step_stands_below_the_parts_that_have_names() -> None:
    ranks = [{"name": "rank 0", "parts": {"rest": 0.5, "forward": 1.5}}]
    numbers = gantt.drawn({"ranks": ranks}).split("as numbers")[1]
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in numbers.split("<tr>")[2:]]
    assert rows == [["forward", "1.5 s · 75.0%"], ["rest", "500 ms · 25.0%"], ["the step", "2 s"]]


def test_what_is_no_length_of_time_is_left_out() -> None:
    for value in (math.nan, math.inf, 1e12, 10**400, True, "1"):
        parts = {"forward": 1.5, "odd": value}
        actions = [{"kind": "F", "start": 0.0, "end": 1.0}, {"kind": "B", "start": 1.0, "end": value}]
        measured = {"seconds": 4.0, "rows": [{"name": "stage 0", "actions": actions}]}
        found = gantt.drawn({"ranks": [{"name": "rank 0", "parts": parts}], "gantt": measured})
        assert found == gantt.drawn(
            {
                "ranks": [{"name": "rank 0", "parts": {"forward": 1.5}}],
                "gantt": {"seconds": 4.0, "rows": [{"name": "stage 0", "actions": actions[:1]}]},
            }
        ), value
        assert "nothing that can be shown" in gantt.drawn({"gantt": {**measured, "seconds": value}})


def test_a_rank_that_took_no_time_is_shown_as_such() -> None:
    numbers = gantt.drawn({"ranks": [{"name": "rank 0", "parts": {"forward": 0.0}}]}).split("as numbers")[1]
    assert re.findall(r"<td.*?>(.*?)</td>", numbers) == ["forward", "0 ms · 0.0%", "the step", "0 ms"]


def table(text: str) -> list[list[str]]:
    """Rows of the numbers below the bars, the head first."""
    rows = text.split("as numbers")[1].split("</table>")[0].split("<tr>")[1:]
    return [[re.sub("<.*?>", "", cell) for cell in re.findall("<t[hd].*?</t[hd]>", row)] for row in rows]


def test_each_rank_has_its_own_shares_of_every_part() -> None:
    """Also of one that it has not got."""
    ranks = [
        {"name": "rank 0", "parts": {"forward": 3.0, "rest": 1.0}},
        {"name": "rank 1", "parts": {"wait for dp": 1.0, "forward": 4.0}},
    ]
    assert table(gantt.drawn({"ranks": ranks})) == [
        ["", "rank 0", "rank 1"],
        ["forward", "3 s · 75.0%", "4 s · 80.0%"],
        ["wait for dp", "0 ms · 0.0%", "1 s · 20.0%"],
        ["rest", "1 s · 25.0%", "0 ms · 0.0%"],
        ["the step", "4 s", "5 s"],
    ]


def test_of_many_ranks_and_stages_the_first_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gantt, "MOST_RANKS", 2)
    actions = [{"kind": "F", "microbatch": 0, "start": 0.0, "end": 1.0}]
    stages = [{"name": f"stage {n}", "actions": actions} for n in range(3)]
    ranks = [{"name": f"rank {n}", "parts": {"forward": 1.0 + n}} for n in range(3)]
    text = gantt.drawn({"gantt": {"seconds": 4.0, "rows": stages}, "ranks": ranks})
    bars = re.findall(r'class="row"><span title="(\w+ \d)"', text)
    assert bars == ["stage 0", "stage 1", "rank 0", "rank 1"]
    assert table(text) == [
        ["", "rank 0", "rank 1"],
        ["forward", "1 s · 100%", "2 s · 100%"],
        ["the step", "1 s", "2 s"],
    ]


@pytest.mark.parametrize(
    "profile", [{"gantt": [1.0]}, {"gantt": {"seconds": 0, "rows": []}}, {"ranks": {"rank 0": {}}}, {"ranks": [1, {}]}]
)
def test_a_profile_that_is_not_as_it_is_written_is_not_drawn(profile: dict[str, Any]) -> None:
    assert "nothing that can be shown" in gantt.drawn(profile)


@pytest.mark.parametrize("kind", ["", "F1", "F idle", 1, None])
def test_an_action_of_no_kind_is_left_out(kind: object) -> None:
    actions = [{"kind": each, "microbatch": 7, "start": 0.0, "end": 1.0} for each in ("B", kind)]
    text = gantt.drawn({"gantt": {"seconds": 4.0, "rows": [{"name": "stage 0", "actions": actions}]}})
    assert text.count("<rect") == 1 and re.findall("<b style=.*?>(.*?)</b>", text) == ["B7"]


@pytest.mark.parametrize(("steps", "words"), [([5, 6], ["steps 5 to 6"]), ([5], []), ([5, 6, 7], []), ("56", [])])
def test_which_steps_were_profiled_is_said_where_it_is_known(steps: object, words: list[str]) -> None:
    assert list(gantt.bounds({"steps": steps})) == words
