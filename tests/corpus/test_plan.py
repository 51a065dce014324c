"""What decides whether a run is the same: its recipe, its inputs, and the files that the recipe names."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colonnade.corpus.duplicates import index_metadata
from colonnade.corpus.formats import InputSplit
from colonnade.corpus.plan import keep_plan, left_aside, make_plan, run_file, shared_out, splits_of
from colonnade.corpus.recipe import DeduplicateStep
from colonnade.corpus.tasks import store_tasks, stored_task
from colonnade.data.cleaning import Tokenizers
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from tests.corpus.recipes import make_recipe
from tests.data.test_tokenizer import save_pair


@pytest.mark.parametrize("name", ["list.txt", "list[1].txt", "out/list.txt"])
def test_a_named_file_that_changes_makes_another_run_and_what_is_beside_it_does_not(
    tmp_path: Path, write_lines: Callable[..., Path], name: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
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


def test_tasks_read_about_as_many_bytes_as_is_asked() -> None:
    """A piece of a large file counts by its own length, and one that is longer than a task is one alone."""
    whole = InputSplit("a.jsonl", "a", 1_000, 0)
    pieces = [replace(whole, start=start, stop=stop) for start, stop in ((0, 60), (60, 120), (120, 160), (160, 300))]
    assert [piece.num_bytes for piece in (*pieces, whole)] == [60, 60, 40, 140, 1_000]
    tasks = shared_out([*pieces, whole, pieces[2], pieces[0]], 100)
    assert [[split.num_bytes for split in task] for task in tasks] == [[60], [60, 40], [140], [1_000], [40, 60]]


def test_a_file_of_lines_is_cut_where_it_is_longer_than_a_piece(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"12345678\n" * 4)
    assert len(splits_of(str(tmp_path / "a.jsonl"), 36)) == 1
    found = splits_of(str(tmp_path / "a.jsonl"), 35)
    assert [(split.start, split.stop) for split in found] == [(0, 36)]
    cut = splits_of(str(tmp_path / "a.jsonl"), 9)
    assert [(split.start, split.stop) for split in cut] == [(0, 9), (9, 18), (18, 27), (27, 36)]
    (tmp_path / "long.ndjson").write_bytes(b"x" * (3 << 20) + b"\nend\n")
    cut = splits_of(str(tmp_path / "long.ndjson"), 1 << 20)
    assert [(split.start, split.stop) for split in cut] == [(0, (3 << 20) + 1), ((3 << 20) + 1, (3 << 20) + 5)]
    for name in ("a.jsonl.gz", "a.txt"):
        (tmp_path / name).write_bytes(b"12345678\n" * 4)
        (whole,) = splits_of(str(tmp_path / name), 9)
        assert (whole.start, whole.stop, whole.num_bytes) == (0, None, 36), "these are read from their beginning"


def test_each_task_reads_its_own_inputs(tmp_path: Path) -> None:
    tasks = [
        [InputSplit("a.jsonl", "a", 9, 7, start=3, stop=9)],
        [],
        [InputSplit("é\udcff.zip", "é", 1, 2, member="ü/m.txt"), InputSplit("b.txt", "b", 3, 4)],
        [InputSplit("c" * 5_000, "c", 1 << 40, 1 << 60)],
    ]
    store_tasks(tmp_path, tasks)
    assert [stored_task(tmp_path, number) for number in range(4)] == tasks


def test_who_runs_it_and_where_it_is_written_make_no_other_run(
    tmp_path: Path, write_lines: Callable[..., Path]
) -> None:
    path = write_lines("in.jsonl", ["a"])
    more = {"workers": 3, "retries": 7, "memory_gb": 9, "executor": "ray", "slurm_time": "1:00:00"}
    one, other = make_recipe(path, folder=tmp_path / "one"), make_recipe(path, folder=tmp_path / "other", run=more)
    assert make_plan(one).identity == make_plan(other).identity


def test_what_is_left_aside_is_counted_by_what_it_is(tmp_path: Path) -> None:
    """In folders and in zip files, of which what cannot be streamed is not read. Folders in them are no files."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.jsonl", "a.pdf", "b.pdf", "Makefile", "rows.parquet.gz"):
        (folder / name).touch()
    os.mkfifo(folder / "pipe.jsonl")
    with zipfile.ZipFile(folder / "more.zip", "w") as archive:
        for name in ("in.jsonl", "page.warc", "rows.parquet", "picture.png"):
            archive.writestr(name, "x")
        for name in ("pages", "old.jsonl"):
            archive.mkdir(name)
    assert left_aside([str(folder)]) == {".gz": 1, ".parquet": 1, ".pdf": 2, ".png": 1, "fifo": 1, "none": 1}
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "c.pdf").touch()
    os.mkfifo(tmp_path / "beside" / "pipe.jsonl")
    both = left_aside([str(folder), str(tmp_path / "beside"), str(folder / "more.zip")])
    assert both == {".gz": 1, ".parquet": 2, ".pdf": 3, ".png": 2, "fifo": 2, "none": 1}
    found = {split.member for split in splits_of(str(folder), 100)}
    assert found == {"", "in.jsonl", "page.warc"}


