"""What a GGUF file says of itself: metadata, and where its tensors lie.

    "GGUF" │ version │ numbers of tensors and of keys │ keys with values │ tensors: name, shape, type, offset │ numbers

The file may be a stranger's: every length is held against what is left of the file before anything is made of it.
Source of the format: ggml's docs/gguf.md.
"""

import math
import mmap
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from colonnade.checkpoint.schema import clip
from colonnade.errors import CheckpointError
from colonnade.mapped import mapped

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMS = 4
_ALIGNMENT = 32


class Format(NamedTuple):
    """How numbers are stored: blocks of so many elements in so many bytes."""

    name: str
    elements: int
    num_bytes: int


FORMATS = {
    0: Format("F32", 1, 4),
    1: Format("F16", 1, 2),
    2: Format("Q4_0", 32, 18),
    3: Format("Q4_1", 32, 20),
    6: Format("Q5_0", 32, 22),
    7: Format("Q5_1", 32, 24),
    8: Format("Q8_0", 32, 34),
    10: Format("Q2_K", 256, 84),
    11: Format("Q3_K", 256, 110),
    12: Format("Q4_K", 256, 144),
    13: Format("Q5_K", 256, 176),
    14: Format("Q6_K", 256, 210),
    28: Format("F64", 1, 8),
    30: Format("BF16", 1, 2),
}
"""By ggml's number. Others, like those with a table of codes, are not read."""


class Laid(NamedTuple):
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    code: int
    """ggml's number of its format."""
    start: int
    """[bytes] From the beginning of the file."""

    @property
    def num_bytes(self) -> int:
        numbers = FORMATS[self.code]
        return math.prod(self.shape) // numbers.elements * numbers.num_bytes


@dataclass(frozen=True)
class Header:
    """All of a file but its numbers."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Laid]


class _Damaged(Exception):
    """Why, in words."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that begins as one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> Header:
    """CheckpointError for a file that is cut off, lies about lengths, or is of a version that is not known; DataError
    where its file system maps none.
    """
    try:
        size = path.stat().st_size
        if not stat.S_ISREG(path.stat().st_mode) or size < 24:
            raise _Damaged("it is too short")
        with mapped(path, "Copy it to another.") as data:
            metadata, tensors = _parsed(_Bytes(data, size))
    except (_Damaged, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as GGUF: {error}. Fetch it again.") from None
    return Header(path, metadata, {each.name: each for each in tensors})


class _Bytes:
    """Reads values one behind the other, and none beyond the end."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data, self.size, self.at = data, size, 0

    def room(self, num_bytes: int) -> None:
        if num_bytes > self.size - self.at:
            raise _Damaged(f"it ends at byte {self.size:,}, before {num_bytes:,} bytes that begin at {self.at:,}")

    def bytes(self, length: int) -> bytes:
        self.room(length)
        self.at += length
        return self._data[self.at - length : self.at]

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        width = struct.calcsize(f"<{code}")
        self.room(count * width)
        return struct.unpack(f"<{count}{code}", self.bytes(count * width))

    def whole(self, code: str = "Q") -> int:
        (value,) = self.scalars(code)
        return int(value)

    def text(self) -> str:
        return self.bytes(self.whole()).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _Damaged(f"a value has type {kind}, which is not known")
        (value,) = self.scalars(_SCALARS[kind])
        return value

    def _array(self) -> list[Any]:
        kind, count = self.whole("I"), self.whole()
        if kind == _STRING:
            self.room(8 * count)
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise _Damaged(f"a list has values of type {kind}, which is not known")
        return list(self.scalars(_SCALARS[kind], count))


def _parsed(file: _Bytes) -> tuple[dict[str, Any], list[Laid]]:
    if file.bytes(len(MAGIC)) != MAGIC:
        raise _Damaged("it does not begin with GGUF")
    version = file.whole("I")
    if version not in _VERSIONS:
        raise _Damaged(f"it is of version {version}, and 2 and 3 are known (big-endian files are none of them)")
    num_tensors, num_keys = file.whole(), file.whole()
    file.room(12 * num_keys + 24 * num_tensors)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = file.text()
        if key in metadata:
            raise _Damaged(f"it has {clip(key)} twice")
        metadata[key] = file.value(file.whole("I"))
    found = [_tensor(file) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _Damaged(f"general.alignment = {clip(repr(alignment))} is no power of two")
    start = -(-file.at // alignment) * alignment
    tensors = [each._replace(start=start + each.start) for each in found]
    _check(tensors, file.size)
    return metadata, tensors


def _tensor(file: _Bytes) -> Laid:
    name, num_dims = file.text(), file.whole("I")
    if not 1 <= num_dims <= _MOST_DIMS:
        raise _Damaged(f"{clip(name)} has {num_dims} dims")
    shape = tuple(reversed(file.scalars("Q", num_dims)))
    return Laid(name, shape, file.whole("I"), file.whole())


def _check(tensors: list[Laid], size: int) -> None:
    """All are of a known format, and lie in the file."""
    if len({each.name for each in tensors}) < len(tensors):
        raise _Damaged("it has two tensors of one name")
    for each in tensors:
        if each.code not in FORMATS:
            known = ", ".join(numbers.name for numbers in FORMATS.values())
            raise _Damaged(f"{clip(each.name)} is stored in ggml's format {each.code}; known are {known}")
        if each.shape[-1] % FORMATS[each.code].elements:
            raise _Damaged(f"{clip(each.name)} has rows of {each.shape[-1]:,}, which are no whole blocks")
        if 0 in each.shape or each.start + each.num_bytes > size:
            raise _Damaged(
                f"it ends at byte {size:,}, and {clip(each.name)} lies up to {each.start + each.num_bytes:,}"
            )
