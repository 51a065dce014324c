"""What is read of a checkpoint: the files that a rank needs, the tensors that it may lack, every byte for its hash."""

import shutil
import struct
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from colonnade.checkpoint import manifest
from colonnade.checkpoint.confined import read_plain
from colonnade.checkpoint.load import MOST_LINES, _Reader, check_model, files_needed, load, load_found
from colonnade.checkpoint.manifest import (
    Manifest,
    SavedTensor,
    StoredShard,
    check_sizes,
    hash_file,
    read_manifest,
    verify,
)
from colonnade.checkpoint.plan import Box, Shard
from colonnade.checkpoint.save import save
from colonnade.errors import CheckpointError
from tests.distributed import run_on_ranks


def rows(*counts: int) -> SavedTensor:
    """A matrix of which each file has so many rows."""
    starts = [sum(counts[:number]) for number in range(len(counts))]
    stored = [
        StoredShard(Box((start, 0), (count, 4)), f"__{number}_0.distcp", 0, 16 * count)
        for number, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    return SavedTensor((sum(counts), 4), torch.float32, tuple(stored))


@pytest.mark.parametrize(
    ("name", "row", "count", "expected"),
    [
        ("w", 0, 3, {0}),
        ("w", 3, 2, {1}),
        ("w", 2, 2, {0, 1}),
        ("w", 0, 9, {0, 1, 2}),
        ("w", 8, 1, {2}),
        ("v", 1, 1, {1}),
        ("new", 0, 2, set()),
    ],
)
def test_a_rank_needs_the_files_in_which_there_is_something_of_its_boxes(
    name: str, row: int, count: int, expected: set[int]
) -> None:
    """No others, which it may not see; of a tensor that the checkpoint lacks, none."""
    contents = Manifest(1, {}, {"w": rows(3, 2, 4), "v": rows(1, 1)}, {})
    whole = contents.tensors[name].shape if name in contents.tensors else (2, 4)
    wanted = [Shard(name, whole, (row, 0), torch.zeros(count, 4))]
    assert files_needed(contents, wanted) == {f"__{number}_0.distcp" for number in expected}


def test_what_a_checkpoint_may_lack_is_read_where_it_has_it(tmp_path: Path) -> None:
    """And stays as it is where it has it not."""
    path = save(tmp_path, 1, [Shard("had", (3,), (0,), torch.ones(3))], {"model": {}})
    wanted = [Shard(name, (3,), (0,), torch.full((3,), 7.0)) for name in ("had", "lacked")]
    load_found(lambda: path, wanted, model={}, check=lambda *_: None, lacks=lambda contents: ["had", "lacked"])
    assert [shard.data.tolist() for shard in wanted] == [[1.0] * 3, [7.0] * 3]
    with pytest.raises(CheckpointError, match="lacks 1 tensors that this model has: lacked"):
        load_found(lambda: path, wanted, model={}, check=lambda *_: None, lacks=lambda contents: ["had"])


def test_what_nobody_wants_is_what_begins_so_and_nothing_else(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Shard(name, (3,), (0,), torch.ones(3)) for name in ("w", "moments.w", "v")], {})
    wanted = [Shard("w", (3,), (0,), torch.zeros(3))]
    load(path, wanted, unread=("moments.", "v"))
    with pytest.raises(CheckpointError, match="holds 1 tensors that this model does not have: v"):
        load(path, wanted, unread=("moments.",))


def test_of_a_wholly_different_model_not_all_is_listed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        check_model(tmp_path, Manifest(1, {"model": {}}, {}, {}), {f"key{n:03}": n for n in range(500)})
    assert str(refused.value).count(" wanted") == MOST_LINES


@pytest.mark.parametrize("length", [0, 1, 99, 100, 101, 250])
def test_every_block_of_a_file_is_in_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(manifest, "HASH_BLOCK", 100)
    content = bytes(range(250))[:length]
    (tmp_path / "file").write_bytes(content)
    assert hash_file(tmp_path / "file") == sha256(content).hexdigest()


def test_a_file_may_be_as_long_as_is_allowed_and_no_longer(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "empty").touch()
    assert read_plain(tmp_path / "file", 5) == b"12345" and read_plain(tmp_path / "empty", 0) == b""
    with pytest.raises(CheckpointError, match=r"file has 5 bytes, and no checkpoint of Colonnade has one of more than"):
        read_plain(tmp_path / "file", 4)


