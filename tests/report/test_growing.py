"""A run that is watched is read once, however it is written meanwhile."""

import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from colonnade.report import growing, record
from colonnade.report.growing import Growing
from colonnade.report.record import RunReader, read_run
from colonnade.report.watch import watch
from colonnade.train.lines import objects_in
from tests.report import written


class Seen:
    """What has been read of a file, until it is forgotten."""

    def __init__(self, path: Path) -> None:
        self.file, self.lines = Growing(path), list[Any]()

    def look(self) -> tuple[list[Any], list[str]]:
        notes: list[str] = []
        for line in self.file.new(notes, self.lines.clear):
            self.lines.append(line["x"])
        return self.lines, notes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_line_that_is_half_there_is_read_when_it_is_whole(path: Path) -> None:
    seen = Seen(path)
    assert seen.look() == ([], [])
    broken = ["lines.jsonl: 1 line could not be read and is left out."]
    for text, lines, notes in [
        ('{"x": 1}\n{"x"', [1], broken),
        ("", [1], broken),
        (": 2}", [1, 2], []),
        ("\n", [1, 2], []),
        ('nonsense\n{"x": 3}\n\n', [1, 2, 3], broken),
        ('{"x": 4}\nmore\n', [1, 2, 3, 4], ["lines.jsonl: 2 lines could not be read and are left out."]),
    ]:
        append(path, text)
        assert seen.look() == (lines, notes), text


def test_no_line_is_read_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    object_in = growing.object_in
    monkeypatch.setattr(growing, "object_in", lambda line: read.append(line) or object_in(line))
    seen = Seen(path)
    for number in range(5):
        append(path, f'{{"x": {number}}}\n')
        seen.look()
    assert [json.loads(line)["x"] for line in read] == seen.lines == list(range(5))


def test_a_file_that_was_cut_or_replaced_is_read_from_its_beginning(path: Path) -> None:
    seen, lines = Seen(path), [f'{{"x": {number}}}\n' for number in range(4)]
    append(path, "".join(["broken\n", *lines]))
    assert seen.look()[0] == [0, 1, 2, 3]
    os.truncate(path, len("broken\n" + lines[0]))  # as a rollback does
    assert seen.look()[0] == [0]
    append(path, '{"x": 9}\n{"x": 9}\n{"x": 9}\n{"x": 9}\n')  # longer than it was
    assert seen.look() == ([0, 9, 9, 9, 9], ["lines.jsonl: 1 line could not be read and is left out."])
    os.truncate(path, len("broken\n" + lines[0]))
    append(path, '{"x": 7}\n{"x": 8}\n{"x": 9}\n{"x": 6}\n')  # as long as it was
    assert seen.look()[0] == [0, 7, 8, 9, 6]
    (other := path.with_name("other")).write_text('{"x": 5}\n' * 4 + '{"x": 6}\n')
    other.replace(path)
    assert seen.look() == ([5, 5, 5, 5, 6], [])
    path.unlink()
    assert seen.look() == ([], [])


def test_a_run_that_is_read_while_it_goes_on_is_as_if_it_was_read_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = written.run(tmp_path / "whole", steps=12), written.run(tmp_path / "r", steps=12)
    with (whole / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "late": 4.0}\n{"step": 13, "loss": 1.0}\n')
    names = ("metrics.jsonl", "events.jsonl", "thermometers.jsonl")
    for name in names:
        (folder / name).write_text("")
    monkeypatch.setattr(record, "MOST_MEASURED", 2)
    reader = RunReader(folder)
    for tenth in range(11):
        for name in names:
            content = (whole / name).read_bytes()
            with (folder / name).open("ab") as file:
                file.write(content[len(content) * max(0, tenth - 1) // 10 : len(content) * tenth // 10])
        found, anew = reader.read(), read_run(folder)
        assert {n: repr(c.tolist()) for n, c in found.columns.items()} == {
            n: repr(c.tolist()) for n, c in anew.columns.items()
        }
        assert (found.events, found.thermometers, found.notes) == (anew.events, anew.thermometers, anew.notes)
    assert "metrics.jsonl has 1 step twice; what was written last is shown." in found.notes
    steps = [line["step"] for line in objects_in(whole / "thermometers.jsonl")]
    measured = [line["step"] for line in found.thermometers]
    assert [measured[0], measured[-1]] == [min(steps), max(steps)] and len(measured) == 3 < len(steps)
    assert found.events == read_run(whole).events


def test_as_many_lines_of_thermometers_as_are_shown_are_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written.run(tmp_path / "r")
    monkeypatch.setattr(record, "MOST_MEASURED", 20)
    run = read_run(folder)
    assert run.notes == [] and len(run.thermometers) == 20


def test_a_watched_run_reads_no_thermometers(tmp_path: Path) -> None:
    """Those of a large model are gigabytes, and it shows none."""
    folder = written.run(tmp_path / "r")
    (folder / "thermometers.jsonl").unlink()
    (folder / "thermometers.jsonl").mkdir()
    watch(folder, every=1, once=True, console=Console(file=StringIO(), width=100))
    assert RunReader(folder, thermometers=False).read().notes == []
    assert read_run(folder).notes == ["thermometers.jsonl cannot be read: Is a directory."]
