"""Files that are there as a whole or not at all: written under a name of the writer's own, renamed when on disk."""

from __future__ import annotations

import glob
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from colonnade.errors import names

PARTIAL = ".partial"
_PARTIAL = re.compile(r"\.\d+-[0-9a-f]{8}\.partial$")


def remove_partial(folder: Path) -> None:
    """Removes what killed writers have left anywhere in a folder. Call it where nobody writes."""
    for path in folder.rglob(f"*{PARTIAL}"):
        if _PARTIAL.search(path.name):
            path.unlink(missing_ok=True)


def remove_partial_of(path: Path) -> None:
    """Removes what killed writers of one file have left. Call it where nobody writes it."""
    for each in path.parent.glob(f"{glob.escape(path.name)}.*{PARTIAL}"):
        if _PARTIAL.fullmatch(each.name, len(path.name)):
            each.unlink(missing_ok=True)


@contextmanager
def written(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write, under a temporary name of this writer's own until it is whole and on disk. Nothing of it is left
    if that fails, and what the system refuses names this file. Of several writers of one file each writes all of it,
    and the last one's stays. `private`: nobody else may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        with names(path), partial.open("xb") as stream:
            if private:
                os.fchmod(stream.fileno(), 0o600)
            yield stream
            put_on_disk(stream)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is not None and Path(error.filename) == partial:
            error.filename = str(path)
        raise


def try_to_write(path: Path) -> None:
    """OSError where `written` could make no file; nothing is left."""
    partial = partial_path(path)
    partial.open("xb").close()
    partial.unlink()


def put_on_disk(stream: IO[Any]) -> None:
    """What was written to a stream, whatever happens to the machine then."""
    stream.flush()
    os.fsync(stream.fileno())


def partial_path(path: Path) -> Path:
    """A temporary name of this writer's own, until the file is whole."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")


def write_whole(path: Path, content: bytes, *, private: bool = False) -> None:
    """`written`, of what is there already."""
    with written(path, private=private) as stream:
        stream.write(content)


def write_new(path: Path, content: bytes) -> None:
    """`write_whole`, unless the file has this content already: a disk that is full, or read-only, still has it."""
    if not (path.is_file() and path.read_bytes() == content):
        write_whole(path, content)
