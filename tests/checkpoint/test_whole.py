"""A tensor read whole by one process, of a checkpoint that several ranks have written."""

from pathlib import Path

import pytest
import torch

from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.save import save
from colonnade.checkpoint.whole import read_whole
from colonnade.errors import CheckpointError
from tests.checkpoint.grids import MODEL, model_shards, number
from tests.distributed import run_on_ranks

TYPES = [torch.float32, torch.bfloat16, torch.int64]


def write(rank: int, num_ranks: int, folder: Path, dtype: torch.dtype) -> None:
    logical = {name: number(shape, dtype) for name, shape in MODEL.items()}
    save(folder, 100, model_shards(logical, rank, num_ranks), {"samples": 12})


@pytest.mark.parametrize("dtype", TYPES)
def test_what_ranks_wrote_in_shards_is_whole(tmp_path: Path, dtype: torch.dtype) -> None:
    run_on_ranks(write, 2, tmp_path, dtype)
    (path,) = tmp_path.glob("step_*")
    contents = read_manifest(path)
    assert any(len(saved.shards) > 1 for saved in contents.tensors.values()), "else nothing is put together"
    for name, shape in MODEL.items():
        found = read_whole(path, contents, name)
        assert found.dtype is dtype and torch.equal(found, number(shape, dtype)), name


def test_a_file_that_is_cut_off_is_told_with_the_tensor(tmp_path: Path) -> None:
    run_on_ranks(write, 2, tmp_path, torch.float32)
    (path,) = tmp_path.glob("step_*")
    contents = read_manifest(path)
    name, saved = next((name, saved) for name, saved in contents.tensors.items() if len(saved.shards) > 1)
    file = path / saved.shards[-1].file
    file.write_bytes(file.read_bytes()[: saved.shards[-1].start + 1])
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged: {name} cannot be read from it"):
        read_whole(path, contents, name)
