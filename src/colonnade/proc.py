"""What Linux tells of a process in /proc."""

from pathlib import Path


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on, proc(5)'s third: a name stands before them, which may have
    brackets and blanks in it, and bytes that are not UTF-8. OSError where there is no such process, or no /proc.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
