"""Which file each tensor is written into, and numbers for which its type has no room."""

import json
import math

import pytest
import torch

from colonnade.errors import CheckpointError
from colonnade.huggingface.write import Planned, PlannedFile, header_of, index_of, narrowed, plan_files


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


@pytest.mark.parametrize("value", [1e5, -1e5])
def test_a_number_that_would_be_infinite_is_refused_on_both_sides_of_zero(value: float) -> None:
    with pytest.raises(CheckpointError, match=rf"^up has the value {value:g}, and float16 has room for at most 65504"):
        narrowed(torch.tensor([1.0, value]), torch.float16, "up")
    largest = math.copysign(65504, value)
    assert narrowed(torch.tensor([1.0, largest]), torch.float16, "up").tolist() == [1.0, largest]
    assert narrowed(torch.tensor([value * float("inf")]), torch.float16, "up").isinf().all(), "it was infinite before"
