"""What decides whether a run is the same: its recipe, its inputs, and the files that the recipe names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colonnade.corpus.plan import make_plan
from tests.corpus.recipes import make_recipe


@pytest.mark.parametrize("name", ["list.txt", "list[1].txt"])
def test_a_named_file_that_changes_makes_another_run_and_what_is_beside_it_does_not(
    tmp_path: Path, write_lines: Callable[..., Path], name: str
) -> None:
    path = tmp_path / name
    path.write_text("spam.example\n")
    recipe = make_recipe(
        write_lines("in.jsonl", ["a"]), folder=tmp_path / "out", filter={"min_tokens": 0, "remove_urls": [str(path)]}
    )
    before = make_plan(recipe).identity
    (tmp_path / f"{name}.bak").write_text("an older list")
    assert make_plan(recipe).identity == before
    path.write_text("spam.example\nmore.example\n")
    assert make_plan(recipe).identity != before


def test_a_named_file_that_was_edited_and_is_as_long_as_before_makes_another_run(
    tmp_path: Path, write_lines: Callable[..., Path]
) -> None:
    path = tmp_path / "list.txt"
    path.write_text("spam.example\n")
    os.utime(path, (1, 1))
    recipe = make_recipe(
        write_lines("in.jsonl", ["a"]), folder=tmp_path / "out", filter={"min_tokens": 0, "remove_urls": [str(path)]}
    )
    before = make_plan(recipe).identity
    path.write_text("scam.example\n")
    assert make_plan(recipe).identity != before


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("filter", {"min_tokens": 0, "remove_ids": {"in": "named.txt"}}),
        ("decontaminate", {"tests": {"exam": "named.txt"}}),
        ("decontaminate", {"titles": ["named.txt"]}),
    ],
)
def test_files_of_every_section_are_named(
    tmp_path: Path, write_lines: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, section: str, keys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("named.txt").write_text("one\n")
    recipe = make_recipe(write_lines("in.jsonl", ["a"]), folder=tmp_path / "out", **{section: keys})
    before = make_plan(recipe).identity
    Path("named.txt").write_text("one\nanother\n")
    assert make_plan(recipe).identity != before


FILES = ("vocab.json", "merges.txt", "vocab.txt", "t.model")


@pytest.mark.parametrize(
    ("tokenizer", "changed"),
    [
        ("v[1]", "v[1]-merges.txt"),
        ("v[1]", "v[1]-vocab.json"),
        ("v[1]-vocab.json", "v[1]-merges.txt"),
        ("folder", "folder/merges.txt"),
        ("folder/vocab.json", "folder/merges.txt"),
        ("folder/vocab.json", "folder/added_tokens.json"),
        ("folder/vocab.txt", "folder/tokenizer_config.json"),
        ("folder/t.model", "folder/config.json"),
    ],
)
def test_a_tokenizer_is_all_of_its_files(
    tmp_path: Path, write_lines: Callable[..., Path], tokenizer: str, changed: str
) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("v[1]-vocab.json", "v[1]-merges.txt", *(f"folder/{each}" for each in FILES)):
        (tmp_path / name).touch()
    run: dict[str, Any] = {"tokenizer": str(tmp_path / tokenizer)}
    recipe = make_recipe(write_lines("in.jsonl", ["a"]), folder=tmp_path / "out", run=run)
    before = make_plan(recipe).identity
    (tmp_path / changed).write_text("changed")
    assert make_plan(recipe).identity != before
