"""What the system leaves this process of its machine: containers and batch systems put limits on groups of processes
(cgroups(7), both versions; limits of the groups around a group hold in it too).
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from colonnade.proc import lines_in


def num_cores() -> int:
    """CPU cores that this process may use: those that it may run on, or as many as have the time that it is given."""
    quota = core_quota()
    return num_cores_to_run_on() if quota is None else max(1, math.ceil(quota))


def num_cores_to_run_on() -> int:
    """CPU cores on which the system may put this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_quota() -> float | None:
    """[cores] As many as have the time that this process is given with all others of its groups; None where that is
    all cores that it may run on.
    """
    found = []
    for folder in _groups("cpu"):
        version_1 = [*lines_in(folder / "cpu.cfs_quota_us"), *lines_in(folder / "cpu.cfs_period_us")]
        quota, _, period = " ".join(lines_in(folder / "cpu.max") or version_1).partition(" ")
        if quota.isdecimal():
            found.append(int(quota) / int(period))
    return min((quota for quota in found if quota < num_cores_to_run_on()), default=None)


def memory_limits() -> list[tuple[int, int]]:
    """[bytes] (free, in all) of each group with a limit that this process is in; where there is none, version 1 has a
    number larger than any memory.

    What files have in memory counts as used there and is taken back where memory is asked for.
    """
    found = []
    for folder in _groups("memory"):
        limit = lines_in(folder / "memory.max") or lines_in(folder / "memory.limit_in_bytes")
        used = lines_in(folder / "memory.current") or lines_in(folder / "memory.usage_in_bytes")
        if limit and used and limit[0].isdecimal():
            kept = max(int(used[0]) - _of_files(lines_in(folder / "memory.stat")), 0)
            found.append((max(int(limit[0]) - kept, 0), int(limit[0])))
    return found


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the groups that this process is in, from its own to the outermost that is shown here: those of
    version 2, and those in which version 1 has a controller. In a container not all need be there.
    """
    root = Path("/sys/fs/cgroup")
    for line in lines_in(Path("/proc/self/cgroup")):
        _, controllers, own = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        place = top / own.lstrip("/")
        for folder in (place, *place.parents):
            yield folder
            if folder == top:
                break


def _of_files(lines: list[str]) -> int:
    """[bytes] Of the page cache, by a group's memory.stat; what lies in a file system in memory is not of it."""
    table = dict(line.partition(" ")[::2] for line in lines)
    whole = "total_" if "total_inactive_file" in table else ""  # version 1 tells of a group without those in it as well
    return sum(int(table.get(f"{whole}{name}", 0)) for name in ("inactive_file", "active_file"))
