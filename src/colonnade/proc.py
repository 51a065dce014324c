"""What Linux tells in /proc, and in files like those."""

import os
from pathlib import Path


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on, proc(5)'s third: a name stands before them, which may have
    brackets and blanks in it, and bytes that are not UTF-8. OSError where there is no such process, or no /proc.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()


def numbering() -> str:
    """Which numbering of processes this one is in: a container may have its own under its host's name. Empty where the
    system does not say.
    """
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def lines_in(path: Path) -> list[str]:
    """The lines of such a file; none where it is not there, or not to be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
