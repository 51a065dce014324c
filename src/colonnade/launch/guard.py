"""Tidies up after a supervisor that was killed: ends its ranks and removes its folder.

    supervisor ── lives of its ranks, a line each ──▶ guard        the pipe closes, however the supervisor ends

A process of its own in a session of its own, without torch: what kills the supervisor and its group leaves it alone.
Where the supervisor has ended in order there is nothing left to do, and it does nothing.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict

from colonnade.mesh.life import Life, has_ended


def line_of(life: Life) -> bytes:
    """One rank, as the guard is told of it."""
    return json.dumps(asdict(life)).encode() + b"\n"


def tidy(lives: Iterable[Life], folder: str) -> None:
    """End the process groups of `lives` that are there, and remove `folder`."""
    for life in lives:
        if not has_ended(life):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(life.pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    told = [Life(**json.loads(line)) for line in sys.stdin if line.endswith("\n")]  # ends when the supervisor has
    tidy(told, sys.argv[1])
