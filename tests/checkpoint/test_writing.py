"""How a checkpoint comes to the disk: all of its bytes, and what is said where that fails."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.checkpoint import save as saving
from colonnade.checkpoint.agree import agree
from colonnade.checkpoint.failure import alone_is_fine
from colonnade.checkpoint.files import _HashingStream
from colonnade.checkpoint.load import load
from colonnade.checkpoint.manifest import read_manifest, verify
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import Payload, Target, save, write
from colonnade.errors import CheckpointError
from tests.checkpoint.grids import MODEL, model_shards, number
from tests.distributed import run_on_ranks


def shards() -> list[Shard]:
    return model_shards({name: number(shape) for name, shape in MODEL.items()}, 0, 1)


@pytest.fixture
def no_crc() -> Iterator[None]:
    """As a process that has turned torch's off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


def test_a_file_is_synced_when_all_of_it_has_been_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in the memory of the process is not on the disk."""
    synced, fsync = dict[int, int](), os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", note)
    path = save(tmp_path, 1, shards(), {}, extra_files={"config.toml": b"seed = 1"})
    assert len(list(path.iterdir())) == 4
    for file in path.iterdir():
        assert synced[file.stat().st_ino] == file.stat().st_size, file.name


@pytest.mark.parametrize("room", [0, 100, 700, 2_000])
def test_what_else_the_disk_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Not in those of torch, whose archive could not be ended."""
    left, original = [room], _HashingStream.write

    def break_off(stream: Any, data: Any) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(stream, data)

    monkeypatch.setattr(_HashingStream, "write", break_off)
    with pytest.raises(CheckpointError) as refused:
        save(tmp_path, 1, shards(), {})
    assert str(refused.value).startswith("Rank 0 could not read or write the checkpoint: [Errno 5] Input/output error")


def test_an_error_of_the_program_is_not_taken_for_one_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> str:
        raise RuntimeError("an error of the program")

    monkeypatch.setattr(saving, "to_json", fail)
    with pytest.raises(RuntimeError, match="an error of the program"):
        save(tmp_path, 1, shards(), {})
    assert torch.serialization.get_crc32_options(), "and the setting of the process is as it was"
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_crc")
def test_a_process_that_writes_no_checksums_still_does_not(tmp_path: Path) -> None:
    save(tmp_path, 1, shards(), {})
    assert not torch.serialization.get_crc32_options()


def test_no_checksums_are_computed_beside_the_hashes(tmp_path: Path) -> None:
    """A zip's CRC of every number would take as long as the writing."""
    agreement, computes = agree(shards()), list[bool]()
    with alone_is_fine():
        write(
            Target(tmp_path, 1),
            Payload(1, {}),
            agreement,
            agreement.tensors(shards()),
            first=lambda: computes.append(torch.serialization.get_crc32_options()),
        )
    assert computes == [False] and torch.serialization.get_crc32_options()


def test_a_machines_part_keeps_its_temporary_name_and_needs_no_room_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a folder of its own a rank sees not all of the files."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    named = list[str]()
    target = Target(tmp_path, 1, before_publishing=lambda: named.append("published"), is_shared=False)
    agreement = agree(shards())
    with alone_is_fine():
        write(target, Payload(7, {"samples": 3}), agreement, agreement.tensors(shards()))
    (part,) = tmp_path.iterdir()
    assert part.name == ".step_00000007.partial" and not named
    assert verify(part).metadata == {"samples": 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_save_begins_where_there_is_room_for_all_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """And not where a byte is lacking, however wide they are."""
    numbers = [Shard(name, (30, 5), (0, 0), torch.ones(30, 5, dtype=dtype)) for name in ("v", "w")]
    needed, written = 2 * 150 * dtype.itemsize, list[int]()
    original = _HashingStream.write
    monkeypatch.setattr(
        _HashingStream, "write", lambda stream, data: (written.append(len(data)), original(stream, data))[1]
    )
    for lacking in (1, 0):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, lacking=lacking: SimpleNamespace(free=needed - lacking))
        if lacking:
            with pytest.raises(CheckpointError, match="The disk is full"):
                save(tmp_path, 1, numbers, {})
            assert not written and not list(tmp_path.iterdir())
        else:
            assert verify(save(tmp_path, 1, numbers, {})).step == 1 and sum(written) > needed


def test_a_rank_whose_box_is_empty_writes_nothing_of_that_tensor(tmp_path: Path) -> None:
    """As one of many ranks that cut a short dim."""

    def uneven(rank: int, num_ranks: int) -> None:
        length = 5 if rank == 0 else 0
        shard = Shard("w", (5,), (0 if rank == 0 else 5,), torch.arange(float(length)))
        path = save(tmp_path, 1, [shard], {})
        found = torch.zeros(length)
        load(path, [Shard("w", (5,), shard.offsets, found)])
        assert torch.equal(found, shard.data)

    run_on_ranks(uneven, 2)
    assert len(read_manifest(tmp_path / "step_00000001").tensors["w"].shards) == 1


def test_ranks_that_hold_a_tensor_in_different_types_are_a_bug_on_all(tmp_path: Path) -> None:
    def half(rank: int, num_ranks: int) -> None:
        dtype = (torch.float32, torch.float64)[rank]
        with pytest.raises(AssertionError, match="w: shape and dtype must be the same on all ranks"):
            save(tmp_path, 1, [Shard("w", (4,), (2 * rank,), torch.zeros(2, dtype=dtype))], {})

    run_on_ranks(half, 2)
