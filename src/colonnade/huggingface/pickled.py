"""State dicts that `torch.save` has written (pytorch_model.bin), read as data.

Of what a pickle can say only tensors in a dict are let through (`weights_only`), and no code runs. A file is read once
without its numbers; these stay where they are, and each tensor is read from its place when it is asked for.
"""

import pickle
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from colonnade.checkpoint.schema import clip
from colonnade.errors import CheckpointError

PICKLE_FAULTS = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    OSError,
    struct.error,
)
"""What torch and the makers that it lets through raise for a pickle that is not as it should be."""


@dataclass(frozen=True)
class Extent:
    """Where the numbers of a tensor lie in a file of `torch.save`."""

    path: Path
    start: int
    """[bytes] From the beginning of the file."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """In memory of their own. CheckpointError where the file ends before."""
        if not self._span:
            return torch.empty(self.shape, dtype=self.dtype)
        raw = bytearray(self._span * self.dtype.itemsize)
        with self.path.open("rb") as file:
            file.seek(self.start)
            if file.readinto(raw) < len(raw):
                raise CheckpointError(f"{self.path} is cut off: numbers of a tensor lie beyond its end.")
        whole = torch.frombuffer(raw, dtype=self.dtype).as_strided(self.shape, self.strides)
        return whole.clone(memory_format=torch.contiguous_format)

    @property
    def _span(self) -> int:
        """Elements from the first to the last."""
        steps = (stride * (length - 1) for length, stride in zip(self.shape, self.strides, strict=True))
        return 1 + sum(steps) if all(self.shape) else 0


def load_without_numbers(path: Path) -> Any:
    """What `torch.load` makes of a file, with tensors that have no memory; of each, `extent_of` tells where it lies.
    Raises PICKLE_FAULTS.
    """
    with FakeTensorMode():
        return torch.load(path, map_location="cpu", weights_only=True)


def extent_of(path: Path, x: Tensor) -> Extent | None:
    """Where a tensor of `load_without_numbers` lies; None where it is none that lies in the file as it is."""
    if x.layout != torch.strided or x.is_quantized:
        return None
    start = getattr(x.untyped_storage(), "_checkpoint_offset", None)  # torch puts it there under FakeTensorMode
    if not isinstance(start, int):
        return None
    found = Extent(path, start + int(x.storage_offset()) * x.dtype.itemsize, tuple(x.shape), tuple(x.stride()), x.dtype)
    ends = found.start + found._span * x.dtype.itemsize
    fits = min(x.stride(), default=0) >= 0 and x.nbytes <= (size := path.stat().st_size) and ends <= size
    return found if fits else None


def load_pickled(path: Path) -> dict[str, Extent]:
    """The tensors of a file. CheckpointError for anything but a dict of plain tensors."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is no plain file. Fetch the folder again.")
    try:
        found = load_without_numbers(path)
    except PICKLE_FAULTS as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as a state dict of tensors alone: {clip(why)} It is damaged, older than torch 1.6, "
            f"or holds something else, which is not run. Get the model as safetensors."
        ) from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise CheckpointError(
            f"{path} is no state dict: it holds a {type(found).__name__}. Get the model as safetensors."
        )
    places = {key: extent_of(path, x) if isinstance(x, Tensor) else None for key, x in found.items()}
    odd = [key for key, place in places.items() if place is None]
    if odd:
        raise CheckpointError(
            f"{path} has {clip(repr(odd[0]))}, which is no plain tensor that lies in the file. Get the model as "
            f"safetensors."
        )
    return {key: place for key, place in places.items() if place is not None}
