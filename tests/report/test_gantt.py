"""Where a profiled step goes, as numbers."""

import re

from colonnade.report import gantt


def test_the_rest_of_a_step_stands_below_the_parts_that_have_names() -> None:
    ranks = [{"name": "rank 0", "parts": {"rest": 0.5, "forward": 1.5}}]
    numbers = gantt.drawn({"ranks": ranks}).split("as numbers")[1]
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in numbers.split("<tr>")[2:]]
    assert rows == [["forward", "1.5 s · 75.0%"], ["rest", "500 ms · 25.0%"], ["the step", "2 s"]]
