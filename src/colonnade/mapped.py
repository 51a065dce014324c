"""A file in memory, of which the system reads what is looked at."""

import errno
import mmap
from pathlib import Path

from colonnade.errors import DataError


def mapped(path: Path, otherwise: str) -> mmap.mmap:
    """A whole file, to be read. DataError where its file system maps none, whose ENODEV, other than a disk's, does not
    pass. `otherwise`: what to do then, a sentence.
    """
    with path.open("rb") as stream:
        try:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            raise DataError(
                f"{path} lies on a file system that maps no files into memory, as they are read here. {otherwise}"
            ) from error
