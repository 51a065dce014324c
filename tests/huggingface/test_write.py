"""Which file each tensor is written into."""

import pytest
import torch

from colonnade.huggingface.write import Planned, index_of, plan_files


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
