"""Disks that are full behind so many bytes of a file, or give the first half of it: what programs see is the same."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process grows above that: writing is refused, as by a full disk, with "File too large"."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class FailingDisk:
    """Gives the first half of a file, and then an error."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._good = raw, os.fstat(raw.fileno()).st_size // 2

    def seek(self, place: int) -> int:
        return self._raw.seek(place)

    def read(self, size: int) -> bytes:
        if self._raw.tell() > self._good:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._raw.read(size)
