"""Damage, foreign folders, newer formats, other models, full and forbidden disks: one message each, with the remedy."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colonnade.checkpoint.files import _HashingStream
from colonnade.checkpoint.load import check_model, load, load_found
from colonnade.checkpoint.manifest import Manifest, compare_metadata, newest, read_manifest, remedy, verify
from colonnade.checkpoint.names import MANIFEST, checkpoints_in
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import save
from colonnade.config.compare import before_it_was_saved, model_metadata
from colonnade.config.model import ModelConfig
from colonnade.errors import CheckpointError
from tests.checkpoint.grids import MODEL, model_shards, number
from tests.distributed import run_on_ranks


def shards() -> list[Shard]:
    return model_shards({name: number(shape) for name, shape in MODEL.items()}, 0, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path, 10, shards(), {"model": {"num_layers": 2, "rope": {"base": 1.5}}}, extra_files={"a.toml": b"x = 1"})
    return save(tmp_path, 20, shards(), {"model": {"num_layers": 2, "rope": {"base": 1.5}}})


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_changed_byte_goes_unnoticed(path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(p.name for p in path.iterdir())))
    content = (path / name).read_bytes()
    place, change = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(content)
    changed[place] ^= change
    if name == MANIFEST and json_equal(content, bytes(changed)):
        return  # white space, or another spelling of the same character
    (path / name).write_bytes(changed)
    try:
        for action in (lambda: verify(path), lambda: load(path, shards())):
            said = refused(action)
            assert (name in said and "Delete" in said) or "another version" in said or "not a checkpoint of" in said
    finally:
        (path / name).write_bytes(content)


def json_equal(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_a_file_that_has_gone_before_the_name_is_given_is_missed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that write to disks of their own: rank 0 sees only some of the files."""
    from colonnade.checkpoint import save as saving

    check = saving.check_sizes

    def lost(folder: Path, manifest: Manifest) -> None:
        next(iter(sorted(folder.glob("*.distcp")))).unlink()
        check(folder, manifest)

    monkeypatch.setattr(saving, "check_sizes", lost)
    with pytest.raises(CheckpointError, match="The ranks have written to different disks"):
        save(path.parent, 30, shards(), {})
    assert 30 not in checkpoints_in(path.parent)


