"""How a run under torchrun has ended, for whoever would start it again: torchrun takes any status but 0 for a failure.

    run.folder/ended.json    {"run": torchrun's --rdzv-id, "status": 99, "why": "…"}

Written only of ends that starting again would not mend, or that are to be gone on with in another job; not of a
configuration that cannot be read, or whose files or GPUs are not there, which each attempt tells. The ranks of
torchrun's next attempt find the file, and end alike, before they import torch. Rank 0 of a first attempt removes that
of an earlier job, which may have had the same name.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from colonnade.atomic import write_whole
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError, DiskError, MemoryShortError
from colonnade.launch import launch
from colonnade.launch.supervisor import UNFINISHED, USER_MISTAKE

FILE = "ended.json"


@contextmanager
def ending(config: Config) -> Iterator[None]:
    """Around a rank's work: SystemExit at once if the run has ended for good in an earlier attempt of torchrun's."""
    run, path = launch.elastic_run(), Path(config.run.folder) / FILE
    if run is None:
        yield
        return
    if launch.attempt() and (status := _ended(path, run)) is not None:
        raise SystemExit(status)
    if not launch.attempt() and launch.rank_and_size()[0] == 0:
        with suppress(OSError):  # a folder that cannot be written is told otherwise
            path.unlink(missing_ok=True)
    try:
        yield
        if launch.rank_and_size()[0] == 0:
            launch.tell_idle()
    except ColonnadeError as error:
        if not isinstance(error, DiskError | MemoryShortError):
            _note(path, run, USER_MISTAKE, str(error))
        raise
    except SystemExit as end:
        if end.code == UNFINISHED:
            _note(path, run, UNFINISHED, "it was asked to leave")
        raise


def _ended(path: Path, run: str) -> int | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    status = content.get("status") if isinstance(content, dict) and content.get("run") == run else None
    return status if isinstance(status, int) else None


def _note(path: Path, run: str, status: int, why: str) -> None:
    """By rank 0, or by any where the mistake is its own; a folder that cannot be written is told otherwise."""
    if path.parent.is_dir() and (launch.rank_and_size()[0] == 0 or not path.exists()):
        with suppress(OSError):
            write_whole(path, json.dumps({"run": run, "status": status, "why": why}).encode() + b"\n")
