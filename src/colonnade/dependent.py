"""Processes that end with the process that started them, however that ends, and leave Ctrl-C to it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Called in a process that `multiprocessing` has started: kills it when the process that started it has ended.

    The parent's end is seen in a pipe that closes with it, on every system and also behind a fork server. On Linux the
    kernel kills it as well, at once, even while it is in a library that holds Python's lock.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a child has a parent"
    threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True, name="parent's end").start()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that `multiprocessing` starts meanwhile never hear Ctrl-C, which a terminal sends to all of a command:
    interrupted while they still import, each would show a traceback. This process hears it afterwards, when it knows of
    every process that it has started, and can end them.
    """
    resource_tracker.ensure_running()  # the first start of a process would start it, and let SIGINT through again
    heard: list[int] = []
    hears = threading.current_thread() is threading.main_thread()  # Python interrupts no other
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number)) if hears else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited; of this process, one thread's alone
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if hears:
            signal.signal(signal.SIGINT, handler)
    if heard:
        signal.raise_signal(signal.SIGINT)


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
