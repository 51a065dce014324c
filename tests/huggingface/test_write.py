"""Which file each tensor is written into, and numbers for which its type has no room."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from colonnade.errors import CheckpointError
from colonnade.huggingface import write
from colonnade.huggingface.write import Planned, PlannedFile, Writer, header_of, index_of, narrowed, plan_files


@pytest.mark.parametrize(
    ("sizes", "files"),
    [
        ([9], [[9]]),
        ([9, 1, 2], [[9], [1, 2]]),
        ([1, 2, 9, 3], [[1, 2], [9], [3]]),
        ([2, 2, 1, 3], [[2, 2], [1, 3]]),
    ],
)
def test_a_tensor_larger_than_a_file_may_be_has_one_of_its_own(sizes: list[int], files: list[list[int]]) -> None:
    """Of at most 4 bytes here; no file is empty, and the index names all of them."""
    tensors = [Planned(f"x{number}", (size,), torch.int8) for number, size in enumerate(sizes)]
    found = plan_files(tensors, 4)
    assert [[each.num_bytes for each in file.tensors] for file in found] == files
    assert [each for file in found for each in file.tensors] == tensors
    index = index_of(found)
    assert index is None if len(files) == 1 else all(file.name in str(index) for file in found)
    assert index is None or json.loads(index)["metadata"] == {"total_size": sum(sizes)}


@pytest.mark.parametrize("letters", range(8))
def test_numbers_begin_at_a_multiple_of_eight_bytes(letters: int) -> None:
    """As the library that reads them has it, whatever the names before them take."""
    header = header_of(PlannedFile("model.safetensors", (Planned("x" * (1 + letters), (3,), torch.float32),)))
    assert len(header) % 8 == 0 and int.from_bytes(header[:8], "little") == len(header) - 8


@pytest.mark.parametrize("value", [2.0**17, -(2.0**17)])
def test_a_number_that_would_be_infinite_is_refused_on_both_sides_of_zero(value: float) -> None:
    """Of bf16 too, which has as many bits and goes further."""
    told = rf"^up has the value {value:g}, and float16 has room for at most 65504"
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(CheckpointError, match=told):
            narrowed(torch.tensor([1.0, value], dtype=dtype), torch.float16, "up")
    largest = math.copysign(65504, value)
    assert narrowed(torch.tensor([1.0, largest]), torch.float16, "up").tolist() == [1.0, largest]
    assert narrowed(torch.tensor([value * float("inf")]), torch.float16, "up").isinf().all(), "it was infinite before"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_written_in_blocks_is_what_their_library_reads(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies beside each other in memory; and all of it is on the disk when that is told."""
    synced: list[int] = []
    monkeypatch.setattr(write, "BLOCK", 24)
    monkeypatch.setattr(write.os, "fsync", synced.append)
    numbers = {"z": torch.arange(35.0).view(5, 7), "a": torch.arange(24.0).view(4, 6).t(), "none": torch.ones(0, 3)}
    numbers |= {"one": torch.tensor(3.5), "last": torch.arange(13.0)}
    files = plan_files([Planned(name, tuple(x.shape), dtype) for name, x in numbers.items()], 60 * dtype.itemsize)
    Writer(tmp_path, files).write(iter(numbers.values()))
    found, where = dict[str, torch.Tensor](), dict[str, str]()
    for path in sorted(tmp_path.iterdir()):
        with safe_open(str(path), framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            where |= dict.fromkeys(file.keys(), path.name)
    assert all(torch.equal(found[name], x.to(dtype)) for name, x in numbers.items()) and found.keys() == numbers.keys()
    assert list(where.values()) == ["model-00001-of-00002.safetensors"] * 4 + ["model-00002-of-00002.safetensors"]
    assert json.loads(str(index_of(files)))["weight_map"] == where and len(synced) == 2
