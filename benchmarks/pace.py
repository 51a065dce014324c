"""How fast the cores are right now.

The cores of a virtual machine are its host's, which runs other programs on them and does not say so: at times they have
half of their speed or less, and no load average shows it.
"""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

SECONDS = 0.2
"""Of each look."""


def pace(seconds: float = SECONDS) -> float:
    """[loops/s] Of the slowest core, while all of them work at once."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for core in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=_count, args=(core, seconds, sender)))
        pipes.append(receiver)
    for process in processes:
        process.start()
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return float(min(found))


def _count(core: int, seconds: float, sender: Connection) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    started, loops = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        loops += 1
    sender.send(loops / seconds)