def test_all_files_are_on_the_disk_before_they_get_their_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses its power afterwards has all of the checkpoint, or none."""
    synced, fsync, rename = set[int](), os.fsync, Path.rename
    wanted: list[set[int]] = []

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def publish(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            wanted.append({each.stat().st_ino for each in self.iterdir()} | {self.stat().st_ino})
            assert wanted[-1] <= synced
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", publish)
    saved = save(path.parent, 30, shards(), {}, extra_files={"a.toml": b"x = 1"})
    assert wanted and len(wanted[-1]) == 1 + len(list(saved.iterdir()))
    assert path.parent.stat().st_ino in synced, "and its name, too"


def test_the_remedy_is_what_the_run_would_go_on_from(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        (tmp_path / f"step_{step:08d}").mkdir()
    assert remedy(tmp_path / "step_00000030").endswith(" to go on from step 20.")
    assert "There is no older one" in remedy(tmp_path / "step_00000010")
    assert remedy(tmp_path / "elsewhere") == "It cannot be used."


def test_a_damaged_byte_is_found_by_one_of_several_ranks_and_told_by_all(path: Path) -> None:
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    def read(rank: int, num_ranks: int) -> str:
        return refused(lambda: load(path, shards()))

    said = set(run_on_ranks(read, 3))
    model = read_manifest(path).metadata["model"]
    said.add(refused(lambda: load_found(lambda: newest(path.parent), shards(), model=model, check=lambda *_: None)))
    assert said == {
        f"{file} is damaged: its bytes are not those that were written (SHA-256). Delete {path} to go on from step 10."
    }


def test_a_damaged_byte_is_found_where_only_one_rank_sees_its_file(path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / path.name
    elsewhere.mkdir(parents=True)
    shutil.copy(path / MANIFEST, elsewhere)
    contents, file = read_manifest(path), path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    def read(rank: int, num_ranks: int) -> str:
        folder, wanted = (path, shards()) if rank == 1 else (elsewhere, [])
        model, holders = contents.metadata["model"], {name: [1] for name in contents.files}
        return refused(lambda: load_found(lambda: folder, wanted, model=model, check=lambda *_: None, holders=holders))

    assert set(run_on_ranks(read, 2)) == {
        f"{file} is damaged: its bytes are not those that were written (SHA-256). Delete {path} to go on from step 10."
    }


def test_a_truncated_file(path: Path) -> None:
    file = path / "__0_0.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    said = (
        f"{file} is damaged: it has {size - 1} bytes and was written with {size}. Delete {path} to go on from step 10."
    )
    assert refused(lambda: newest(path.parent)) == refused(lambda: load(path, shards())) == said


@pytest.mark.parametrize("change", [-1, 1])
def test_any_file_of_another_size(path: Path, change: int) -> None:
    """Before anything is read of it, whether it is hashed or not."""
    for name, written in read_manifest(path).files.items():
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1] if change < 0 else content + b"x")
        said = f"{path / name} is damaged: it has {written.size + change} bytes and was written with {written.size}. "
        for check_hashes in (True, False):
            assert refused(
                lambda check_hashes=check_hashes: load(path, shards(), check_hashes=check_hashes)
            ).startswith(said)
        (path / name).write_bytes(content)
    verify(path)


def test_a_missing_file(path: Path) -> None:
    shutil.rmtree(path.parent / "step_00000010")
    (path / "__0_0.distcp").unlink()
    assert refused(lambda: newest(path.parent)) == (
        f"{path} is damaged: __0_0.distcp is missing. There is no older one: delete the whole run's folder to "
        "start again from step 0."
    )


def test_damage_without_hashes_is_still_no_traceback(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    assert "is damaged" in refused(lambda: load(path, shards(), check_hashes=False))
    assert "not those that were written" in refused(lambda: load(path, shards())), "with them the file is told"


def test_hashes_may_be_left_out(path: Path) -> None:
    file = path / ".metadata"
    file.write_bytes(bytes(file.stat().st_size))
    load(path, shards(), check_hashes=False)
    assert ".metadata is damaged" in refused(lambda: load(path, shards()))


def test_no_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()
    said = refused(lambda: newest(path.parent))
    assert "has no manifest.json" in said and f"Delete {path} to go on from step 10." in said


def test_a_foreign_folder(tmp_path: Path) -> None:
    assert "does not exist" in refused(lambda: read_manifest(tmp_path / "nowhere"))
    (tmp_path / MANIFEST).write_text('{"name": "a web app"}')
    assert "is not a checkpoint of Colonnade" in refused(lambda: load(tmp_path, shards()))


def test_a_newer_format(path: Path) -> None:
    content = json.loads((path / MANIFEST).read_text()) | {"version": 2, "novelty": True}
    (path / MANIFEST).write_text(json.dumps(content))
    said = refused(lambda: newest(path.parent))
    assert "is in checkpoint format 2, and this version of Colonnade reads format 1" in said


def test_leftovers_are_no_checkpoints(path: Path) -> None:
    for name in (".step_00000030.partial", ".step_00000005.deleted", "step_30", "notes"):
        (path.parent / name).mkdir()
    (path.parent / "step_00000031").write_text("a file")
    assert newest(path.parent) == path
    save(path.parent, 40, shards(), {})
    assert not list(path.parent.glob(".step*"))


def test_another_model(path: Path) -> None:
    said = refused(lambda: load(path, shards(), model={"num_layers": 4, "rope": {"base": 2.0}, "ffn": (1, 2)}))
    assert "is of another model:\n  ffn: absent in the checkpoint, [1, 2] wanted\n  num_layers: 2 in" in said
    assert "\n  rope.base: 1.5 in the checkpoint, 2.0 wanted\n" in said
    load(path, shards(), model={"num_layers": 2, "rope": {"base": 1.5}})


def test_a_model_saved_before_a_key_existed(tmp_path: Path) -> None:
    """It was what all models were until then; a run that wants something else is told so."""
    path = save(tmp_path, 1, shards(), {"model": {"num_layers": 2}})
    now = {"num_layers": 2, "position": "learned", "embedding_norm": False, "norm_position": "pre"}
    load(path, shards(), model=now)
    said = refused(lambda: load(path, shards(), model={**now, "position": "alibi", "norm_position": "post"}))
    assert "\n  norm_position: 'pre' in the checkpoint, 'post' wanted\n  position: 'learned' in the" in said
    later = save(tmp_path, 2, shards(), {"model": now})
    said = refused(lambda: load(later, shards(), model={**now, "embedding_norm": True}))
    assert "\n  embedding_norm: False in the checkpoint, True wanted\n" in said


def test_a_model_with_a_key_that_is_not_known_here(tmp_path: Path) -> None:
    """Of a later version: it may compute something else."""
    path = save(tmp_path, 1, shards(), {"model": {"num_layers": 2, "some_new_option": True}})
    said = refused(lambda: load(path, shards(), model={"num_layers": 2}))
    assert "is of another model:\n  some_new_option: True in the checkpoint, absent wanted\n" in said


def test_compare_metadata() -> None:
    metadata = {"a": 1, "b": {"c": [1, 2]}}
    assert compare_metadata(metadata, metadata) == []
    assert compare_metadata(metadata, {"a": 1, "b": {"c": [1]}}) == ["b.c: [1, 2] in the checkpoint, [1] wanted"]


def test_other_shapes_are_named(path: Path) -> None:
    wanted = [*shards()[1:], Shard("embedding.weight", (64, 8), (0, 0), torch.zeros(64, 8))]
    assert "\n  embedding.weight: [51, 8] in the checkpoint, [64, 8] wanted\n" in refused(lambda: load(path, wanted))


def test_missing_and_left_over_tensors_are_named(path: Path) -> None:
    more = [*shards(), Shard("bias", (1,), (0,), torch.zeros(1)), Shard("a", (1,), (0,), torch.zeros(1))]
    assert "lacks 2 tensors that this model has: a, bias." in refused(lambda: load(path, more))
    few = [shard for shard in shards() if shard.name not in ("scale", "norm.bias")]
    assert "holds 2 tensors that this model does not have: norm.bias, scale." in refused(lambda: load(path, few))
    load(path, few, unread=("norm.", "scale"))


def test_ranks_may_want_different_tensors(path: Path) -> None:
    def read(rank: int, num_ranks: int) -> None:
        load(path, shards()[rank::num_ranks])

    run_on_ranks(read, 2)


def test_a_run_goes_on_from_no_other_model(path: Path) -> None:
    """Whatever else is checked, and though all of its tensors have the shapes that are wanted."""
    same, other = ({"num_layers": 2, "rope": {"base": base}} for base in (1.5, 2.5))
    seen = list[int]()

    def loaded(model: Any) -> Any:
        return load_found(lambda: path, shards(), model=model, check=lambda _, contents: seen.append(contents.step))

    said = refused(lambda: loaded(other))
    assert said.startswith(f"{path} is of another model:") and "rope.base" in said
    assert loaded(same) is not None and seen == [20], "and then what else is to be checked is"


def found_on(rank: int, folders: list[Path], check: Callable[[Path, Manifest], None] = lambda *_: None) -> str | None:
    """What rank `rank` loads from the newest checkpoint in its folder: the checkpoint's name."""
    wanted = [Shard("x", (3,), (0,), torch.zeros(3))]
    found = load_found(lambda: newest(folders[rank]), wanted, model={}, check=check)
    assert found is None or wanted[0].data.tolist() == [float(found[1].step)] * 3
    return None if found is None else found[0].name