def test_an_index_that_does_not_say_how_many_tasks_it_has_cannot_be_compared(
    tmp_path: Path, write_lines: Callable[..., Path]
) -> None:
    how = DeduplicateStep(index=str(tmp_path / "index"))
    part = tmp_path / "index" / "0123456789abcdef"
    part.mkdir(parents=True)
    recipe = make_recipe(write_lines("in.jsonl", ["a"]), folder=tmp_path / "out", deduplicate={"index": how.index})
    for metadata, said in (
        ({**index_metadata(how), "tasks": 2}, ""),
        (index_metadata(how), "no JSON object with a number of tasks"),
        ({**index_metadata(how), "tasks": "2"}, "no JSON object with a number of tasks"),
        (
            [],
            r"0123456789abcdef, a part of deduplicate\.index, cannot be read \(no JSON object .*\)\. Put it back",
        ),
        ({**index_metadata(how), "shingle": 4, "tasks": 2}, "'shingle': 4"),
    ):
        (part / "index.json").write_text(json.dumps(metadata))
        with pytest.raises(DataError, match=said) if said else nullcontext():
            assert make_plan(recipe).index == (part.name,)
    (part / "index.json").write_bytes(b"")
    with pytest.raises(DataError, match=r"a part of deduplicate\.index, cannot be read \(Expecting value: "):
        make_plan(recipe)


def test_what_earlier_runs_kept_is_read_in_one_order_whatever_the_disk_says(
    tmp_path: Path, write_lines: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    recipe = make_recipe(write_lines("in.jsonl", ["a"]), folder=tmp_path / "out", deduplicate={"index": str(index)})
    assert recipe.deduplicate is not None
    for name in "bca":
        (index / name).mkdir(parents=True)
        (index / name / "index.json").write_text(json.dumps({**index_metadata(recipe.deduplicate), "tasks": 1}))
    files = [index / name / "index.json" for name in "bca"]
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: files)
    assert make_plan(recipe).index == ("a", "b", "c")


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


def test_what_a_run_writes_beside_its_tokenizer_makes_no_other_run(
    tmp_path: Path, write_lines: Callable[..., Path]
) -> None:
    """The result, and the index of what was kept."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").touch()
    run, index = {"tokenizer": str(tmp_path / "folder")}, tmp_path / "folder" / "index"
    recipe = make_recipe(
        write_lines("in.jsonl", ["a"]), folder=tmp_path / "folder" / "out", run=run, deduplicate={"index": str(index)}
    )
    kept = keep_plan(make_plan(recipe), recipe)
    index.mkdir()
    for name in ("index/part", "out/manifest.json"):
        (tmp_path / "folder" / name).touch()
    assert keep_plan(make_plan(recipe), recipe) == kept
    (tmp_path / "folder" / "tokenizer_config.json").touch()
    with pytest.raises(DataError, match=r"named files have changed: tokenizer_config\.json of .*folder \(new\)"):
        keep_plan(make_plan(recipe), recipe)


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
    unset = {f"{name}.{key}" for name, keys in facts["recipe"].items() for key in keys if keys[key] is None}
    assert unset == set(), "with more keys that may be unset, a later version has the same recipe"
    found = [name for name, _, _ in facts["named files"][run["tokenizer"]]]
    assert found == (["vocab.json", "merges.txt"] if place else sorted(os.listdir(folder)))
    assert keep_plan(make_plan(recipe, with_tokenizers), recipe) == kept
    if place:
        (folder / "config.json").write_text('{"model_type": "gpt2", "n_layer": 12}')
        assert keep_plan(make_plan(recipe, with_tokenizers), recipe) == kept
    (folder / "added_tokens.json").write_text('{"<keep>": 600}')
    with pytest.raises(DataError, match=r"holds another run: .*tokenizers have changed"):
        keep_plan(make_plan(recipe, with_tokenizers), recipe)
