"""How far a stage is, for a bar in another process or on another machine: each task says so in a small file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

_EVERY_SECONDS = 0.5


class Done(NamedTuple):
    """What tasks have done so far."""

    documents: int
    bytes: int


class Progress:
    """One task's word on how far it is."""

    def __init__(self, folder: Path, stage: str, task: int) -> None:
        self._path = progress_folder(folder, stage) / f"{task:05d}"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._documents = self._bytes = self._before = 0
        self._last = time.monotonic()

    def advance(self, read_bytes: int = 0) -> None:
        """One document more; `read_bytes` of the present file are read."""
        self._documents, self._bytes = self._documents + 1, self._before + read_bytes
        if self._documents % 16 == 0 and time.monotonic() - self._last > _EVERY_SECONDS:
            self._write()

    def add_bytes(self, num_bytes: int) -> None:
        """A file is read to its end."""
        self._before += num_bytes
        self._bytes = self._before

    def close(self) -> None:
        """The task is done."""
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps([self._documents, self._bytes]))
        self._last = time.monotonic()


def progress_folder(folder: Path, stage: str) -> Path:
    """Where the tasks of a stage say how far they are."""
    return folder / "state" / "progress" / stage


def so_far(folder: Path, stage: str) -> Done:
    """What all tasks of a stage have done."""
    documents = num_bytes = 0
    for path in progress_folder(folder, stage).glob("*"):
        try:
            done = json.loads(path.read_text())
        except (OSError, ValueError):  # it is just being written
            continue
        documents, num_bytes = documents + done[0], num_bytes + done[1]
    return Done(documents, num_bytes)
