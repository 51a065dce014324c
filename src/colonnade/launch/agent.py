"""Torchrun's agent on this machine: the process that starts ranks again, and so outlives them; since when it is there,
and what ends with it.

    ranks ── start ──▶ guard of a folder     `python -m colonnade.launch.agent PROCESS FOLDER`, in a session of its own
    agent has ended ─▶ guard removes the folder

Whoever ends everything at once, guard included, leaves the folder until `sweep` at the next start on this machine, or
in a container that has the same memory.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from colonnade.launch import launch
from colonnade.mesh.process import ProcessId, has_ended, mine, process_id_of
from colonnade.proc import stat_of

PREFIX = "colonnade-memory-"
POLL = 0.5  # seconds between two looks at the agent
GUARD = "guard"  # the file that the guard of a folder holds locked
_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-(\d+)-(\d+)-(\d+)(?:-[^-]+)?")


def agent() -> ProcessId | None:
    """That of this rank; None where torchrun has not started it, or the system has no /proc to ask.

    Between it and the rank there may be others, a shell say: what the agent starts has the name of its run in its
    environment.
    """
    if launch.elastic_run() is None:
        return None
    pid = os.getppid()
    try:
        while b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(stat_of(pid)[1])
    except OSError:
        return None
    found = process_id_of(pid)
    return found if found.born else None


def began() -> float | None:
    """When the agent of this rank has started, in seconds since 1970; None where it has none that is known."""
    found = agent()
    if found is None:
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(found.born) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def folder_of(process: ProcessId, within: Path) -> Path:
    """The folder of a process of this machine and this user, which no other has; made where it is missing. OSError if
    it cannot be made, or somebody else has made it.
    """
    folder = within / name_of(process)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(1, "it belongs to somebody else", str(folder))
    return folder


def name_of(process: ProcessId) -> str:
    """Of its folder, or with more behind a hyphen of one of its folders, so that `sweep` knows whose it is."""
    return f"{PREFIX}{os.getuid()}-{process.pid}-{process.born}-{_namespace()}"


def sweep(within: Path) -> None:
    """Remove the folders of this user's processes that have ended."""
    for folder in within.glob(f"{PREFIX}{os.getuid()}-*"):
        found = _NAME.fullmatch(folder.name)
        if found is None:
            continue
        process, is_numbered_here = ProcessId(mine().host, int(found[2]), found[3]), found[4] == _namespace()
        if has_ended(process) if is_numbered_here else _guard_has_ended(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _guard_has_ended(folder: Path) -> bool:
    """Of a folder of another container, of whose processes nothing else is known: whether it had one, killed with all
    others there. The kernel gives back what it held locked.
    """
    try:
        with (folder / GUARD).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is there, or not yet
        return False
    return True


def guard(process: ProcessId, folder: Path) -> "subprocess.Popen[bytes]":
    """Start a process that removes a folder when another process has ended; one that finds it guarded ends at once."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "colonnade.launch.agent", json.dumps(asdict(process)), str(folder)]
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def _namespace() -> str:
    """The numbering of processes that this one is in: containers may share memory, and have numbers of their own."""
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _stay(process: ProcessId, folder: Path) -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # a batch system asks everybody, and the agent ends
        signal.signal(number, signal.SIG_IGN)
    with (folder / GUARD).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # it has a guard: that of an earlier start of the ranks
        while not has_ended(process):
            time.sleep(POLL)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _stay(ProcessId(**json.loads(sys.argv[1])), Path(sys.argv[2]))
