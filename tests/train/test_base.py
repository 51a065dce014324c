"""The base of adapters: what is told of one that is another, is gone, or is named where none is needed."""

import os
from pathlib import Path

import pytest

from colonnade.data.sidecar import hash_file
from colonnade.errors import CheckpointError
from colonnade.mesh.mesh import Mesh
from colonnade.train.base import BaseMetadata, base_path, check_base, check_given_base, content_of, content_together

OLD, NEW = "0123456789ab" + "0" * 52, "ba9876543210" + "0" * 52
WANTED = BaseMetadata(path="/bases/gpt", files={"config.json": OLD, "a.safetensors": OLD}, weights=())


def test_the_same_files_wherever_they_lie_are_the_base() -> None:
    check_base(Path("adapters"), WANTED, Path("elsewhere"), dict(reversed(WANTED.files.items())))


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({"a.safetensors": NEW}, "a.safetensors: 0123456789ab… when the adapters were trained, ba9876543210… now"),
        ({"b.safetensors": NEW}, "b.safetensors: not there when the adapters were trained, ba9876543210… now"),
    ],
    ids=["changed", "more"],
)
def test_another_base_is_told_file_by_file_as_it_was_and_as_it_is(found: dict[str, str], line: str) -> None:
    there = {**WANTED.files, **found}
    with pytest.raises(CheckpointError) as told:
        check_base(Path("adapters"), WANTED, Path("elsewhere"), there)
    first, *lines, last = str(told.value).splitlines()
    assert first.startswith("adapters has adapters of another base than 'elsewhere'") and lines == [f"  {line}"]
    assert "trained beside '/bases/gpt': put that back, or name where it lies now" in last


@pytest.mark.parametrize(
    ("weights", "others"),
    [
        (["a.safetensors", "a copy of it.safetensors"], ["pytorch_model.bin"]),
        (["model.safetensors"], ["pytorch_model.bin", "tokens.bin", "consolidated.safetensors"]),
        (["pytorch_model.bin"], ["tokens.bin"]),
    ],
    ids=["any", "usual", "pickled"],
)
def test_a_published_base_is_known_by_its_configuration_and_the_files_that_are_read(
    weights: list[str], others: list[str], tmp_path: Path
) -> None:
    """Not by what else lies there, whatever it is called."""
    for name in ("config.json", *weights, *others, "README.md"):
        (tmp_path / name).write_text(name)
    expected = {name: hash_file(tmp_path / name) for name in ("config.json", *weights)}
    assert content_of(tmp_path) == content_together(tmp_path, Mesh().world) == expected


def test_files_that_nobody_reads_come_and_go_beside_a_base(tmp_path: Path) -> None:
    """Those of its weights are what they were, also where a checkpoint of an earlier version names others too."""
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_text(name)
    earlier = {name: hash_file(tmp_path / name) for name in os.listdir(tmp_path)}
    known = [BaseMetadata(path=str(tmp_path), files=files, weights=()) for files in (content_of(tmp_path), earlier)]
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "tokens.bin").touch()
    for wanted in known:
        check_base(Path("adapters"), wanted, tmp_path, content_of(tmp_path))
    (tmp_path / "model.safetensors").write_text("Model.safetensors")
    for wanted in known:
        with pytest.raises(CheckpointError, match=r"model\.safetensors: [0-9a-f]{12}… when the adapters were trained"):
            check_base(Path("adapters"), wanted, tmp_path, content_of(tmp_path))


def test_a_base_is_named_only_for_what_needs_one(tmp_path: Path) -> None:
    for wanted, given in ((WANTED, tmp_path), (WANTED, None), (None, None)):
        check_given_base(Path("run"), wanted, given)
    with pytest.raises(CheckpointError, match=rf"^--base {tmp_path}: run has all of its weights"):
        check_given_base(Path("run"), None, tmp_path)


def test_a_base_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "gpt.gguf").touch()
    with pytest.raises(
        CheckpointError, match=r"their base '.*gpt\.gguf' is not there\. Name where it lies with --base"
    ):
        base_path(Path("adapters"), WANTED, tmp_path / "gpt.gguf")
