"""What stands in a folder: files in order of their names, and everything else with a word on what it is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from colonnade.corpus.folders import Entry, entries, inputs_in
from colonnade.errors import DataError


def test_all_kinds_of_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    (folder / "b" / "deep").mkdir(parents=True)
    for name in ("z", "a", "b/deep/x", "b/a"):
        (folder / name).touch()
    os.mkfifo(folder / "fifo")
    monkeypatch.chdir(folder)  # a socket's path may have 107 characters
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    for name, target in {
        "link": "a",
        "link to fifo": "fifo",
        "link to socket": "socket",
        "link to null": "/dev/null",
        "link to b": "b",
        "broken": "nowhere",
        "circle": "circle",
    }.items():
        (folder / name).symlink_to(target)
    found = entries(folder)
    assert [entry.path for entry in found] == sorted(entry.path for entry in found)
    assert {str(entry.path.relative_to(folder)): entry.aside for entry in found} == {
        **dict.fromkeys(("z", "a", "b/deep/x", "b/a", "link"), ""),
        "fifo": "fifo",
        "socket": "socket",
        "link to fifo": "link to a fifo",
        "link to socket": "link to a socket",
        "link to null": "link to a device",
        "link to b": "link to a folder",
        "broken": "broken link",
        "circle": "broken link",
    }


def test_the_order_is_that_of_names_whatever_the_disk_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "bca":
        (tmp_path / name).touch()
    found = sorted(os.scandir(tmp_path), key=lambda entry: "bca".index(entry.name))
    monkeypatch.setattr(os, "scandir", lambda folder: found)
    assert entries(tmp_path) == [Entry(tmp_path / name, "") for name in "abc"]


def test_a_folder_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "open").touch()
    scan = os.scandir

    def refused(folder: Path) -> object:
        if Path(folder).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refused)
    assert entries(tmp_path) == [
        Entry(tmp_path / "closed", "folder that may not be read"),
        Entry(tmp_path / "open", ""),
    ]


def test_a_run_json_is_a_cleaning_runs_only_where_such_a_run_has_it(tmp_path: Path) -> None:
    """Others write files of that name, too."""
    content = '{"identity": "0123", "facts": {}}'
    for name in ("run.json", "experiment/run.json", "state/text.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert [entry.path.name for entry in inputs_in(tmp_path)] == ["run.json", "run.json", "text.jsonl"]
    (tmp_path / "state" / "run.json").write_text(content)
    with pytest.raises(DataError, match=r"is the write\.folder of a run .* The run has not finished"):
        inputs_in(tmp_path)