@pytest.fixture
def two_folders(tmp_path: Path) -> list[Path]:
    for name, step in (("one", 1), ("other", 2)):
        save(tmp_path / name, step, [Shard("x", (3,), (0,), torch.full((3,), float(step)))], {"model": {}})
    shutil.copytree(tmp_path / "one", tmp_path / "same")
    return [tmp_path / "one", tmp_path / "same", tmp_path / "other", tmp_path / "none"]


def test_ranks_that_see_the_same_load_it(two_folders: list[Path]) -> None:
    """Under whatever path; and none is none for all."""
    one, same, _, none = two_folders
    assert run_on_ranks(lambda rank, _: found_on(rank, [one, same]), 2) == ["step_00000001"] * 2
    assert run_on_ranks(lambda rank, _: found_on(rank, [none, none]), 2) == [None, None]
    assert found_on(0, [none]) is None and found_on(0, [one]) == "step_00000001"


def test_ranks_that_see_different_checkpoints(two_folders: list[Path]) -> None:
    one, _, other, none = two_folders

    def read(rank: int, num_ranks: int, folders: list[Path]) -> str:
        return refused(lambda: found_on(rank, folders))

    first, second = run_on_ranks(read, 2, [one, other])
    assert first == second and first.startswith(
        f"The ranks see different checkpoints:\n  ranks 0: {one}/step_00000001 "
    )
    assert f"\n  ranks 1: {other}/step_00000002 " in first and "file system that all machines share" in first
    first, second = run_on_ranks(read, 2, [none, one])
    assert first == second and "\n  ranks 0: none\n  ranks 1: " in first


def test_one_ranks_check_refuses_for_all(two_folders: list[Path]) -> None:
    def check(path: Path, manifest: Manifest) -> None:
        if torch.distributed.get_rank() == 1:
            raise CheckpointError(f"{path.name} has step {manifest.step}")

    def read(rank: int, num_ranks: int) -> str:
        return refused(lambda: found_on(rank, [two_folders[0]] * 2, check))

    assert run_on_ranks(read, 2) == ["step_00000001 has step 1"] * 2


