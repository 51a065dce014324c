"""The bytes of a checkpoint: hashed while they are written, read in part.

A rank's file is a row of tensors as `torch.save` writes them, as in every checkpoint of `torch.distributed.checkpoint`:
each is a zip archive with its numbers uncompressed and in order in the entry `…/data/0`.

    | zip of a tensor: data.pkl … data/0 ████████████ … directory | zip of a tensor: … | …
                                         ▲ read from here, only the rows that are wanted

So a part of a tensor is read from where it lies straight into its place, and nothing is unpickled.
"""

import hashlib
import io
import math
import os
import struct
import zipfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem

from colonnade.checkpoint.manifest import SavedFile, StoredShard
from colonnade.checkpoint.plan import Box, narrow
from colonnade.errors import ZIP_FAULTS

BUFFER = 1 << 20  # bytes; larger writes go past it
BLOCK = 1 << 24  # bytes read at a time where they do not go straight to their place
MOST_AT_ONCE = 1 << 30  # bytes asked for in one read: macOS refuses more than 2 GiB
LOCAL_HEADER = 30  # bytes of a zip entry's header before its name (APPNOTE.TXT, 4.3.7)


class HashingFileSystem(FileSystem):
    """Files that are hashed while they are written. `files` has those that have been closed."""

    def __init__(self) -> None:
        self.files: dict[str, SavedFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", f"mode = {mode!r}: a checkpoint is written, and read elsewhere"
        with ThreadPoolExecutor(1) as hasher, Path(path).open("wb", buffering=BUFFER) as file:
            stream = _HashingStream(file, hasher)
            yield stream
            file.close()
            self.files[Path(path).name] = SavedFile(stream.size, stream.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _HashingStream(io.RawIOBase):
    """Hashes in another thread what it writes in this one: both leave Python for the time of a large block."""

    def __init__(self, file: BinaryIO, hasher: ThreadPoolExecutor) -> None:
        self.file, self.hasher, self.digest, self.size = file, hasher, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        size = len(data)
        if size < BUFFER:
            self.digest.update(data)
            self.file.write(data)
        else:
            hashed = self.hasher.submit(self.digest.update, data)
            try:
                self.file.write(data)
            finally:
                hashed.result()  # the block belongs to the caller, who may take it back after this
        self.size += size
        return size

    def tell(self) -> int:
        return self.size

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Left to the file's buffer: a tensor ends with many small writes and a flush."""

    def fileno(self) -> int:
        self.file.flush()
        return self.file.fileno()


def alone(x: Tensor) -> Tensor:
    """The same numbers in a storage that has no others, without a copy where they lie together in CPU memory.

    Of a view of something longer, `torch.distributed.checkpoint` makes a copy, and keeps all copies until its file is
    written. A tensor elsewhere is returned as it is: its way to the CPU is a copy.
    """
    if not x.is_cpu:
        return x
    numbers = x.detach().contiguous()
    return torch.frombuffer(numbers.view(-1).view(torch.uint8).numpy(), dtype=x.dtype).view(x.shape)


def read_box(file: BinaryIO, stored: StoredShard, dtype: torch.dtype, box: Box, target: Tensor) -> None:
    """Copy the box `box` of a stored shard (offsets within it) into `target`, which has the box's shape.

    Straight into memory where whole rows go to a contiguous CPU tensor of the same dtype, in blocks elsewhere. Raises
    BadZipFile or EOFError if there is no such tensor.
    """
    start = _numbers_start(file, stored, dtype)
    sizes = stored.box.sizes
    if not sizes:  # one number: a vector of one
        sizes, box, target = (1,), Box((0,), (1,)), target.reshape(1)
    row = math.prod(sizes[1:])  # elements
    start += box.offsets[0] * row * dtype.itemsize
    if box.sizes[1:] == sizes[1:] and target.is_contiguous() and target.dtype == dtype and target.is_cpu:
        _read_into(file, start, target)
        return
    step = max(1, BLOCK // (row * dtype.itemsize))
    for first in range(0, box.sizes[0], step):
        num_rows = min(step, box.sizes[0] - first)
        block = torch.empty((num_rows, *sizes[1:]), dtype=dtype)
        _read_into(file, start + first * row * dtype.itemsize, block)
        inside = Box((0, *box.offsets[1:]), (num_rows, *box.sizes[1:]))
        target.narrow(0, first, num_rows).copy_(narrow(block, inside))


def _read_into(file: BinaryIO, start: int, target: Tensor) -> None:
    """Fill the contiguous CPU tensor `target` with the bytes from `start` on."""
    view = memoryview(target.reshape(-1).view(torch.uint8).numpy().data)
    while view:
        count = os.preadv(file.fileno(), [view[:MOST_AT_ONCE]], start)
        if count == 0:
            raise EOFError("the file ends too early")
        view, start = view[count:], start + count


def _numbers_start(file: BinaryIO, stored: StoredShard, dtype: torch.dtype) -> int:
    """Where in the file the shard's numbers begin: `torch.save` keeps them in the archive's entry `…/data/0`."""
    entry = _numbers_entry(file, stored)
    num_bytes = stored.box.volume * dtype.itemsize
    if entry.compress_type != zipfile.ZIP_STORED or entry.header_offset < 0:
        raise zipfile.BadZipFile("no plain numbers where they should be")
    if entry.file_size != num_bytes:
        raise zipfile.BadZipFile(f"{entry.file_size} bytes, not those of {stored.box.sizes} in {dtype}")
    header = os.pread(file.fileno(), LOCAL_HEADER, stored.start + entry.header_offset)
    if len(header) < LOCAL_HEADER:
        raise EOFError("the file ends too early")
    name_length, extra_length = struct.unpack("<HH", header[-4:])
    start = entry.header_offset + LOCAL_HEADER + int(name_length) + int(extra_length)
    if start + num_bytes > stored.length:
        raise zipfile.BadZipFile("its numbers end behind it")
    return stored.start + start


def _numbers_entry(file: BinaryIO, stored: StoredShard) -> zipfile.ZipInfo:
    try:
        with zipfile.ZipFile(_Window(file, stored.start, stored.length)) as archive:
            entry = next((entry for entry in archive.infolist() if entry.filename.endswith("/data/0")), None)
    except ZIP_FAULTS as error:
        raise zipfile.BadZipFile(f"no archive where it should be: {error}") from None
    if entry is None:
        raise zipfile.BadZipFile("no plain numbers where they should be")
    return entry


class _Window(io.RawIOBase):
    """Part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self.file, self.start, self.length, self.position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        if origin + offset < 0:
            raise OSError("before the start")
        self.position = origin + offset
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.length - self.position)
        count = left if size is None or size < 0 else min(size, left)
        data = os.pread(self.file.fileno(), count, self.start + self.position)
        self.position += len(data)
        return data
