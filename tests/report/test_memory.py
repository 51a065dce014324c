"""What was predicted of a run beside what was measured."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from colonnade.report.memory import drawn
from colonnade.report.record import read_run
from tests.report import written


@pytest.mark.parametrize(
    ("predicted", "rows"),
    [
        (None, [["bytes sent › dp", "", "1 kB", ""], ["bytes sent › tp", "", "2 kB", ""]]),
        ({"tp": 4e3}, [["bytes sent › tp", "4 kB", "2 kB", "0.50"], ["bytes sent › dp", "", "1 kB", ""]]),
    ],
)
def test_what_was_measured_and_not_predicted_is_shown(tmp_path: Path, predicted: Any, rows: list[list[str]]) -> None:
    folder = written.run(tmp_path / "r")
    compared = {"bytes_sent": {"predicted": predicted, "measured": {"dp": 1e3, "tp": 2e3}}}
    (folder / "comparison.json").write_text(json.dumps(compared))
    table = drawn(read_run(folder)).split("<tr>")
    cells = [[re.sub("<.*?>", "", cell) for cell in row.split("</td>")[:-1]] for row in table]
    assert [row for row in cells if row and row[0].startswith("bytes sent")] == rows
