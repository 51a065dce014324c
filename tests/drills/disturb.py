"""Disks that are full and signals that come: what is saved stays, and the run goes on to the same bits."""

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from colonnade.checkpoint import files
from colonnade.train import save_retries
from tests.drills.runs import TIME_LIMIT, Place, Variant, damaged_checkpoints, said
from tests.runs import events

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def disk_drill(place: Place, variant: Variant, *, seed: int) -> dict[str, Any]:
    """A run whose disk is full at some byte of some save: for a while, which it survives, or until it is made room."""
    draws, run = Random(f"disk {variant.name} {seed}"), place.fresh("full")
    limited = variant.num_ranks == 1 and draws.random() < 0.5
    size = draws.randrange(400_000)
    if not limited:
        return _passing_failure(place, variant, run, draws, size)
    answers = place.start(variant, run, _limit_file_sizes(size), "checkpoint.retry_for=0").answers(TIME_LIMIT)
    problems = damaged_checkpoints(run)
    failed = any(answer.status for answer in answers)
    if any("Traceback" in answer.err for answer in answers):
        problems.append(f"a traceback: {said(answers)}")
    return {"failed saves": int(failed), "problems": problems + place.finish(variant, run)}


def _passing_failure(place: Place, variant: Variant, run: Path, draws: Random, size: int) -> dict[str, Any]:
    """The disk is full, read-only or fails, for some writes; the run ends by itself."""
    number = draws.choice((errno.ENOSPC, errno.EROFS, errno.EIO))
    first = _fail_after(size * draws.randint(1, 10), number, draws.randint(1, 6))
    answers = place.start(variant, run, first).answers(TIME_LIMIT)
    problems = damaged_checkpoints(run)
    if any(answer.status for answer in answers):
        problems.append(f"it does not end by itself: {said(answers)}")
    failed = sum(event["event"] == "save failed" for event in events(run))
    return {"failed saves": failed, "injected": int(failed > 0), "problems": problems + place.same(variant, run)}


def _limit_file_sizes(limit: int) -> Callable[[int], None]:
    def first(rank: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    return first


def _fail_after(num_bytes: int, number: int, times: int) -> Callable[[int], None]:
    """In a rank: behind so many bytes of checkpoints, so many writes fail; then there is room again."""

    def first(rank: int) -> None:
        left, original, save_retries.FIRST = [num_bytes, times], files._HashingStream.write, 0.05

        def write(stream: Any, data: Any) -> int:
            left[0] -= len(data)
            if left[0] < 0 and left[1]:
                left[1] -= 1
                raise OSError(number, os.strerror(number))
            return original(stream, data)

        files._HashingStream.write = write  # type: ignore[method-assign]

    return first


def signal_drill(place: Place, variant: Variant, *, seed: int) -> dict[str, Any]:
    """A run that is asked to stop at some moment: it ends with the signal's status, and goes on from there."""
    draws, run = Random(f"signal {variant.name} {seed}"), place.fresh("asked")
    number = draws.choice(SIGNALS)
    ranks = place.start(variant, run, _default_handlers)
    _wait_for_checkpoint(run)
    time.sleep(draws.uniform(0, 0.3))
    ranks.signal(number)
    answers = ranks.answers(TIME_LIMIT)
    problems = damaged_checkpoints(run)
    allowed = {0, 128 + number} | ({-number} if number == signal.SIGHUP else set())
    if any(answer.status not in allowed for answer in answers):
        problems.append(f"{number.name} ends it with {[answer.status for answer in answers]}: {said(answers)}")
    stopped = all(answer.status == 128 + number for answer in answers)
    return {"signal": number.name, "stopped": int(stopped), "problems": problems + place.finish(variant, run)}


def stop_drill(place: Place, variant: Variant, *, seed: int) -> dict[str, Any]:
    """A rank that stands still for a while (SIGSTOP) and goes on: nobody notices."""
    draws, run = Random(f"stop {variant.name} {seed}"), place.fresh("stopped")
    ranks = place.start(variant, run)
    _wait_for_checkpoint(run)
    pid = draws.choice(ranks.pids)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(draws.uniform(0.05, 1.5))
    os.kill(pid, signal.SIGCONT)
    answers = ranks.answers(TIME_LIMIT)
    problems = [f"it fails: {said(answers)}"] if any(answer.status for answer in answers) else []
    return {"problems": problems + place.finish(variant, run)}


def _default_handlers(rank: int) -> None:
    """As a shell starts a program: what started the drills may ignore these."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _wait_for_checkpoint(run: Path) -> None:
    end = time.monotonic() + TIME_LIMIT
    while not list((run / "checkpoints").glob("step_*")):
        assert time.monotonic() < end, f"{run} has no checkpoint after {TIME_LIMIT} s"
        time.sleep(0.002)
