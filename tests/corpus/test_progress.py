"""How far a stage is, as tasks say it in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colonnade.corpus import progress
from colonnade.corpus.formats import InputSplit
from colonnade.corpus.progress import Done, Progress, progress_folder, so_far
from colonnade.corpus.read import Read
from colonnade.corpus.step import Setting
from colonnade.corpus.tasks import store_tasks
from tests.corpus.recipes import make_recipe


def test_what_tasks_have_done_adds_up(tmp_path: Path) -> None:
    assert so_far(tmp_path, "read") == Done(0, 0)
    for task, documents in ((0, 3), (1, 2)):
        one = Progress(tmp_path, "read", task)
        for number in range(documents):
            one.advance(10 * (number + 1))
        one.add_bytes(100)
        one.advance(7)  # of the next file
        one.close()
    assert so_far(tmp_path, "read") == Done(3 + 2 + 2, 2 * 107) and so_far(tmp_path, "finish") == Done(0, 0)
    (progress_folder(tmp_path, "read") / "00002").write_text("[1")
    assert so_far(tmp_path, "read").documents == 7, "one that is just being written"
    first = next(progress_folder(tmp_path, "read").glob("*"))
    (progress_folder(tmp_path, "read") / "00002").write_text("[1, 1]")
    others = 8 - json.loads(first.read_text())[0]
    first.write_text("")
    assert so_far(tmp_path, "read").documents == others, "those behind it count"


def test_it_is_told_between_too_but_not_at_each_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    one = Progress(tmp_path, "read", 0)
    told = []
    for _ in range(64):
        now[0] += 0.02
        one.advance(1)
        told.append(so_far(tmp_path, "read").documents)
    assert sorted(set(told)) == [0, 32, 64]


def test_a_task_that_has_read_all_has_said_so(tmp_path: Path, write_lines: Any) -> None:
    """However short it was: documents that were kept, and all bytes of its files."""
    paths = [write_lines(name, documents) for name, documents in (("a.jsonl", ["x", ""]), ("b.jsonl.gz", ["y"]))]
    splits = [InputSplit(str(path), "in", path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    store_tasks(tmp_path, [[], splits])
    documents = list(Read(make_recipe(*paths, folder=tmp_path).read, Setting(tmp_path, 5)).run(rank=1))
    assert [document.text for document in documents] == ["x", "y"]
    assert so_far(tmp_path, "documents") == Done(2, sum(split.size for split in splits))
