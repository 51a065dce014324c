"""Opening the files of a checkpoint that may come from a stranger: plain files in its own folder, and nothing else.

A name in a folder can be a link to somewhere else, a FIFO that blocks whoever opens it, a device that acts on being
opened, a socket, or another folder. All of them are refused, without waiting for anything.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from colonnade.errors import CheckpointError, GoneError

KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def plain_size(path: Path) -> int:
    """The size in bytes of the plain file `path`. CheckpointError if it is another kind, GoneError if its folder is
    not there any more; OSError if the file alone is missing.
    """
    with _in_its_folder(path):
        found = path.lstat()
    _check_plain(path, found.st_mode)
    return found.st_size


def open_plain(path: Path) -> BinaryIO:
    """The plain file `path`, opened for reading without a buffer. Raises as `plain_size`, and never blocks."""
    plain_size(path)  # before opening: a device may act on being opened
    with _in_its_folder(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_plain(path, os.fstat(descriptor).st_mode)  # of what has been opened: names can be given anew meanwhile
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path, limit: int) -> bytes:
    """The content of the plain file `path` of at most `limit` bytes. Raises as `open_plain`, and if it is longer."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(
                f"{path} has {size:,} bytes, and no checkpoint of Colonnade has one of more than {limit:,}: it is not "
                f"read. Get the checkpoint again from where it came from."
            )
        return file.read() if size else b""


@contextmanager
def _in_its_folder(path: Path) -> Iterator[None]:
    """A checkpoint that its run deletes loses its name at once (`folders.take_away`), and no file of it alone."""
    try:
        yield
    except FileNotFoundError:
        if path.parent.exists() and not os.path.lexists(path):  # there now: another has just taken its place
            raise
        raise GoneError(
            f"{path.parent} does not exist, or not any more: a run that goes on deletes all but its checkpoint.keep "
            "newest checkpoints. Run the command again to read the newest, or name one that stays: one that "
            "checkpoint.keep_every keeps, or a copy."
        ) from None


def _check_plain(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((kind for is_kind, kind in KINDS if is_kind(mode)), "no plain file")
    raise CheckpointError(
        f"{path} is {kind}, and a checkpoint is read from plain files in its own folder only. Copy the checkpoint with "
        f"what its links point to (cp -rL), or get it again from where it came from."
    )
