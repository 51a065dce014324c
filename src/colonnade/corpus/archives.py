"""Files within zip files, as input splits: their content is streamed, and none of it is written to the disk."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from colonnade.corpus import streams
from colonnade.corpus.streams import Damaged
from colonnade.errors import ZIP_FAULTS

ZIP = ".zip"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)  # those that need little memory


def members(path: Path) -> list[tuple[str, int]]:
    """(name, bytes of its content) of the files in a zip file, by name. Raises Damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            named = (info for info in archive.infolist() if info.filename)  # is_dir() fails without a name
            found = [(info.filename, info.file_size) for info in named if not info.is_dir()]
            return sorted(found, key=itemgetter(0))  # of a name, in their order: the last is the one that is read
    except ZIP_FAULTS as error:
        raise Damaged(f"damaged: {error}") from error


@contextmanager
def member(raw: IO[bytes], name: str, *, max_expansion: int) -> Iterator[IO[bytes]]:
    """A file of a zip file, to read from. Raises Damaged, as reading from it does, where it is not as it should be."""
    with ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(raw))
            info = archive.getinfo(name)
            if info.compress_type not in _METHODS:
                raise Damaged(f"compressed by method {info.compress_type}; stored, deflate and bzip2 are read")
            if info.file_size > streams.BOMB_BYTES and info.file_size > max_expansion * info.compress_size:
                raise Damaged(f"expands more than {max_expansion:,}-fold: a decompression bomb")
            stream = stack.enter_context(archive.open(info))
        except KeyError:
            raise Damaged(f"damaged: it has no {name!r} any more") from None
        except ZIP_FAULTS as error:  # no zip file, encrypted, or another file's header in its place
            raise Damaged(f"damaged: {error}") from error
        yield io.BufferedReader(_Checked(stream))


class _Checked(io.RawIOBase):
    """A member as a stream whose faults are `Damaged`. It never gives more bytes than the zip file's directory says."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(place, whence)

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except ZIP_FAULTS as error:
            raise Damaged(f"damaged: {error}") from error
        buffer[: len(data)] = data
        return len(data)
