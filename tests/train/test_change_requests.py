"""Lines of changes.jsonl: what each is known by, and what comes of it."""

import json
from pathlib import Path
from typing import Any

from colonnade.config.load import load
from colonnade.train.change_requests import CHANGES, Decided, lines_of


def write(run: Path, *lines: str, end: str = "\n") -> None:
    (run / CHANGES).write_text("\n".join(lines) + end)


def rate(value: float) -> str:
    return json.dumps({"change": {"optim.learning_rate": value}})


def test_equal_lines_are_requests_of_their_own(tmp_path: Path, config: Path) -> None:
    """Who sets a value, another one, and the first one again has the first one."""
    write(tmp_path, rate(1e-3), rate(2e-3), rate(1e-3))
    decided, began = Decided(), load(config)
    for line in lines_of(tmp_path):
        assert line.known_as not in decided.known
        decided = decided.with_line(line, began, 0)
    values: list[Any] = [change.values["optim.learning_rate"] for change in decided.changes]
    assert values == [1e-3, 2e-3, 1e-3] and not decided.refused


def test_a_line_is_known_by_the_same_name_when_others_have_come(tmp_path: Path) -> None:
    write(tmp_path, rate(1e-3), "", rate(1e-3))
    before = lines_of(tmp_path)
    write(tmp_path, rate(1e-3), rate(1e-3), rate(2e-3))
    now = lines_of(tmp_path)
    assert [line.known_as for line in now[:2]] == [line.known_as for line in before]
    assert len({line.known_as for line in now}) == 3


def test_the_last_line_is_whole_when_it_has_its_end(tmp_path: Path) -> None:
    write(tmp_path, rate(1e-3), rate(2e-3), end="")
    assert [line.is_whole for line in lines_of(tmp_path)] == [True, False]
    write(tmp_path, rate(1e-3), rate(2e-3))
    assert [line.is_whole for line in lines_of(tmp_path)] == [True, True]
    (tmp_path / CHANGES).unlink()
    assert lines_of(tmp_path) == []
