"""Faults that a supervised run survives by itself: killed and stopped ranks, a damaged checkpoint, a flipped bit.

Nobody starts the run again: it ends by itself, in the bits of a run that was left alone. Rows count what was injected
and detected, the seconds from the fault to the next start's first event, and the steps that were made twice.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from colonnade.checkpoint.names import checkpoints_in
from colonnade.train.monitor import last_step
from tests import commands, tiny
from tests.commands import environment
from tests.drills.runs import TIME_LIMIT, TIMEOUT, Place, Variant, said
from tests.runs import events

KEYS = ("restarts.limit=20", "restarts.backoff=0.1", TIMEOUT, "checkpoint.keep=3")
SAME_LAYOUT = "restarts.fewer_ranks=false"  # a rank that is killed twice in a row is no lost place here: to the bit


def restart_drill(
    place: Place, variant: Variant, *, seed: int, faults: int = 3, more: Sequence[str] = (SAME_LAYOUT,)
) -> dict[str, Any]:
    """Ranks are killed at random moments, also while they start or save, or stopped, until `faults` have been. Stopped
    they are when they have come together: for that they may take ten minutes before somebody gives up.
    """
    draws, run = Random(f"restart {variant.name} {seed}"), place.fresh("survives")
    process = supervised(place, variant, run, *more)
    injected = damaged = 0
    while injected < faults and process.poll() is None:
        if not injected:
            _await(process, lambda: last_step(run / "metrics.jsonl") > 0 and bool(ranks_of(process)))
        time.sleep(draws.uniform(0, 3.0 if injected else 0.3))  # short at first: a fast machine has soon ended
        ranks = ranks_of(process)
        if not ranks:
            continue
        if draws.random() < 0.3:
            damaged += _damage_newest(run, draws)
        stops = draws.random() < 0.2 and _are_together(run)
        send(draws.choice(ranks), signal.SIGSTOP if stops else signal.SIGKILL)
        injected += 1
        time.sleep(1.0)
    return _row(place, variant, run, process, injected, damaged)


def _are_together(run: Path) -> bool:
    """Whether the ranks of the newest start have met."""
    return bool(events(run)) and events(run)[-1]["event"] not in ("fault", "restart", "fewer ranks")


def fewer_drill(place: Place, variant: Variant, *, seed: int) -> dict[str, Any]:
    """The same in float64, where a run may go on with fewer ranks: one that is killed again and again is lost."""
    exact = replace(variant, name=f"{variant.name}, fp64", overrides=(*variant.overrides, "train.precision=fp64"))
    row = restart_drill(place, exact, seed=seed, more=())
    fewer = [event for event in events(place.folder / "survives" / "run") if event["event"] == "fewer ranks"]
    return {**row, "with fewer ranks": len(fewer)}


def memory_drill(place: Place, variant: Variant, *, seed: int, faults: int = 2) -> dict[str, Any]:
    """Ranks are killed at random moments, also while they copy, of a run that keeps copies in memory."""
    draws, run = Random(f"memory {variant.name} {seed}"), place.fresh("memory")
    process = supervised(place, variant, run, SAME_LAYOUT, "checkpoint.every=5", "checkpoint.memory_every=1")
    injected = 0
    while injected < faults and process.poll() is None:
        before = len(_resumed(run))
        _await(process, lambda: last_step(run / "metrics.jsonl") > 5 and bool(ranks_of(process)))
        time.sleep(draws.uniform(0, 0.5))
        injected += _kill_one_of(ranks_of(process), draws)
        _await(process, lambda seen=before: len(_resumed(run)) > seen)  # type: ignore[misc]
    row = _row(place, variant, run, process, injected, 0)
    return {**row, "from memory": sum(event["origin"] == "memory" for event in _resumed(run))}


def _resumed(run: Path) -> list[dict[str, Any]]:
    told = events(run) if (run / "events.jsonl").exists() else []
    return [event for event in told if event["event"] == "resumed"]


def again_drill(place: Place, variant: Variant, *, seed: int) -> dict[str, Any]:
    """A rank is killed, and while the run starts again another one."""
    draws, run = Random(f"again {variant.name} {seed}"), place.fresh("again")
    process = supervised(place, variant, run, SAME_LAYOUT)
    _await(process, lambda: last_step(run / "metrics.jsonl") > 0 and bool(ranks_of(process)))
    before = ranks_of(process)
    injected = _kill_one_of(before, draws)
    _await(process, lambda: bool(set(ranks_of(process)) - set(before)))
    time.sleep(draws.uniform(0, 4.0))  # from the first line of Python to the first step
    injected += _kill_one_of(sorted(set(ranks_of(process)) - set(before)), draws)
    return _row(place, variant, run, process, injected, 0)


def _await(process: "subprocess.Popen[str]", there: Callable[[], bool]) -> None:
    """Return when it is, or when the run has ended."""
    end = time.monotonic() + TIME_LIMIT
    while process.poll() is None and not there() and time.monotonic() < end:
        time.sleep(0.01)


def _kill_one_of(ranks: Sequence[int], draws: Random) -> int:
    """1 if there was one."""
    if ranks:
        send(draws.choice(ranks), signal.SIGKILL)
    return int(bool(ranks))


def flip_drill(place: Place, variant: Variant, *, seed: int) -> dict[str, Any]:
    """A bit of one rank's weights is flipped in some step: the copies differ, and the run returns."""
    draws, run = Random(f"flip {variant.name} {seed}"), place.fresh("flipped")
    step, rank = draws.randint(2, place.steps - 1), draws.randrange(variant.num_ranks)
    first = flipped(step, rank, draws.randrange(1 << 30))
    more = ("checkpoint.compare_copies_every=1", "checkpoint.every=3")
    answers = place.start(variant, run, first, *more).answers(TIME_LIMIT)
    problems = [f"it does not end by itself: {said(answers)}"] if any(a.status for a in answers) else []
    found = [event for event in events(run) if event["event"] == "copies differ"] if run.exists() else []
    problems += [] if found else ["the flipped bit was not detected"]
    return {"injected": 1, "detected": len(found), "problems": problems or place.same(variant, run)}