def test_a_folder_that_cannot_be_looked_into_is_not_empty(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    said = refused(lambda: load_found(lambda: newest(path.parent), shards(), model={}, check=lambda *_: None))
    assert said.startswith("Rank 0 could not read or write the checkpoint: [Errno 13] Permission denied")


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_too_little_space_is_seen_before_anything_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 10**6 - 100, 100))
    said = refused(lambda: save(path.parent, 30, shards(), {}))
    assert "has 0.0 MB free, and saving step 30 needed 0.0 MB more (No space left on device)" in said
    assert "step_00000020, the last whole checkpoint, stays." in said
    assert newest(path.parent) == path and not list(path.parent.glob(".*"))


def test_room_for_all_numbers_but_a_byte_is_too_little(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the user waits for no write that must fail: not one is begun."""
    begun = list[Any]()
    monkeypatch.setattr(_HashingStream, "write", lambda stream, data: begun.append(data))
    needed = sum(shard.data.nbytes for shard in shards())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 0, needed - 1))
    assert refused(lambda: save(path.parent, 30, shards(), {})).startswith("The disk is full: ")
    assert not begun


def test_a_disk_too_full_for_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which none is there yet."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", refuse)
    said = refused(lambda: save(tmp_path / "some" / "where" / "else", 1, shards(), {}))
    assert said.startswith("The disk is full: ") and "No checkpoint was there before" in said


@pytest.mark.parametrize("limit", [0, 100, 2000, 30_000, 300_000, 800_000])
def test_a_file_that_becomes_too_large_while_it_is_written(tmp_path: Path, limit: int) -> None:
    """Writes fail in the midst of one, as on a disk that fills, and the limit is named: to free some space would not
    help."""

    def fill(rank: int, num_ranks: int) -> str:
        x = {f"w{i}": torch.ones(100_000) for i in range(2)}
        save(tmp_path, 1, model_shards(x, 0, 1), {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        said = refused(
            lambda: save(tmp_path, 2, model_shards(x, 0, 1), {}, extra_files={"config.toml": bytes(900_000)})
        )
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
        save(tmp_path, 2, model_shards(x, 0, 1), {})
        return said

    (said,) = run_on_ranks(fill, 1)
    assert said == (
        f"{tmp_path} takes no file as large as saving step 2 needs (File too large, more than the {limit:,} bytes that "
        "a file of this process may have (ulimit -f)). step_00000001, the last whole checkpoint, stays. Raise the "
        "limit on the size of files, or save on another file system, and start again."
    )
    verify(tmp_path / "step_00000001")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])  # full, a quota, a limit on files
@pytest.mark.parametrize("room", [0, 100, 700, 1_000, 1_500, 2_000])
def test_a_disk_that_fills_at_any_byte_of_an_archive(
    path: Path, monkeypatch: pytest.MonkeyPatch, room: int, number: int
) -> None:
    """torch ends its archive after a failed write, and what it says of that is not what was wrong."""
    left, original = [room], _HashingStream.write

    def write(stream: Any, data: Any) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return original(stream, data)

    monkeypatch.setattr(_HashingStream, "write", write)
    said = refused(lambda: save(path.parent, 30, shards(), {}))
    assert said.startswith("The disk is full: ") == (number != errno.EFBIG)
    assert f"({os.strerror(number)}). step_00000020, the last whole checkpoint, stays" in said
    assert newest(path.parent) == path and not list(path.parent.glob(".*"))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    said = refused(lambda: save(tmp_path, 1, shards(), {}))
    assert said.startswith("Rank 0 could not read or write the checkpoint: [Errno 13] Permission denied")


def test_the_remedy_is_the_next_older_checkpoint(tmp_path: Path) -> None:
    paths = [tmp_path / f"step_{step:08d}" for step in (10, 20, 30)]
    for path in paths:
        path.mkdir()
    assert remedy(paths[1]) == f"Delete {paths[1]} to go on from step 10."
    assert "no older one" in remedy(paths[0]) and "step 20" in remedy(paths[2])


def test_what_was_saved_counts_and_else_what_held_before_it_was(tmp_path: Path) -> None:
    model = ModelConfig(position="alibi", bias=False, norm_position="post", embedding_norm=True)
    metadata = json.loads(json.dumps(model_metadata(model, 99)))
    check_model(tmp_path, Manifest(1, {"model": metadata}, {}, {}), metadata)
    younger = before_it_was_saved()
    old = {key: value for key, value in model_metadata(ModelConfig(), 99).items() if key not in younger}
    check_model(tmp_path, Manifest(1, {"model": old}, {}, {}), model_metadata(ModelConfig(), 99))
    t5 = model_metadata(ModelConfig(kind="t5", num_layers=2), 99)
    check_model(tmp_path, Manifest(1, {"model": {**t5, "num_decoder_layers": 2}}, {}, {}), t5)
    with pytest.raises(CheckpointError, match="position: 'learned' in the checkpoint, 'alibi' wanted"):
        check_model(tmp_path, Manifest(1, {"model": old}, {}, {}), metadata)
