"""Zip files that are others when they are read than when the run was planned."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colonnade.corpus.plan import keep_plan
from tests.corpus.recipes import Result

Run = Callable[..., Result]


def test_a_zip_file_that_has_lost_a_file_meanwhile_gives_the_others(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.zip"

    def zipped(*names: str) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, name)

    def kept(plan: Any, recipe: Any) -> Any:
        zipped("a.txt", "c.txt")
        return keep_plan(plan, recipe)

    zipped("a.txt", "b.txt", "c.txt")
    monkeypatch.setattr("colonnade.corpus.run.keep_plan", kept)
    result = run(path)
    assert result.texts() == ["a.txt", "c.txt"]
    lost = [entry for entry in result.dropped("read") if entry["file"] == f"{path}/b.txt"]
    assert [(entry["reason"], entry["detail"]) for entry in lost] == [("file damaged", "it has no 'b.txt' any more")]
