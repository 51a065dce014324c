"""A rank that is slow, and clocks that somebody sets: the run goes on to the same bits, and what is wrong is named."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from colonnade.train.slow_ranks import FIRST_STEPS
from tests.drills.faults import ranks_of, send, supervised
from tests.drills.runs import TIME_LIMIT, Place, Variant, said
from tests.runs import events, metrics

WINDOW, SLOWER = 3, 3.0
SLEEP = 2.0  # seconds: many times what any rank of a tiny run has to do in a step, also on a busy machine

JUMPING = """
import time
_time, _monotonic = time.time, time.monotonic
def _jumping(draw={draw}):
    moment = int(_monotonic() * 7) + draw
    return _time() + (0, 3600.0, -86400.0, 1e8, -1e8)[moment * 2654435761 % 4294967296 % 5]
time.time = _jumping
"""
"""What Python runs before a program: the system's time then jumps by hours or years, seven times a second."""


def slow_drill(place: Place, variant: Variant, *, seed: int) -> dict[str, Any]:
    """A rank that sleeps in each step of a window: it is named, and nobody else is slow in that window."""
    draws, run = Random(f"slow {variant.name} {seed}"), place.fresh("slow")
    rank = draws.randrange(variant.num_ranks)
    keys = (f"run.slow_ranks_every={WINDOW}", f"run.slow_ranks_factor={SLOWER}")
    place.expected(variant)
    answers = place.start(variant, run, _sleeping(rank), *keys).answers(TIME_LIMIT)
    problems = [f"it fails: {said(answers)}"] if any(answer.status for answer in answers) else []
    named = [event["rank"] for event in events(run) if event["event"] == "slow rank"] if run.exists() else []
    problems += [] if named[:1] == [rank] else [f"rank {rank} is slow, and named is {named}"]
    return {"injected": 1, "detected": int(rank in named), "problems": problems or place.same(variant, run)}


def _sleeping(slow: int) -> Callable[[int], None]:
    def first(rank: int) -> None:
        from colonnade.train import loop

        train_step = loop.train_step

        def later(state: Any, *args: Any, **more: Any) -> Any:
            counted = FIRST_STEPS <= state.step < FIRST_STEPS + WINDOW
            time.sleep(SLEEP if rank == slow and counted else 0.0)
            return train_step(state, *args, **more)

        loop.__dict__["train_step"] = later

    return first


def clock_drill(place: Place, variant: Variant, *, seed: int) -> dict[str, Any]:
    """The system's clock jumps in the supervisor and in all ranks, one of which is killed: that alone is a fault."""
    draws, run = Random(f"clock {variant.name} {seed}"), place.fresh("jumps")
    hook = run.parent / "hook"
    hook.mkdir(parents=True)
    (hook / "sitecustomize.py").write_text(JUMPING.format(draw=draws.randrange(1000)))
    process = supervised(place, variant, run, "run.heartbeat=0.01", path=hook)
    killed = _kill_one(process, run, draws)
    try:
        status = process.wait(TIME_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        return {"injected": killed, "problems": ["it hangs"]}
    told = events(run) if (run / "events.jsonl").exists() else []
    faults = [event["cause"] for event in told if event["event"] == "fault"]
    problems = [] if status == 0 else [f"status {status}: …{(run.parent / 'said').read_text()[-400:]}"]
    problems += [] if len(faults) == killed else [f"{killed} ranks were killed, and faults are {faults}"]
    times = [event["time"] for event in told]
    problems += [] if times != sorted(times) else ["the clock did not jump"]
    return {"injected": killed, "detected": len(faults), "problems": problems or place.same(variant, run)}


def _kill_one(process: "subprocess.Popen[str]", run: Path, draws: Random) -> int:
    """Kill a rank behind the first steps; 1 if one was there."""
    end = time.monotonic() + TIME_LIMIT
    while process.poll() is None and time.monotonic() < end:
        ranks = ranks_of(process)
        if ranks and (run / "metrics.jsonl").exists() and metrics(run):
            send(draws.choice(ranks), signal.SIGKILL)
            return 1
        time.sleep(0.02)
    return 0
