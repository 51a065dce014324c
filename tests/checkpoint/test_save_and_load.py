"""Round trips: from any layout into any other, on one process and on several ranks, and what is left on disk."""

import json
import pickle
import random
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from colonnade.checkpoint.load import load
from colonnade.checkpoint.manifest import newest, read_manifest, verify
from colonnade.checkpoint.names import MANIFEST, checkpoints_in
from colonnade.checkpoint.plan import Box, Shard
from colonnade.checkpoint.save import Payload, Target, save, save_made
from colonnade.errors import CheckpointError
from tests.checkpoint.grids import MODEL, Layout, grids, layouts, model_shards, number, shard_of
from tests.distributed import fork, run_on_ranks

METADATA: dict[str, Any] = {"model": {"num_layers": 2}, "samples": 12}


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.float16]


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: number(shape, dtype) for name, shape in MODEL.items()}


def shards_on(rank: int, tp: int, logical: dict[str, torch.Tensor]) -> list[Shard]:
    """Of global rank `rank`, tp innermost; copies of equal boxes for every dp rank."""
    return model_shards(logical, rank % tp, tp)


def empty_like(shards: list[Shard], dtype: torch.dtype | None = None) -> list[Shard]:
    return [Shard(s.name, s.shape, s.offsets, torch.full_like(s.data, -1, dtype=dtype)) for s in shards]


def write(rank: int, num_ranks: int, folder: Path, tp: int) -> None:
    save(folder, 100, shards_on(rank, tp, weights()), METADATA, extra_files={"config.toml": b"[model]\n"})


def read_back(rank: int, num_ranks: int, path: Path, tp: int) -> dict[str, Any]:
    wanted = shards_on(rank, tp, weights())
    found = empty_like(wanted)
    metadata = load(path, found, model=METADATA["model"]).metadata
    for have, want in zip(found, wanted, strict=True):
        assert torch.equal(have.data, want.data), have.name
    return metadata


@pytest.mark.slow
@given(grids(), st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]))
@settings(max_examples=60, deadline=None)
def test_any_boxes_are_read_back_as_any_other_boxes(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject, dtype: torch.dtype
) -> None:
    shape, written = case
    _, wanted = data.draw(grids(shape))
    x, y = number(shape, dtype), torch.zeros(shape, dtype=dtype)
    with TemporaryDirectory() as folder:
        path = save(Path(folder), 1, [shard_of("x", x, box) for box in written], {})
        load(path, [shard_of("x", y, box) for box in wanted])
    assert torch.equal(x, y)


def test_each_tensor_is_found_by_its_own_archive(tmp_path: Path) -> None:
    """What torch writes before the numbers is as long as their description: many dims, many bytes."""
    shapes = [(3,), (1,) * 14 + (5,), (), (2, 1, 2), (1,) * 9 + (7,)]
    logical = {f"x{n}": number(shape, dtype) for n, (shape, dtype) in enumerate(zip(shapes, DTYPES, strict=True))}
    path = save(tmp_path, 1, [Shard(name, tuple(x.shape), (0,) * x.ndim, x) for name, x in logical.items()], {})
    found = [Shard(name, tuple(x.shape), (0,) * x.ndim, torch.zeros_like(x)) for name, x in logical.items()]
    load(path, found)
    assert all(torch.equal(shard.data, logical[shard.name]) for shard in found)


@pytest.mark.slow
@given(layouts(), layouts())
@settings(max_examples=60, deadline=None)
def test_slices_are_read_back_as_any_other_slices(wrote: Layout, reads: Layout) -> None:
    """All ranks' shards at once, in one process: tensors cut over tp and dp, tied over stages, padded everywhere."""
    logical = weights(torch.float64)
    blank = {name: torch.zeros_like(x) for name, x in logical.items()}
    with TemporaryDirectory() as folder:
        path = save(Path(folder), 1, [s for rank in range(wrote.num_ranks) for s in wrote.shards(logical, rank)], {})
        wanted = [shard for rank in range(reads.num_ranks) for shard in reads.shards(logical, rank)]
        found = [shard for rank in range(reads.num_ranks) for shard in reads.shards(blank, rank)]
        load(path, found)
    for have, want in zip(found, wanted, strict=True):
        assert torch.equal(have.data, want.data), have.name


