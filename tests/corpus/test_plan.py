"""What decides whether a run is the same: its recipe, its inputs, and the files that the recipe names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colonnade.corpus.plan import keep_plan, make_plan, run_file
from colonnade.data.cleaning import Tokenizers
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from tests.corpus.recipes import make_recipe
from tests.data.test_tokenizer import save_pair


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


FILES = ("vocab.json", "merges.txt")


@pytest.mark.parametrize(
    ("tokenizer", "changed"),
    [
        ("v[1]", "v[1]-merges.txt"),
        ("v[1]", "v[1]-vocab.json"),
        ("v[1]-vocab.json", "v[1]-merges.txt"),
        ("folder", "folder/merges.txt"),
        ("folder/vocab.json", "folder/merges.txt"),
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


@pytest.mark.parametrize("place", ["vocab.json", ""])
def test_what_lies_beside_a_vocabulary_makes_another_run_only_where_it_makes_another_tokenizer(
    tmp_path: Path, write_lines: Callable[..., Path], tokenizer: Tokenizer, place: str
) -> None:
    """A run of a version that did not look beside it goes on."""
    folder = tmp_path / "folder"
    folder.mkdir()
    save_pair(tokenizer, folder / "vocab.json", folder / "merges.txt")
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text('{"model_type": "gpt2", "model_max_length": 1024}')
    run = {"tokenizer": str(folder / place)}
    recipe = make_recipe(write_lines("in.jsonl", ["a"]), folder=tmp_path / "out", run=run)
    with_tokenizers = Tokenizers().other_than_alone
    kept = keep_plan(make_plan(recipe), recipe)
    facts = json.loads(run_file(tmp_path / "out").read_bytes())["facts"]
    assert facts.keys() == {"recipe", "inputs", "named files"}
    found = [name for name, _, _ in facts["named files"][run["tokenizer"]]]
    assert found == (["vocab.json", "merges.txt"] if place else sorted(os.listdir(folder)))
    assert keep_plan(make_plan(recipe, with_tokenizers), recipe) == kept
    if place:
        (folder / "config.json").write_text('{"model_type": "gpt2", "n_layer": 12}')
        assert keep_plan(make_plan(recipe, with_tokenizers), recipe) == kept
    (folder / "added_tokens.json").write_text('{"<keep>": 600}')
    with pytest.raises(DataError, match=r"holds another run: .*tokenizers have changed"):
        keep_plan(make_plan(recipe, with_tokenizers), recipe)
