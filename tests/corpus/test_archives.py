"""Zip files that are others when they are read than when the run was planned."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colonnade.corpus.archives import member
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


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_files_of_one_name_in_a_zip_file_the_last_is_read_and_one_without_a_name_is_none(
    tmp_path: Path, run: Run
) -> None:
    """As with programs that unpack it; those before are counted."""
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        for name, text in (
            ("a.txt", "the first of three"),
            ("a.txt", "the second, which is longest"),
            ("b.txt", "b"),
            ("a.txt", "third one"),
        ):
            archive.writestr(name, text)
        without = zipfile.ZipInfo("x")
        without.filename = ""
        archive.writestr(without, "y")
    result = run(tmp_path / "in.zip")
    assert result.texts() == ["third one", "b"] and result.reasons("read") == {}
    assert result.manifest["left_aside"] == {"replaced in a zip file": 2}
    assert [each["bytes"] for each in result.manifest["inputs"]] == [len("third one"), 1]


def test_a_file_of_a_zip_file_is_read_from_any_place(tmp_path: Path) -> None:
    """As Parquet files are: from their end."""
    content = bytes(range(256)) * 400
    with zipfile.ZipFile(tmp_path / "in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.bin", content)
    with (tmp_path / "in.zip").open("rb") as raw, member(raw, "a.bin", max_expansion=1000) as stream:
        for place, whence, start in ((-8, io.SEEK_END, len(content) - 8), (70_001, io.SEEK_SET, 70_001)):
            assert stream.seek(place, whence) == start and stream.read(4) == content[start : start + 4]
        assert stream.seek(-60_000, io.SEEK_CUR) == 10_005 and stream.read() == content[10_005:]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_methods_that_need_little_memory_are_read(method: int, tmp_path: Path, run: Run) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w", method) as archive:
        for name, text in (("a.txt", "one " * 200), ("b.txt", "two " * 200)):
            archive.writestr(name, text)
    result = run(tmp_path / "in.zip")
    assert [text.split()[0] for text in result.texts()] == ["one", "two"] and result.reasons("read") == {}
