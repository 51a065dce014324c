"""A file system that is lost for a while, or stands still, and kills right beside a rename."""

import errno
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from colonnade.checkpoint import files
from colonnade.train import save_retries
from tests.drills.kills import left_by_a_save
from tests.drills.runs import TIME_LIMIT, TIMEOUT, Place, Variant, damaged_checkpoints, said
from tests.runs import events

LOST = (errno.ESTALE, errno.ENOTCONN)
CALLS = ("stat", "mkdir", "rename", "replace", "scandir", "listdir", "unlink", "open")


def lost_drill(place: Place, variant: Variant, *, seed: int) -> dict[str, Any]:
    """From some byte of some save on, nothing of the run's folder can be reached for a while: every call fails, or
    writing stands still. The run ends by itself.
    """
    draws, run = Random(f"lost {variant.name} {seed}"), place.fresh("lost")
    size, seconds = draws.randrange(2_000_000), draws.uniform(0.2, 2.0)
    number = draws.choice((*LOST, 0))
    answers = place.start(variant, run, _lost(run, size, number, seconds), TIMEOUT).answers(TIME_LIMIT)
    problems = damaged_checkpoints(run)
    if any(answer.status for answer in answers):
        problems.append(f"it does not end by itself: {said(answers)}")
    found = sum(event["event"] == "save failed" for event in events(run)) if run.exists() else 0
    what = errno.errorcode.get(number, "stands still")
    return {"what": what, "injected": 1, "failed saves": found, "problems": problems or place.same(variant, run)}


def _lost(run: Path, size: int, number: int, seconds: float) -> Callable[[int], None]:
    """In a rank: behind so many bytes of checkpoints its view of the run's folder is lost for so many seconds."""

    def first(rank: int) -> None:
        written, until = [0], [0.0]
        save_retries.FIRST = 0.05
        write = files._HashingStream.write

        def counting(stream: Any, data: Any) -> int:
            before, written[0] = written[0], written[0] + len(data)
            if before <= size < written[0]:
                until[0] = time.monotonic() + seconds
            fail()
            return write(stream, data)

        def fail() -> None:
            left = until[0] - time.monotonic()
            if left > 0 and not number:
                time.sleep(left)
            elif left > 0:
                raise OSError(number, os.strerror(number), str(run))

        def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
            def guard(path: Any = ".", *args: Any, **more: Any) -> Any:
                if isinstance(path, str | Path) and str(path).startswith(str(run)):
                    fail()
                return call(path, *args, **more)

            return guard

        files._HashingStream.write = counting  # type: ignore[method-assign]
        for name in CALLS:
            setattr(os, name, guarded(getattr(os, name)))
        io.open = guarded(io.open)  # type: ignore[misc]

    return first


def rename_drill(place: Place, variant: Variant, *, seed: int) -> dict[str, Any]:
    """The rank that publishes checkpoints is killed right before or right behind one of its renames."""
    draws, run = Random(f"rename {variant.name} {seed}"), place.fresh("renamed")
    at, behind = draws.randint(1, 3 * (place.steps - 2)), draws.random() < 0.5
    place.expected(variant)
    answers = place.start(variant, run, _killed_at(run, at, behind)).answers(TIME_LIMIT)
    killed = any(answer.status == -signal.SIGKILL for answer in answers)
    problems = damaged_checkpoints(run) + ([] if killed else ["nobody was killed"])
    inside = killed and bool(left_by_a_save(run))
    return {"kills": int(killed), "inside a save": int(inside), "problems": problems + place.finish(variant, run)}


def _killed_at(run: Path, at: int, behind: bool) -> Callable[[int], None]:
    def first(rank: int) -> None:
        left = [at]

        def killing(call: Callable[..., Any]) -> Callable[..., Any]:
            def rename(path: Any, *args: Any, **more: Any) -> Any:
                if str(path).startswith(str(run / "checkpoints")):
                    left[0] -= 1
                    if left[0] == 0 and not behind:
                        os.kill(os.getpid(), signal.SIGKILL)
                done = call(path, *args, **more)
                if left[0] == 0 and behind:
                    os.kill(os.getpid(), signal.SIGKILL)
                return done

            return rename

        os.rename, os.replace = killing(os.rename), killing(os.replace)

    return first
