"""Lines of JSON at the end of files; null stands for a number that is NaN or infinite. Where a disk is full or a file
system fails for a while, they wait in memory.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from colonnade.errors import CheckpointError, ConfigError, DiskError, of_the_disk
from colonnade.outputs import json_of


class Lines:
    """Appends to files in the order of calls, from any thread: saves that run beside training tell their own end.
    `patient`: what cannot be written now waits for the next call.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.patient = patient
        self._waiting: deque[tuple[Path, Mapping[str, Any]]] = deque()
        self._said = False
        self._lock = threading.Lock()

    def write(self, path: Path, line: Mapping[str, Any]) -> str:
        """Append a line; ConfigError where that is impossible. What to tell the user, once, where it has to wait."""
        with self._lock:
            self._waiting.append((path, line))
            try:
                self._flush()
            except ConfigError as error:
                if not (self.patient and isinstance(error, DiskError)):
                    raise
                said, self._said = self._said, True
                return "" if said else f"{error} Until then its lines wait in memory, and the run goes on."
            self._said = False
            return ""

    def check(self) -> None:
        """CheckpointError while lines wait: what is saved must not outlive what is told of it."""
        try:
            with self._lock:
                self._flush()
        except ConfigError as error:
            raise CheckpointError(str(error)) from error

    @contextmanager
    def still(self) -> Iterator[None]:
        """No line waits and none is written meanwhile, by any thread: files may be replaced. ConfigError where that is
        impossible.
        """
        with self._lock:
            self._flush()
            yield

    def _flush(self) -> None:
        while self._waiting:
            append(*self._waiting[0])
            self._waiting.popleft()


def object_in(line: bytes | str) -> dict[str, Any] | None:
    """The JSON object of a line; None for a line that was cut off, or holds something else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def objects_in(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file's whole lines; none where there is no file."""
    return [found for line in each_line(path) if (found := object_in(line)) is not None]


def each_line(path: Path) -> Iterator[bytes]:
    """The lines of a file, none where there is none. They are read one by one: a run looks into its own at each save,
    and memory for all of them, at each size that they had, would stay with the process.
    """
    with suppress(FileNotFoundError, NotADirectoryError), path.open("rb") as file:
        yield from file


def step_in(line: Mapping[str, Any] | None) -> int:
    """The step that a line tells of; 0 where it tells of none, or of something else."""
    step = (line or {}).get("step")
    return step if type(step) is int and 0 < step < 2**53 else 0


def append(path: Path, line: Mapping[str, Any]) -> None:
    """`append_text` of an object; ConfigError where that is impossible."""
    try:
        append_text(path, json_of(line))
    except OSError as error:
        raise unwritable(path, error) from error


def append_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a text at the end of a file, on a line of its own: the one before may have been cut off. Of one that could
    be written in part, nothing stays, if nobody else has written meanwhile. `sync`: return when it is on the disk.
    """
    size, content = None, b""
    try:
        with path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            torn = file.read(1) not in (b"", b"\n")
            content = b"\n" * torn + text.encode() + b"\n"
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        if size is not None:
            cut(path, size, content)
        raise


def cut(path: Path, size: int, content: bytes) -> None:
    """Take away what is behind so many bytes, if the disk lets it, and if it is of `content` alone."""
    try:
        with path.open("r+b") as file:
            file.seek(size)
            if content.startswith(file.read()):
                file.truncate(size)
    except OSError:
        return  # whoever reads the file passes over a torn line


def unwritable(path: Path, error: OSError) -> ConfigError:
    is_gone = isinstance(error, FileNotFoundError)  # the folder: the file itself would be made
    remedy = (
        "Put the folder back, or set run.folder to where it is now,"
        if is_gone
        else "Fix that (free some space, or change its permissions),"
    )
    return of_the_disk(
        f"{path} cannot be written: {error.strerror}. {remedy} and run the same command again: it goes on from the "
        "last checkpoint.",
        error,
    )