@pytest.mark.parametrize("shape", [(4, 6), (24,), (6, 4, 1)])
def test_a_tensor_of_as_many_numbers_is_another_one(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = save(tmp_path, 1, [Shard(name, (6, 4), (0, 0), torch.ones(6, 4)) for name in ("v", "w")], {})
    wanted = [Shard("v", (6, 4), (0, 0), torch.zeros(6, 4)), Shard("w", shape, (0,) * len(shape), torch.zeros(shape))]
    with pytest.raises(CheckpointError) as refused:
        load(path, wanted)
    assert f"tensors of other shapes:\n  w: [6, 4] in the checkpoint, {list(shape)} wanted\n" in str(refused.value)


def half(rank: int, num_ranks: int, folder: Path) -> None:
    save(folder, 1, [Shard("w", (6, 4), (3 * rank, 0), torch.ones(3, 4))], {})


@pytest.mark.parametrize("damaged", [0, 1])
def test_of_a_tensor_in_two_files_that_which_cannot_be_read_is_named(tmp_path: Path, damaged: int) -> None:
    """By its hash, where all but a number is as it was; and without hashes, where nothing is."""
    run_on_ranks(half, 2, tmp_path)
    path, wanted = tmp_path / "step_00000001", [Shard("w", (6, 4), (0, 0), torch.zeros(6, 4))]
    file = path / f"__{damaged}_0.distcp"
    sound = file.read_bytes()
    one = struct.pack("<f", 1.0)
    for content, check_hashes in ((sound.replace(one, bytes(4), 1), True), (bytes(len(sound)), False)):
        file.write_bytes(content)
        with pytest.raises(CheckpointError) as refused:
            load(path, wanted, check_hashes=check_hashes)
        assert str(refused.value).startswith(f"{file} is damaged: ")


def test_whoever_verifies_a_checkpoint_is_told_each_file_and_which_is_missing(tmp_path: Path) -> None:
    path, told = save(tmp_path, 1, [Shard("w", (3,), (0,), torch.ones(3))], {}), list[str]()
    assert verify(path, told.append).step == 1
    assert sorted(told) == [".metadata", "__0_0.distcp"]
    (path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000001 is damaged: __0_0\.distcp is missing"):
        verify(path)


def test_a_manifest_that_was_read_before_is_taken_where_it_is_still_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another is in its place, that one is read: whoever finds a checkpoint may find a later one."""

    def saved(value: float) -> Path:
        return save(tmp_path, 1, [Shard("w", (3,), (0,), torch.full((3,), value))], {"model": {}, "value": value})

    path, wanted = saved(1.0), [Shard("w", (3,), (0,), torch.zeros(3))]
    known = read_manifest(path)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "parse", lambda text: pytest.fail("its text is parsed again"))
        assert read_manifest(path, known) is known
    for value in (1.0, 2.0):
        found = load_found(lambda: path, wanted, model={}, check=lambda *_: None, known=known)
        assert found is not None and found[1].metadata["value"] == value and wanted[0].data.tolist() == [value] * 3
        saved(2.0)
    assert read_manifest(path, known).metadata["value"] == 2.0


@pytest.mark.parametrize("was_read", [False, True])
def test_a_checkpoint_with_the_name_of_another_step_is_refused(tmp_path: Path, was_read: bool) -> None:
    """Also where its manifest was read before, by its right name."""
    path = save(tmp_path, 1, [Shard("w", (3,), (0,), torch.ones(3))], {})
    known = read_manifest(path) if was_read else None
    copy, renamed = (Path(shutil.copytree(path, tmp_path / name)) for name in ("copy", "step_00000002"))
    assert read_manifest(copy, known).step == 1
    with pytest.raises(CheckpointError, match=r"2 holds the checkpoint of step 1, .*Rename it to step_00000001, or"):
        read_manifest(renamed, known)


def test_the_sizes_of_those_files_are_looked_at_that_are_named(tmp_path: Path) -> None:
    """Of none where none is, as on one of more ranks than there are files; of all where nobody says which."""
    path = save(tmp_path, 1, [Shard("w", (3,), (0,), torch.ones(3))], {})
    contents = read_manifest(path)
    (path / "__0_0.distcp").unlink()
    for names in ((), (".metadata",)):
        check_sizes(path, contents, names)
    for names in (("__0_0.distcp",), None):
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
            check_sizes(path, contents, names)


@pytest.mark.parametrize("change", [b"", b"x"])
def test_a_rank_that_wants_no_tensor_checks_its_share_of_the_files(tmp_path: Path, change: bytes) -> None:
    path = save(tmp_path, 1, [Shard("w", (3,), (0,), torch.ones(3))], {}, extra_files={"a.toml": b"y"})
    reader = _Reader(lambda: path, check_hashes=True)
    reader.set_up_storage_reader(Metadata({}), is_coordinator=False)
    share, planner = LoadPlan([], storage_data=["a.toml"]), LoadPlanner  # which is asked for nothing
    reader.read_data(share, planner)  # type: ignore[arg-type]
    (path / "a.toml").write_bytes(change)
    with pytest.raises(CheckpointError, match=r"a\.toml is damaged"):
        reader.read_data(share, planner)  # type: ignore[arg-type]
