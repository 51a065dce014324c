"""How a run under torchrun has ended, for whoever would start it again: torchrun takes any status but 0 for a failure.

    run.folder/ended.json    {"run": torchrun's --rdzv-id, "status": 99, "why": "…", "time": 1789.0}

Written when rank 0 has the folder, with the status null, which says whose folder it is; then of ends that starting
again would not mend, or that are to be gone on with in another job; not of a configuration that cannot be read, or
whose files or GPUs are not there, nor of a folder that another run has, nor by a dry run, which each start tells.
Removed at a good end. The ranks of later starts find the file, and end alike, before they import torch.

Torchrun's count of restarts does not say which starts are later ones: a machine whose ranks still live when those of
another have ended starts them again without counting. An earlier job may have had the same name. So what counts is
whether the note is older than torchrun's agent here. A note of times to come is of a machine whose clock is ahead, and
does not tell.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from colonnade.atomic import write_whole
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError, DiskError, MemoryShortError
from colonnade.launch import agent, launch
from colonnade.launch.supervisor import UNFINISHED, USER_MISTAKE

FILE = "ended.json"


@contextmanager
def ending(config: Config, *, notes: bool = True) -> Iterator[None]:
    """Around a rank's work, that of rank 0 while it has the run's folder: SystemExit at once if the run has ended for
    good in an earlier start of this job. `notes`: whether such an end is noted.
    """
    run, is_first = launch.elastic_run(), launch.rank_and_size()[0] == 0
    if run is None:
        yield
        return
    note = _Note(Path(config.run.folder) / FILE, run, owns=is_first and notes)
    note.begin()
    try:
        yield
        if is_first:
            launch.tell_idle()
        note.remove()
    except ColonnadeError as error:
        if not isinstance(error, DiskError | MemoryShortError):
            note.end(USER_MISTAKE, str(error))
        raise
    except SystemExit as end:
        if end.code == UNFINISHED:
            note.end(UNFINISHED, "it was asked to leave")
        raise


class _Note:
    """The file, as a rank of one start of a job has it. A folder that cannot be written is told otherwise."""

    def __init__(self, path: Path, run: str, *, owns: bool) -> None:
        """`owns`: the folder is this rank's."""
        self._path, self._run, self._owns = path, run, owns
        self._began = agent.began()

    def begin(self) -> None:
        """SystemExit if the run has ended for good; else whose folder it is."""
        if (content := self._read()) is not None and isinstance(status := content.get("status"), int):
            raise SystemExit(status)
        if self._owns:
            self.remove()  # where the disk is full, nothing is written in its place
            self._write(None, "")

    def end(self, status: int, why: str) -> None:
        """By rank 0, or by another whose mistake is its own, if none is noted yet."""
        content = self._read()
        if self._owns or (content is not None and content.get("status") is None):
            self._write(status, why)

    def remove(self) -> None:
        if self._owns:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        """What is noted of this job."""
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None
        is_ours = isinstance(content, dict) and content.get("run") == self._run
        return content if is_ours and self._is_later(content.get("time")) else None

    def _is_later(self, when: object) -> bool:
        if self._began is None:
            return launch.attempt() > 0
        return isinstance(when, float) and self._began <= when <= time.time()

    def _write(self, status: int | None, why: str) -> None:
        content = {"run": self._run, "status": status, "why": why, "time": time.time()}
        with suppress(OSError):
            write_whole(self._path, json.dumps(content).encode() + b"\n")
