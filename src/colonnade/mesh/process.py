"""Whether another process of this machine still runs."""

import os
import signal
import socket
from dataclasses import dataclass

from colonnade.proc import numbering, stat_of


@dataclass(frozen=True)
class ProcessId:
    """One process: which, where, and since when (numbers of processes are used again)."""

    host: str
    pid: int
    born: str
    """The time of its start in the kernel's clock ticks; "" where the system has no /proc to ask."""


def mine() -> ProcessId:
    """This process."""
    return process_id_of(os.getpid())


def process_id_of(pid: int) -> ProcessId:
    """A process of this machine, by its number."""
    return ProcessId(_host(), pid, _state(pid)[1])


def is_here(process: ProcessId) -> bool:
    """Whether that process is one of this machine, or was."""
    return process.host == _host()


def has_ended(process: ProcessId) -> bool:
    """Whether that process is known to have ended. False for one of another machine, of which nothing is known."""
    if not process.born or not is_here(process):
        return False
    state, born = _state(process.pid)
    return born != process.born or state in ("Z", "X")


def kill(process: ProcessId) -> None:
    """End a process of this machine at once, whatever it does; one that has ended, or is elsewhere, is left alone."""
    if process.born and is_here(process) and _state(process.pid)[1] == process.born:
        os.kill(process.pid, signal.SIGKILL)


def _state(pid: int) -> tuple[str, str]:
    """(state, time of start) by Linux's /proc, ("", "") where there is no such process."""
    try:
        fields = stat_of(pid)
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _host() -> str:
    """This machine and, in a container, its own numbering of processes."""
    return f"{socket.gethostname()} {numbering()}".rstrip()
