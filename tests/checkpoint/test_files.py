"""Parts of stored tensors, read from where they lie."""

import errno
import os
import random
import struct
import time
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.checkpoint import files
from colonnade.checkpoint.manifest import SavedFile, StoredShard
from colonnade.checkpoint.plan import Box, narrow

SIZES = (11, 6, 4)
WHOLE = Box((0, 0, 0), SIZES)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, StoredShard, torch.Tensor]:
    """A tensor behind other bytes, as in a rank's file."""
    numbers = torch.arange(11 * 6 * 4, dtype=torch.float32).view(SIZES)
    path = tmp_path / "__0_0.distcp"
    with path.open("wb") as file:
        file.write(b"x" * 1000)
        torch.save(numbers, file)
    return path, StoredShard(WHOLE, path.name, 1000, path.stat().st_size - 1000), numbers


@pytest.mark.parametrize("rows", [1, 2, 4, 100])
@pytest.mark.parametrize(
    "box", [WHOLE, Box((3, 0, 0), (7, 6, 4)), Box((0, 2, 0), (11, 3, 4)), Box((5, 1, 2), (6, 4, 1))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_a_box_is_read_block_by_block(
    stored: tuple[Path, StoredShard, torch.Tensor],
    rows: int,
    box: Box,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all columns or some, in the stored dtype or another, though it be as wide, in blocks of so many rows."""
    path, shard, numbers = stored
    monkeypatch.setattr(files, "BLOCK", rows * 6 * 4 * 4)
    read, largest = os.preadv, list[int]()

    def note(descriptor: int, buffers: list[memoryview], start: int) -> int:
        largest.append(len(buffers[0]))
        return read(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", note)
    target = torch.full(box.sizes, -1.0, dtype=dtype)
    with path.open("rb") as file:
        files.read_box(file, shard, torch.float32, box, target)
    assert torch.equal(target, narrow(numbers, box).to(dtype))
    straight = dtype == torch.float32 and box.sizes[1:] == SIZES[1:]
    assert straight or max(largest) <= files.BLOCK, "no more memory than for a block"


def test_no_more_is_read_at_once_than_every_system_takes(
    stored: tuple[Path, StoredShard, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than 2 GiB macOS reads nothing."""
    path, shard, numbers = stored
    read = os.preadv
    assert files.MOST_AT_ONCE < 1 << 31
    monkeypatch.setattr(files, "MOST_AT_ONCE", 100)

    def refuse_more(descriptor: int, buffers: list[memoryview], start: int) -> int:
        if len(buffers[0]) > 100:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", refuse_more)
    target = torch.full(SIZES, -1.0)
    with path.open("rb") as file:
        files.read_box(file, shard, torch.float32, WHOLE, target)
    assert torch.equal(target, numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_read_of_which_the_system_does_a_part_goes_on_where_that_ended(
    stored: tuple[Path, StoredShard, torch.Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux does with more than 2 GiB: straight into its place, and by way of a block in another dtype."""
    path, shard, numbers = stored
    read, counts = os.preadv, list[int]()

    def partly(descriptor: int, buffers: list[memoryview], start: int) -> int:
        counts.append(read(descriptor, [buffers[0][:100]], start))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", partly)
    target = torch.full(SIZES, -1.0, dtype=dtype)
    with path.open("rb") as file:
        files.read_box(file, shard, torch.float32, WHOLE, target)
    assert len(counts) == 11 and sum(counts) == 4 * numbers.numel()
    assert torch.equal(target, numbers.to(dtype))


def test_a_file_that_is_cut_off_while_it_is_read_is_told(
    stored: tuple[Path, StoredShard, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not been read is not taken for zeros."""
    path, shard, _ = stored
    read = os.preadv

    def cut_off(descriptor: int, buffers: list[memoryview], start: int) -> int:
        os.truncate(path, min(path.stat().st_size, start + 100))
        return read(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", cut_off)
    with path.open("rb") as file, pytest.raises(EOFError, match="the file ends too early"):
        files.read_box(file, shard, torch.float32, WHOLE, torch.empty(SIZES))


def test_an_archive_without_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "__0_0.distcp"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data/1", bytes(11 * 6 * 4 * 4))
    stored = StoredShard(WHOLE, path.name, 0, path.stat().st_size)
    with path.open("rb") as file, pytest.raises(zipfile.BadZipFile, match="no plain numbers where they should be"):
        files.read_box(file, stored, torch.float32, WHOLE, torch.empty(SIZES))


def test_a_tensor_alone_has_its_numbers_and_no_others() -> None:
    """Of a long one no more is written than what is wanted of it, whether or not gradients are computed for it."""
    long = torch.nn.Parameter(torch.arange(100.0))
    for part in (long[10:22].view(3, 4), long[:12].view(4, 3).t()):
        numbers = files.alone(part)
        assert torch.equal(numbers, part) and numbers.untyped_storage().nbytes() == 48 and not numbers.requires_grad


def test_a_tensor_that_is_not_in_cpu_memory_is_left_to_its_copy() -> None:
    x = torch.empty(2, 3, device="meta")
    assert files.alone(x[0]).device.type == "meta" and files.alone(x) is x


@pytest.mark.parametrize("fault", ["compressed", "before it"])
def test_numbers_that_are_not_plain_or_not_in_their_archive_are_refused(tmp_path: Path, fault: str) -> None:
    """No program writes such a file for us: bytes that are no numbers would be read as some."""
    numbers, path = os.urandom(11 * 6 * 4 * 4), tmp_path / "__0_0.distcp"
    with path.open("wb") as file:
        file.write(b"x" * 1000)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if fault == "compressed" else zipfile.ZIP_STORED) as made:
            made.writestr("archive/data/0", numbers)
            made.writestr("archive/version", "3\n")
    content = bytearray(path.read_bytes()[1000:])
    if fault == "before it":  # the end of the archive tells that its beginning is 5 bytes earlier than it is
        (offset,) = struct.unpack_from("<I", content, len(content) - 6)
        struct.pack_into("<I", content, len(content) - 6, offset + 5)
    path.write_bytes(b"x" * 1000 + content)
    stored = StoredShard(WHOLE, path.name, 1000, len(content))
    with path.open("rb") as file, pytest.raises(zipfile.BadZipFile, match=r"where (they|it) should be"):
        files.read_box(file, stored, torch.float32, WHOLE, torch.empty(SIZES))


@pytest.mark.parametrize("beyond", [0, 1])
def test_numbers_end_within_their_archive_though_the_file_goes_on(
    stored: tuple[Path, StoredShard, torch.Tensor], beyond: int
) -> None:
    """What follows is another tensor's. How much an entry has before its numbers is said by itself."""
    path, shard, numbers = stored
    content = bytearray(path.read_bytes() + b"x" * 2000)
    header = content.rindex(b"PK\x03\x04", 0, content.index(b"/data/0"))
    name, more = struct.unpack_from("<HH", content, header + 26)
    room = shard.start + shard.length - (header + files.LOCAL_HEADER + name + more + numbers.nbytes)
    struct.pack_into("<H", content, header + 28, more + room + beyond)
    path.write_bytes(content)
    with path.open("rb") as file:
        if not beyond:
            files.read_box(file, shard, torch.float32, WHOLE, torch.empty(SIZES))
            return
        with pytest.raises(zipfile.BadZipFile, match="its numbers end behind it"):
            files.read_box(file, shard, torch.float32, WHOLE, torch.empty(SIZES))


class Late(ThreadPoolExecutor):
    """What it is given begins a little later."""

    def submit(self, function: Any, /, *given: Any, **more: Any) -> Future[Any]:
        return super().submit(lambda: (time.sleep(0.1), function(*given, **more)))


def test_large_blocks_are_hashed_beside_the_file_before_the_caller_has_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DCP writes a tensor: its numbers in one piece between small pieces of an archive."""
    monkeypatch.setattr(files, "ThreadPoolExecutor", Late)
    disk, path = files.HashingFileSystem(), tmp_path / "data.tmp"
    large = bytearray(random.Random(0).randbytes(2 * files.BUFFER))
    written = [b"head", bytes(large), b"tail"]
    with disk.create_stream(path, "wb") as stream:
        for piece in (written[0], large, written[2]):
            assert stream.write(piece) == len(piece)
            if piece is large:
                large[:] = bytes(len(large))
        assert stream.tell() == sum(map(len, written)) == os.fstat(stream.fileno()).st_size, "as it will be synced"
    disk.rename(path, tmp_path / "data")
    whole = b"".join(written)
    assert (tmp_path / "data").read_bytes() == whole
    assert disk.files == {"data": SavedFile(len(whole), sha256(whole).hexdigest())}
