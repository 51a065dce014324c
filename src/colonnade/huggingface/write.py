"""Writing safetensors tensor by tensor: a header that says where everything will lie, and then the numbers.

    8 bytes: length of the header │ header (JSON, padded to 8 bytes) │ numbers of each tensor, one behind the other

The library writes whole files from memory only, so that a file of 5 GB would take 5 GB. What is written here it reads.
Source of the format: https://huggingface.co/docs/safetensors.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from colonnade.errors import CheckpointError
from colonnade.huggingface.files import CODES, WHOLE

ALIGNMENT = 8  # bytes
BLOCK = 1 << 24  # bytes that are converted and written at a time


class Planned(NamedTuple):
    """One tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class PlannedFile(NamedTuple):
    """One file, and the tensors that go into it, in their order."""

    name: str
    tensors: tuple[Planned, ...]


def plan_files(tensors: Sequence[Planned], most_bytes: int) -> list[PlannedFile]:
    """Tensors in their order, cut into files of at most so many bytes; a larger tensor has a file of its own."""
    groups: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    if len(groups) == 1:
        return [PlannedFile(WHOLE, tuple(groups[0]))]
    count = len(groups)
    return [
        PlannedFile(f"model-{number:05d}-of-{count:05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def index_of(files: Sequence[PlannedFile]) -> str | None:
    """The content of the index; None for a single file, which needs none."""
    if len(files) == 1:
        return None
    total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    where = {tensor.name: file.name for file in files for tensor in file.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"


def header_of(file: PlannedFile) -> bytes:
    """Everything in front of the numbers."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in file.tensors:
        end = start + tensor.num_bytes
        content[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@dataclass
class Writer:
    """Writes planned files into a folder, one tensor after the other."""

    folder: Path
    files: Sequence[PlannedFile]

    def write(self, numbers: Iterator[Tensor]) -> None:
        """Take the numbers of every planned tensor in their order, and return when all is on the disk."""
        for planned in self.files:
            with (self.folder / planned.name).open("xb") as file:
                file.write(header_of(planned))
                for tensor in planned.tensors:
                    x = next(numbers)
                    assert tuple(x.shape) == tensor.shape, f"{tensor.name}: {tuple(x.shape)}, not {tensor.shape}"
                    _write(file, x, tensor.dtype, tensor.name)
                    del x
                file.flush()
                os.fsync(file.fileno())


def narrowed(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`x`, numbers of a weight, in `dtype`. CheckpointError for one that is finite and would be infinite in it."""
    found, most = x.to(dtype), torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= most or not x.numel() or all(-most <= float(each) <= most for each in x.aminmax()):
        return found
    lost = x[found.isinf() & x.isfinite()]
    if len(lost):
        raise CheckpointError(
            f"{name} has the value {float(lost[0]):g}, and {str(dtype).removeprefix('torch.')} has room for at most "
            f"{most:g}: it would be infinite. Choose another --dtype, such as bf16."
        )
    return found


def _write(file: BinaryIO, x: Tensor, dtype: torch.dtype, name: str) -> None:
    """The numbers of a tensor in `dtype`, converted a block at a time."""
    flat, step = x.contiguous().view(-1), BLOCK // dtype.itemsize
    for start in range(0, flat.numel(), step):
        block = narrowed(flat[start : start + step], dtype, name)
        file.write(memoryview(block.view(torch.uint8).numpy().data))
