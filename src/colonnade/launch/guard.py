"""Tidies up after a supervisor that was killed: ends its ranks and removes its folders.

    supervisor ── ids of its ranks, a line each ──▶ guard        the pipe closes, however the supervisor ends

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

from colonnade.mesh.process import ProcessId, has_ended


def line_of(process: ProcessId) -> bytes:
    """One rank, as it is sent to the guard."""
    return json.dumps(asdict(process)).encode() + b"\n"


def tidy(processes: Iterable[ProcessId], *folders: str) -> None:
    """End the process groups of `processes` that are there, and remove `folders`."""
    for process in processes:
        if not has_ended(process):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sent = [ProcessId(**json.loads(line)) for line in sys.stdin if line.endswith("\n")]  # ends when the supervisor has
    tidy(sent, *sys.argv[1:])