GRIDS = [
    Layout(),
    Layout(tp=4),
    Layout(dp=4),
    Layout(dp=3, zero=True),
    Layout(tp=2, dp=2, zero=True),
    Layout(tp=2, pp=2),
    Layout(dp=2, pp=2, zero=True),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("number", range(len(GRIDS)), ids=lambda number: str(GRIDS[number]))
def test_any_ranks_read_what_other_ranks_wrote(tmp_path: Path, number: int) -> None:
    """Each on a process of its own, as in a run that goes on elsewhere."""
    wrote, reads = GRIDS[number], GRIDS[(number + 3) % len(GRIDS)]

    def write_slices(rank: int, num_ranks: int) -> None:
        save(tmp_path, 1, wrote.shards(weights(), rank), METADATA)

    def read_slices(rank: int, num_ranks: int) -> list[str]:
        wanted = reads.shards(weights(), rank)
        found = empty_like(wanted)
        load(tmp_path / "step_00000001", found, model=METADATA["model"])
        return [have.name for have, want in zip(found, wanted, strict=True) if not torch.equal(have.data, want.data)]

    run_on_ranks(write_slices, wrote.num_ranks)
    assert run_on_ranks(read_slices, reads.num_ranks) == [[]] * reads.num_ranks
    verify(tmp_path / "step_00000001")


def test_a_giant_tensor_is_written_by_all_who_hold_it(tmp_path: Path) -> None:
    def copies(rank: int, num_ranks: int) -> None:
        save(tmp_path, 1, model_shards({"embedding.weight": number((50_257, 8))}, 0, 1), {})

    run_on_ranks(copies, 4)
    contents = verify(tmp_path / "step_00000001")
    sizes = [contents.files[f"__{rank}_0.distcp"].size for rank in range(4)]
    assert max(sizes) < 1.1 * min(sizes) and sum(sizes) < 1.02 * 50_257 * 8 * 4
    x = torch.zeros(50_257, 8)
    load(tmp_path / "step_00000001", model_shards({"embedding.weight": x}, 0, 1))
    assert torch.equal(x, number((50_257, 8)))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("num_ranks", "tp"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_any_layout_reads_what_any_layout_wrote(tmp_path: Path, num_ranks: int, tp: int) -> None:
    run_on_ranks(write, num_ranks, tmp_path, tp)
    path = newest(tmp_path)
    assert path == tmp_path / "step_00000100"
    assert read_back(0, 1, path, 1) == METADATA
    for readers, other in ((2, 2), (4, 4), (4, 1)):
        assert run_on_ranks(read_back, readers, path, other) == [METADATA] * readers


def test_copies_are_written_once_and_the_work_is_shared(tmp_path: Path) -> None:
    def copies(rank: int, num_ranks: int) -> None:
        x = {f"w{i}": number((64, 64)) for i in range(8)}
        save(tmp_path, 1, model_shards(x, 0, 1), {})

    run_on_ranks(copies, 4)
    files = verify(tmp_path / "step_00000001").files
    sizes = [files[f"__{rank}_0.distcp"].size for rank in range(4)]
    assert max(sizes) < 1.01 * min(sizes) and sum(sizes) < 1.2 * 8 * 64 * 64 * 4


def test_a_rank_may_hold_nothing(tmp_path: Path) -> None:
    def one_holds_all(rank: int, num_ranks: int) -> None:
        shards = model_shards(weights(), 0, 1) if rank == 1 else []
        save(tmp_path, 1, shards, {})
        found = empty_like(model_shards(weights(), 0, 1)) if rank == 0 else []
        load(tmp_path / "step_00000001", found)

    run_on_ranks(one_holds_all, 2)


def test_the_dtype_of_the_reader_counts(tmp_path: Path) -> None:
    path = save(tmp_path, 1, model_shards(weights(torch.float64), 0, 1), {})
    found = empty_like(model_shards(weights(), 0, 1), torch.bfloat16)
    load(path, found)
    for shard in found:
        assert torch.equal(shard.data, number(shard.shape, torch.float64).bfloat16())
    assert read_manifest(path).tensors["norm.bias"].dtype == torch.float64


def test_views_parameters_and_transposes(tmp_path: Path) -> None:
    flat = torch.arange(24.0)
    parts = {
        "view": flat[4:16].view(3, 4),
        "transpose": flat[:12].view(3, 4).t(),
        "parameter": torch.nn.Parameter(flat.clone()),
        "column": flat.view(4, 6)[:, 2],
    }
    shards = [Shard(name, tuple(x.shape), (0,) * x.dim(), x) for name, x in parts.items()]
    path = save(tmp_path, 1, shards, {})
    assert sum(file.size for file in read_manifest(path).files.values()) < 20_000
    places = {name: torch.nn.Parameter(torch.zeros_like(x)) for name, x in parts.items()}
    places["view"] = torch.nn.Parameter(torch.zeros(4, 3).t())
    load(path, [Shard(name, tuple(x.shape), (0,) * x.dim(), x) for name, x in places.items()])
    for name, x in parts.items():
        assert torch.equal(places[name], x), name


def test_parts_larger_than_a_block_of_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colonnade.checkpoint.files.BLOCK", 100)
    x, y = number((50, 40)), torch.zeros(50, 40)
    path = save(tmp_path, 1, [shard_of("x", x, Box((0, 0), (50, 40)))], {})
    load(path, [shard_of("x", y, Box((3, 7), (31, 20))), shard_of("x", y, Box((0, 0), (2, 40)))])
    assert torch.equal(y[3:34, 7:27], x[3:34, 7:27]) and torch.equal(y[:2], x[:2]) and y.count_nonzero() == 31 * 20 + 80


def test_tensors_that_are_made_in_turn_take_the_memory_of_one(tmp_path: Path) -> None:
    """What was made before is given back when the next one is asked for, and is in the checkpoint all the same."""
    logical, made, held = (
        {f"x{n}": number((3, n), torch.float32) for n in range(1, 6)},
        list[torch.Tensor](),
        list[int](),
    )

    def make(name: str) -> torch.Tensor:
        held.append(sum(x.untyped_storage().nbytes() for x in made))
        made.append(logical[name].clone())
        return made[-1]

    kinds = {name: (tuple(x.shape), x.dtype) for name, x in logical.items()}
    path = save_made(Target(tmp_path, 1), Payload(1, {}), kinds, make)
    assert held == [0] * 5
    found = {name: torch.zeros_like(x) for name, x in logical.items()}
    load(path, [Shard(name, tuple(x.shape), (0, 0), x) for name, x in found.items()])
    assert all(torch.equal(found[name], x) for name, x in logical.items())


def test_torchs_own_reader_reads_it(tmp_path: Path) -> None:
    run_on_ranks(write, 2, tmp_path, 2)
    found: dict[str, Any] = {name: torch.zeros(shape) for name, shape in MODEL.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load_distributed(found, storage_reader=FileSystemReader(tmp_path / "step_00000100"))
    for name, x in weights().items():
        assert torch.equal(found[name], x), name


def test_reading_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1, model_shards(weights(), 0, 1), {})

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    for place in (pickle, torch):
        monkeypatch.setattr(place, "load", refuse)
    found = empty_like(model_shards(weights(), 0, 1))
    load(path, found)
    assert all(torch.equal(shard.data, weights()[shard.name]) for shard in found)


def test_what_lies_in_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 7, model_shards(weights(), 0, 1), METADATA, extra_files={"config.toml": b"seed = 1"})
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "__0_0.distcp", "config.toml", MANIFEST]
    assert (path / "config.toml").read_bytes() == b"seed = 1"
    content = json.loads((path / MANIFEST).read_text())
    assert content["facts"] == METADATA and content["step"] == 7 and content["version"] == 1
    assert content["tensors"]["down.weight"]["shape"] == [8, 32]
    assert not content["files"].keys() ^ {".metadata", "__0_0.distcp", "config.toml"}
    assert torch.serialization.get_crc32_options()  # the setting of the process is as it was


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") is None
    for step in (1, 5, 20, 100_000_000):
        save(tmp_path, step, model_shards(weights(), 0, 1), {}, keep=2)
    assert list(checkpoints_in(tmp_path)) == [20, 100_000_000]
    assert newest(tmp_path) == tmp_path / "step_100000000"
    save(tmp_path, 7, model_shards(weights(), 0, 1), {}, keep=1)  # what has just been written is always kept
    assert list(checkpoints_in(tmp_path)) == [7] and len(list(tmp_path.iterdir())) == 1


