"""A checkpoint that its run deletes, or saves anew, while something else reads it: told as that, wherever that is."""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import safetensors.torch
import torch
from torch import Tensor

from colonnade.checkpoint import confined
from colonnade.checkpoint import manifest as manifests
from colonnade.checkpoint.confined import open_plain
from colonnade.checkpoint.folders import take_away
from colonnade.checkpoint.load import load
from colonnade.checkpoint.manifest import Manifest, check_sizes, check_unchanged, read_manifest, to_json, verify
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import save
from colonnade.convert.adapted import Adapted, _weights_at
from colonnade.convert.merge import merge
from colonnade.convert.to_huggingface import to_huggingface
from colonnade.convert.to_peft import to_peft
from colonnade.errors import GoneError
from colonnade.mesh.mesh import Mesh
from colonnade.serving.trained import find, open_trained
from colonnade.train.init_from import origin_at
from tests.commands import forked
from tests.runs import Finished, whole_tensors
from tests.tiny import TinyCorpus, write_config

Read = Callable[[Path], dict[str, Tensor]]


@pytest.fixture(scope="module")
def adapters(corpus: TinyCorpus, finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside the other run's weights."""
    folder = tmp_path_factory.mktemp("adapters")
    answer = forked("train", write_config(corpus, folder), "lora.rank=2", f"train.init_from={finished.newest}")
    assert answer.status == 0, answer
    return find(folder / "run")


def opened(path: Path) -> dict[str, Tensor]:
    return open_trained(path, Mesh(), torch.device("cpu")).model.state_dict()


def begun_from(path: Path) -> dict[str, Tensor]:
    origin = origin_at(path)
    whole = {name: torch.zeros(shape) for name, shape in origin.shapes.items()}
    origin.fill([Shard(name, tuple(x.shape), (0,) * x.ndim, x) for name, x in whole.items()])
    return whole


def converted(path: Path) -> dict[str, Tensor]:
    target = path.with_name("theirs")
    to_huggingface(path, target, dtype=None, most_bytes=1 << 30, dry_run=False)
    return published(target / "model.safetensors")


def merged(path: Path) -> dict[str, Tensor]:
    merge(path, path.with_name("merged"), base=None, best=False)
    return whole_tensors(path.with_name("merged"))


def as_peft(path: Path) -> dict[str, Tensor]:
    to_peft(path, path.with_name("peft"), dtype=None, dry_run=False)
    return published(path.with_name("peft") / "adapter_model.safetensors")


def published(file: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(file)


def verified(path: Path) -> dict[str, Tensor]:
    verify(path)
    return {}


SLOW = pytest.mark.slow
READERS = [opened, begun_from, converted, pytest.param(merged, marks=SLOW), pytest.param(as_peft, marks=SLOW)]


def on_looking(number: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`act` before the number-th look at a file of a checkpoint."""
    look, in_its_folder = count(), confined._in_its_folder

    def patched(path: Path) -> AbstractContextManager[None]:
        if next(look) == number:
            act()
        return in_its_folder(path)

    monkeypatch.setattr(confined, "_in_its_folder", patched)


def meanwhile(
    read: Read, of: Path, folder: Path, act: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[dict[str, Tensor]]]:
    """What is refused, and what is read, where `act` comes before each of the files that are looked at in turn."""
    refused, found = [], []
    for number in count():
        path, done = folder / str(number) / of.name, []
        shutil.copytree(of, path)
        with monkeypatch.context() as patch:
            on_looking(number, lambda path=path, done=done: done.append(act(path)), patch)  # type: ignore[misc]
            try:
                found.append(read(path))
            except GoneError as error:
                told = str(error)
                assert told.startswith(str(path)) and "damaged" not in told, told
                assert [each.name for each in path.parent.iterdir() if "step" not in each.name] == []
                refused.append(told.removeprefix(str(path)))
        if not done:
            return refused, found
    raise AssertionError("endless")


@pytest.mark.parametrize("read", [opened, begun_from, converted, verified])
def test_a_checkpoint_that_is_deleted_meanwhile_is_told_as_that(
    read: Read, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any file that is looked at: no traceback, and no word of damage."""
    refused, found = meanwhile(read, finished.newest, tmp_path, take_away, monkeypatch)
    assert len(found) == 1 < len(refused), "it has looked at several, and without deleting it reads"
    for told in refused:
        assert told.startswith(" does not exist, or not any more: a run that goes on deletes all but"), told
        assert "checkpoint.keep_every" in told


def saved_anew(path: Path, folder: Path) -> Path:
    """The same step of the same model, with other numbers."""
    manifest, numbers = read_manifest(path), {name: x + 1 for name, x in whole_tensors(path).items()}
    files = {name: (path / name).read_bytes() for name in manifest.files if not name.endswith(".distcp")}
    files.pop(".metadata")
    shards = [Shard(name, tuple(x.shape), (0,) * x.ndim, x) for name, x in numbers.items()]
    return save(folder, manifest.step, shards, manifest.metadata, extra_files=files)


@pytest.mark.parametrize("read", READERS)
def test_what_is_read_is_of_one_checkpoint(
    read: Read, finished: Finished, adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another takes its place under the same name, before any of its files."""
    one = adapters if read in (merged, as_peft) else finished.newest
    other = saved_anew(one, tmp_path / "anew")

    def replace(path: Path) -> None:
        made = shutil.copytree(other, path.with_name(".step_new"))
        take_away(path)
        made.rename(path)

    refused, found = meanwhile(read, one, tmp_path / "turns", replace, monkeypatch)
    first, last = found[0], found[-1]
    assert any(not torch.equal(first[name], last[name]) for name in first), "the other, and the one"
    for numbers in found:
        assert any(all(torch.equal(numbers[name], of[name]) for name in of) for of in (first, last))
    assert sum("was replaced while it was read, as by a run that has returned" in told for told in refused) > 1


def test_a_file_whose_folder_has_been_there_again_by_the_time_of_the_look_is_gone(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was of a checkpoint that was taken away, and another has just taken its place: nothing was missing."""
    path, opened = shutil.copytree(finished.newest, tmp_path / finished.newest.name), os.open

    def replaced(*arguments: Any) -> int:
        monkeypatch.setattr(os, "open", opened)
        take_away(path)
        try:
            return opened(*arguments)
        finally:
            shutil.copytree(finished.newest, path)

    monkeypatch.setattr(os, "open", replaced)
    with pytest.raises(GoneError, match=" does not exist, or not any more"):
        open_plain(path / "manifest.json")
    open_plain(path / "manifest.json").close()


def test_a_checkpoint_in_whose_place_is_one_without_some_of_its_files_is_not_damaged(
    finished: Finished, tmp_path: Path
) -> None:
    path = shutil.copytree(finished.newest, tmp_path / finished.newest.name)
    manifest = read_manifest(path)
    take_away(path)
    save(tmp_path, manifest.step, zeros_like(finished.newest), manifest.metadata)
    missing = {name: file for name, file in manifest.files.items() if not (path / name).exists()}
    assert "config.toml" in missing
    with pytest.raises(GoneError, match="was replaced while it was read"):
        check_sizes(path, dataclasses.replace(manifest, files=missing))


def test_a_disk_that_is_away_is_not_told_as_another_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(path: Path, most: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(manifests, "read_plain", away)
    with pytest.raises(OSError, match="Input/output error"):
        check_unchanged(tmp_path, Manifest(1, {}, {}, {}, "a digest"))


def test_a_run_begins_from_the_weights_that_it_has_looked_at(finished: Finished, tmp_path: Path) -> None:
    """Another checkpoint of the same step, whole and sound, was not looked at."""
    path, other = shutil.copytree(finished.newest, tmp_path / "step"), saved_anew(finished.newest, tmp_path / "anew")
    origin = origin_at(path)
    take_away(path)
    shutil.copytree(other, path)
    with pytest.raises(GoneError, match="was replaced while it was read"):
        origin.fill([shard for shard in zeros_like(path) if shard.name in origin.shapes])


def test_what_is_read_of_adapters_is_beside_one_base(finished: Finished, tmp_path: Path) -> None:
    path, base = (Path(shutil.copytree(finished.newest, tmp_path / name)) for name in ("adapters", "base"))
    rest: Any = None
    it = Adapted(path, read_manifest(path), rest, rest, rest, rest, _weights_at(base))
    it.check_unchanged()
    other = saved_anew(base, tmp_path / "anew")
    take_away(base)
    shutil.copytree(other, base)
    with pytest.raises(GoneError, match=f"^{base} was replaced while it was read"):
        it.check_unchanged()


def test_a_checkpoint_that_knows_the_digest_of_another_is_not_that_one(
    finished: Finished, adapters: Path, tmp_path: Path
) -> None:
    """As adapters in the place of their base, whose digest their own manifest has."""
    path = Path(shutil.copytree(finished.newest, tmp_path / "step"))
    manifest = read_manifest(path)
    assert read_manifest(path, manifest) is manifest
    take_away(path)
    shutil.copytree(adapters, path)
    assert manifest.digest in (path / "manifest.json").read_text()
    assert read_manifest(path, manifest) == read_manifest(adapters)
    with pytest.raises(GoneError, match=f"^{path} was replaced while it was read"):
        check_unchanged(path, manifest)


@pytest.mark.parametrize("sort", [False, True])
def test_a_manifest_that_is_written_otherwise_is_still_that_one(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sort: bool
) -> None:
    """As earlier versions wrote it, or other programs, which may put its own digest before other keys: then alone all
    of it is read once more.
    """
    path = Path(shutil.copytree(finished.newest, tmp_path / "step"))
    manifest, file, parsed = read_manifest(path), path / "manifest.json", list[str]()
    parse = manifests.parse
    monkeypatch.setattr(manifests, "parse", lambda text: parsed.append(text) or parse(text))
    assert read_manifest(path, manifest) is manifest
    file.write_text(json.dumps(json.loads(file.read_text()), indent=1, sort_keys=sort) + "\n")
    assert read_manifest(path, manifest) is manifest
    check_unchanged(path, manifest)
    assert len(parsed) == 2 * sort
    assert read_manifest(path, replace(manifest, digest="")) == manifest


def test_what_a_checkpoint_says_last_is_not_its_digest_where_it_says_it_of_something_else(
    finished: Finished, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(finished.newest, tmp_path / "step"))
    manifest, file = read_manifest(path), path / "manifest.json"
    content = json.loads(to_json(replace(manifest, metadata={"sha256": manifest.digest})))
    facts = content.pop("facts")
    file.write_text(json.dumps({**content, "facts": facts}))
    assert file.read_text().endswith(f'"sha256": "{manifest.digest}"}}}}')
    assert read_manifest(path, manifest).metadata == {"sha256": manifest.digest}


def test_where_a_checkpoint_of_another_program_has_come_the_one_before_is_gone(
    finished: Finished, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(finished.newest, tmp_path / "step"))
    manifest = read_manifest(path)
    (path / "manifest.json").write_text('{"format": "another"}')
    with pytest.raises(GoneError, match=f"^{path} was replaced while it was read"):
        check_unchanged(path, manifest)
    take_away(path)
    with pytest.raises(GoneError, match=f"^{path} does not exist, or not any more"):
        check_unchanged(path, manifest)


def zeros_like(path: Path) -> list[Shard]:
    whole = {name: torch.zeros(tensor.shape) for name, tensor in read_manifest(path).tensors.items()}
    return [Shard(name, tuple(x.shape), (0,) * x.ndim, x) for name, x in whole.items()]


def test_what_is_loaded_is_of_the_manifest_that_the_caller_has_read(finished: Finished) -> None:
    shards, manifest = zeros_like(finished.newest), read_manifest(finished.newest)
    load(finished.newest, shards, known=manifest)
    with pytest.raises(GoneError, match="was replaced while it was read"):
        load(finished.newest, shards, known=replace(manifest, digest=manifest.digest[::-1]))


def test_what_is_loaded_is_of_one_manifest_where_no_hash_tells(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file was checked before another took its place, and read behind that."""
    path, other = shutil.copytree(finished.newest, tmp_path / "step"), saved_anew(finished.newest, tmp_path / "anew")
    shards, open_file = zeros_like(path), open_plain

    def replaced(file: Path) -> BinaryIO:
        take_away(path)
        shutil.copytree(other, path)
        return open_file(file)

    monkeypatch.setattr("colonnade.checkpoint.load.open_plain", replaced)
    with pytest.raises(GoneError, match="was replaced while it was read"):
        load(path, shards, check_hashes=False)
