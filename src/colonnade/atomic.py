"""Files that are there as a whole or not at all: written under a name of the writer's own, renamed when on disk."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PARTIAL = ".partial"
_PARTIAL = re.compile(r"\.\d+-[0-9a-f]{8}\.partial$")


def remove_partial(folder: Path) -> None:
    """Removes what killed writers have left anywhere in a folder. Call it where nobody writes."""
    for path in folder.rglob(f"*{PARTIAL}"):
        if _PARTIAL.search(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, under a temporary name of this writer's own until it is whole and on disk. Nothing of it is left
    if that fails. Of several writers of one file each writes all of it, and the last one's stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    try:
        with partial.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def try_to_write(path: Path) -> None:
    """OSError where `written` could make no file; nothing is left."""
    partial = _partial(path)
    partial.open("xb").close()
    partial.unlink()


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")


def write_whole(path: Path, content: bytes) -> None:
    """`written`, of what is there already."""
    with written(path) as stream:
        stream.write(content)