def flipped(step: int, rank: int, at: int) -> Callable[[int], None]:
    def first(own: int) -> None:
        import torch

        from colonnade.train import loop

        train_step, done = loop.train_step, [own != rank]

        def and_flip(state: Any, *args: Any, **more: Any) -> Any:
            result = train_step(state, *args, **more)
            if state.step == step and not done[0]:
                done[0] = True
                weights = state.buckets[0].master.view(torch.int32)  # of the token table: equal over dp
                weights[at % (len(weights) // 2)] ^= 1 << (at % 31)
            return result

        loop.__dict__["train_step"] = and_flip

    return first


def supervised(
    place: Place, variant: Variant, run: Path, *more: str, path: Path | None = None
) -> "subprocess.Popen[str]":
    """Start a run with its supervisor. `path`: where Python looks for modules first."""
    place.expected(variant)
    config = tiny.write_config(place.corpus, run.parent)
    keys = [f"train.steps={place.steps}", "checkpoint.every=1", "train.evaluate_every=0", f"run.folder={run}", *KEYS]
    command = [sys.executable, "-m", "colonnade", "train", str(config), *keys, *variant.overrides, *more]
    paths = [str(path)] if path else []
    own = {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with (run.parent / "said").open("w") as said_file:
        return subprocess.Popen(command, env=environment() | own, text=True, stdout=said_file, stderr=said_file)


def ranks_of(process: "subprocess.Popen[str]") -> list[int]:
    """The ranks that a supervisor has started."""
    return list(commands.ranks_of(process.pid).values())


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended meanwhile


def _damage_newest(run: Path, draws: Random) -> int:
    """Flip a byte of the newest of several checkpoints; 1 if that was done."""
    found = list(checkpoints_in(run / "checkpoints").values())
    if len(found) < 2:
        return 0  # of a single one the run would be refused, as it should
    try:
        flip_a_bit(found[-1], draws)
    except (OSError, ValueError):
        return 0
    return 1


def flip_a_bit(checkpoint: Path, draws: Random) -> None:
    """In what its first rank has written."""
    file = checkpoint / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    file.write_bytes(content)


def _row(
    place: Place, variant: Variant, run: Path, process: "subprocess.Popen[str]", injected: int, damaged: int
) -> dict[str, Any]:
    try:
        status = process.wait(TIME_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        return {"injected": injected, "problems": ["it hangs"]}
    said_text = (run.parent / "said").read_text()
    told = events(run) if (run / "events.jsonl").exists() else []
    faults = [number for number, event in enumerate(told) if event["event"] == "fault"]
    recovered = [_recovery(told, number) for number in faults]
    lost = [max(0, told[n]["step"] - told[n + 1].get("saved", 0)) for n in faults if n + 1 < len(told)]
    problems = [] if status == 0 else [f"it does not end by itself: status {status}: …{said_text[-400:]}"]
    return {
        "injected": injected,
        "damaged": damaged,
        "detected": len(faults),
        "seconds to recover": [round(seconds, 1) for seconds in recovered if seconds],
        "steps lost": sum(lost),
        "problems": problems or place.same(variant, run),
    }


def _recovery(told: list[dict[str, Any]], fault: int) -> float:
    """[seconds] From a fault that was noticed to the next start of the run."""
    later = [event["time"] for event in told[fault:] if event["event"] in ("resumed", "started")]
    return float(later[0] - told[fault]["time"]) if later else 0.0
