"""Processes that end with the process that started them, however that ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
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


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
