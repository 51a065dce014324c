"""What was predicted of a run beside what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from colonnade.report.memory import drawn
from colonnade.report.record import read_run
from tests.report import written
from tests.report.test_top import cells


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
    assert [row for row in cells(drawn(read_run(folder))) if row[0].startswith("bytes sent")] == rows


def test_what_was_predicted_and_not_measured_is_shown_beside_what_was(tmp_path: Path) -> None:
    """Once each."""
    folder = written.run(tmp_path / "r")
    compared = {"tokens_per_second": {"predicted": 600.0, "measured": 500.0}}
    (folder / "comparison.json").write_text(json.dumps(compared))
    assert cells(drawn(read_run(folder))) == [
        ["tokens per second", "600", "500", "0.83"],
        ["memory › total", "6 GB", "", ""],
        ["seconds per step", "1.5 s", "", ""],
        ["bytes sent › tp", "1 GB", "", ""],
    ]


def test_what_was_predicted_alone_has_its_unit(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    (folder / "comparison.json").unlink()
    memory = {"total_bytes": 6e9, "by_kind": {"parameters": 6e9}, "rank": 3}  # that is no number of bytes
    prediction = {"memory": memory, "tokens_per_second": 600.0, "seconds_per_step": 90.0}
    (folder / "prediction.json").write_text(json.dumps(prediction))
    assert cells(drawn(read_run(folder))) == [
        ["memory › total", "6 GB", "", ""],
        ["tokens per second", "600", "", ""],
        ["seconds per step", "1 min 30 s", "", ""],
    ]


@pytest.mark.parametrize("is_predicted", [False, True])
def test_memory_that_a_start_told_is_shown_where_no_file_tells_more(tmp_path: Path, is_predicted: bool) -> None:
    folder = written.run(tmp_path / "r")
    (folder / "comparison.json").unlink()
    prediction = {"memory": {"total_bytes": 3e9}} if is_predicted else {}
    (folder / "prediction.json").write_text(json.dumps(prediction))
    setup = {"event": "setup", "memory_predicted": 2e9, "memory_free": 5e9}
    (folder / "events.jsonl").write_text(written.lines([setup]))
    predicted = ["memory › total", "3 GB", "", ""] if is_predicted else ["memory of a rank", "2 GB", "", ""]
    free = ["memory that was free at the start", "", "5 GB", ""]
    assert cells(drawn(read_run(folder))) == [predicted, free]


def test_memory_that_was_compared_is_not_told_again_as_a_start_did(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    (folder / "prediction.json").unlink()
    compared = {"memory": {"total_bytes": {"predicted": 4e9, "measured": 5e9}}}
    (folder / "comparison.json").write_text(json.dumps(compared))
    (folder / "events.jsonl").write_text(written.lines([{"event": "setup", "memory_predicted": 2e9}]))
    assert cells(drawn(read_run(folder))) == [["memory › total", "4 GB", "5 GB", "1.25"]]


def test_nothing_may_be_predicted_or_measured(tmp_path: Path) -> None:
    """What was to send nothing has no ratio; what has sent nothing has one."""
    folder = written.run(tmp_path / "r")
    (folder / "prediction.json").unlink()
    compared = {"bytes_sent": {"predicted": {"tp": 0, "pp": 2e3}, "measured": {"tp": 1e3, "pp": 0}}}
    (folder / "comparison.json").write_text(json.dumps(compared))
    assert [[name, ratio] for name, _, _, ratio in cells(drawn(read_run(folder)))] == [
        ["bytes sent › tp", ""],
        ["bytes sent › pp", "0.00"],
    ]
