"""Processes that leave Ctrl-C to the one that has started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess

import pytest

from colonnade.dependent import deaf_to_ctrl_c


def test_ctrl_c_comes_when_all_processes_are_known() -> None:
    """However often, and as before afterwards; where a script has this process ignore it, it stays ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started: list[BaseProcess] = []
    try:
        with pytest.raises(KeyboardInterrupt), deaf_to_ctrl_c():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                started.append(multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,)))
                started[-1].start()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with deaf_to_ctrl_c():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
        for process in started:
            process.terminate()
            process.join()
    assert [process.exitcode for process in started] == [-signal.SIGTERM] * 2


def test_where_a_start_fails_this_process_hears_ctrl_c_as_before() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(OSError, match="no more processes"), deaf_to_ctrl_c():
            raise OSError("no more processes")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def test_processes_of_another_thread_are_deaf_too_and_this_one_is_left_as_it_was() -> None:
    """Only the main thread may say what a signal does."""
    before, seen = signal.getsignal(signal.SIGINT), []

    def start() -> None:
        with deaf_to_ctrl_c():
            seen.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        seen.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert seen == [True, False] and signal.getsignal(signal.SIGINT) is before


LEAVE_A_CHILD = """
import multiprocessing, os, signal, sys, threading, time
from colonnade.dependent import end_with_parent
def work(ready):
    ALONE
    end_with_parent()
    ready.send("at work")
    time.sleep(600)
context = multiprocessing.get_context("fork")
here, there = context.Pipe()
context.Process(target=work, args=(there,)).start()
here.recv()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "alone",
    [
        "sys.platform = 'another'",
        pytest.param(
            "threading.Thread.start = lambda thread: None",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone ends processes so"),
        ),
    ],
    ids=["by itself", "by the kernel"],
)
def test_a_process_ends_with_the_one_that_has_started_it_however_that_ends(alone: str) -> None:
    """By the parent's end of a pipe, and by the kernel: each is enough. What it writes to stays open until then."""
    command = [sys.executable, "-c", LEAVE_A_CHILD.replace("ALONE", alone)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.communicate(timeout=60) == (b"", None) and process.returncode == -signal.SIGKILL
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
