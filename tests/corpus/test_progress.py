"""How far a stage is, as tasks say it in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from colonnade.corpus import progress
from colonnade.corpus.progress import Done, Progress, progress_folder, so_far


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