def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    for value in (1, 2):
        path = save(tmp_path, 3, model_shards(weights(), 0, 1), {"value": value}, keep=1)
    assert read_manifest(path).metadata == {"value": 2} and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("first", "size"), [(3, 3), (2, 4)], ids=["too few numbers", "as many, two of them twice"])
def test_boxes_that_do_not_cover_are_a_bug_on_all_ranks(tmp_path: Path, first: int, size: int) -> None:
    def gap(rank: int, num_ranks: int) -> str:
        with pytest.raises(AssertionError, match=r"w \[8\]: boxes must cover it") as caught:
            save(tmp_path, 1, [Shard("w", (8,), (first * rank,), torch.zeros(size))], {})
        return str(caught.value.__notes__)

    notes = run_on_ranks(gap, 2)
    assert all("on rank 0" in note and "_metadata" in note for note in notes)
    assert not list(tmp_path.glob("*"))


def save_forever(folder: Path, first: int) -> None:
    torch.set_num_threads(1)
    for step in range(first, first + 1_000_000):
        x = {f"w{i}": torch.full((50_000,), float(step)) for i in range(8)}
        save(folder, step, model_shards(x, 0, 1), {"value": step}, keep=2)


def test_killed_at_any_moment_the_last_whole_one_stays(tmp_path: Path) -> None:
    """Each round goes on in the folder that the killed one has left."""
    for round_ in range(25):
        first = 1 + 1000 * round_
        child = fork(save_forever, tmp_path, first)
        while max(checkpoints_in(tmp_path), default=0) < first:
            time.sleep(0.002)
        time.sleep(random.Random(round_).random() * 0.05)
        child.kill()
        child.join()
        path = newest(tmp_path)
        assert path is not None
        contents = verify(path)
        x = torch.zeros(50_000)
        load(path, [Shard("w3", (50_000,), (0,), x)], unread=("w",))
        assert x.eq(contents.metadata["value"]).all() and len(checkpoints_in(tmp_path)) <= 3
    last = max(checkpoints_in(tmp_path))
    save(tmp_path, last + 1, model_shards(weights(), 0, 1), {}, keep=1)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_for_which_there_is_no_space_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space for what one rank writes is not enough."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000))

    def on_a_rank(rank: int, num_ranks: int) -> str:
        half = [Shard("w", (1_000_000,), (500_000 * rank,), torch.zeros(500_000))]
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, 1, half, {})
        return str(caught.value)

    first, second = run_on_ranks(on_a_rank, 2)
    assert first == second and not list(tmp_path.iterdir())
    assert first.startswith(f"The disk is full: {tmp_path} has 3.0 MB free, and saving step 1 needed 4.0 MB more")


def test_one_ranks_failure_is_everyones(tmp_path: Path) -> None:
    def fails(rank: int, num_ranks: int) -> str:
        save(tmp_path, 1, shards_on(rank, 2, weights()), {})
        if rank == 1:
            from colonnade.checkpoint import files

            def refuse(self: object, data: bytes) -> int:
                raise OSError(28, "No space left on device")

            files._HashingStream.write = refuse  # type: ignore[method-assign]
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, 2, shards_on(rank, 2, weights()), {}, keep=3)
        torch.distributed.barrier()
        return str(caught.value)

    first, second = run_on_ranks(fails, 2)
    assert first == second
    assert first.startswith("The disk is full: ") and "step_00000001, the last whole checkpoint, stays" in first
    assert "checkpoint.keep = 1 (now 3)" in first
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    verify(tmp_path / "step_00000001")
