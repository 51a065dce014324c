"""Where a profiled step goes, as numbers."""

import math
import re

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
