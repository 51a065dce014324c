"""Runs that go on side by side on this machine, each in a process of its own with a share of cores and GPUs.

items ──▶ free share ──▶ process(item, share) ──▶ ended(item, exit status, seconds) ──▶ the next item
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from colonnade.dependent import end_with_parent
from colonnade.errors import ColonnadeError, mistake
from colonnade.launch.process import ASK_TO_END, outlive_readers, print_what_it_lacks
from colonnade.launch.supervisor import UNFINISHED

UNEXPECTED = 1  # Python's exit status of an error, and of SIGINT while it imports
T = TypeVar("T")


class Share(NamedTuple):
    """One of equal parts of this machine."""

    number: int
    """From 0 on."""
    of: int


Run = Callable[[Path, Share], int]
"""Of a configuration file and the share that its run may use: the exit status."""


@dataclass
class _Running(Generic[T]):
    item: T
    process: BaseProcess
    began: float
    told: int = 0
    """Signals that were handed on to it."""

    def tell(self, asked: Sequence[int]) -> None:
        """Hand on the signals that it has not got."""
        for number in asked[self.told :]:
            if self.process.pid is not None and self.process.exitcode is None:
                self.told += 1
                os.kill(self.process.pid, number)


def run_side_by_side(
    items: Iterable[T],
    shares: int,
    *,
    start: Callable[[T, Share], BaseProcess],
    ended: Callable[[T, int, float], object],
) -> int:
    """Start each item as soon as there is a free share; `ended` is told exit status and seconds of each.

    Returns 0, or the status of the first item that was interrupted or is to go on later: then no more is started, and
    what runs is waited for; so it is where `start` raises a ColonnadeError, which is raised then. SIGINT, SIGTERM and
    SIGHUP are handed on to all, also to one that is being started.
    Who ends with 1 then was interrupted before it was ready for signals.
    """
    waiting, running, free = list(items), dict[int, _Running[T]](), list(range(shares))
    status, refused = 0, list[ColonnadeError]()
    with _asked() as asked:
        while running or (waiting and not status and not asked):
            while waiting and free and not status and not asked:
                item, number = waiting.pop(0), free.pop(0)
                try:
                    running[number] = _Running(item, start(item, Share(number, shares)), time.perf_counter())
                except ColonnadeError as error:
                    refused.append(error)
                    waiting.clear()
            for each in running.values():
                each.tell(asked)
            wait([each.process.sentinel for each in running.values()], timeout=0.2)
            for number, each in list(running.items()):
                if each.process.exitcode is not None:
                    del running[number]
                    free.append(number)
                    found = _status(each.process.exitcode)
                    if each.told and found == UNEXPECTED:
                        found = 128 + asked[0]
                    ended(each.item, found, time.perf_counter() - each.began)
                    status = status or (found if is_interrupted(found) else 0)
    if refused and not status:
        raise refused[0]
    return status or (128 + asked[0] if asked and waiting else 0)


def is_interrupted(status: int) -> bool:
    """Whether a run with this exit status was asked to end, and is to go on later. One of which a rank was killed by
    another signal, as for want of memory, has failed.
    """
    return status in (UNFINISHED, *(128 + number for number in ASK_TO_END))


def process_of(run: Run, config: Path, share: Share, log: Path) -> BaseProcess:
    """A process that has begun with `run(config, share)`; what it prints goes to `log`. It ends with this one."""
    process = get_context("spawn").Process(target=_run, args=(run, config, share, log), name=config.stem)
    process.start()
    return process


def last_line(log: Path) -> str:
    """What a run has said last; nothing where it said nothing."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _run(run: Run, config: Path, share: Share, log: Path) -> None:
    end_with_parent()
    os.setpgid(0, 0)  # a terminal's ^C comes from the parent alone, once
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    print_what_it_lacks()
    outlive_readers()
    try:
        status = run(config, share)
    except Exception as error:
        message = mistake(error)
        if message is None:
            raise
        print(f"colonnade: {message}", file=sys.stderr, flush=True)
        status = 2
    sys.exit(status)


def _status(exitcode: int) -> int:
    return exitcode if exitcode >= 0 else 128 - exitcode


@contextmanager
def _asked() -> Iterator[list[int]]:
    """Within, signals that ask to end are kept; yields those that have come."""
    asked: list[int] = []
    before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in ASK_TO_END}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
