"""SIGKILL at any moment, half of the time within a save: the run goes on, to the same bits."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.commands import Ranks
from tests.drills.runs import Place, Variant, damaged_checkpoints

IN_A_SAVE = 0.6  # of the kills are aimed so; a save may be over before the kill comes
LONGEST_SAVE = 0.03  # seconds from its beginning until a kill that is aimed at it
LONGEST_START = 2.0  # seconds from the start of a run until any other kill
LEFT = (".step_*.partial", ".step_*.deleted")


def kill_drill(place: Place, variant: Variant, *, seed: int, kills: int) -> dict[str, Any]:
    """Kill a run `kills` times, then let it end; one that ends before is followed by another. A row of results."""
    draws, run = Random(f"{variant.name} {seed}"), place.fresh("killed")
    place.expected(variant)
    problems: list[str] = []
    done = inside = 0
    while done < kills and not problems:
        ranks = place.start(variant, run)
        aimed = draws.random() < IN_A_SAVE
        ended = _wait_for_save(ranks, run, draws) if aimed else _ended_within(ranks, draws.uniform(0, LONGEST_START))
        if not ended:
            _kill(ranks, draws)
            done += 1
            inside += bool(left_by_a_save(run))
        answers = ranks.answers()
        if ended and any(answer.status > 0 for answer in answers):
            problems.append(f"it fails after {done} kills: {[answer.err[-400:] for answer in answers]}")
        problems += damaged_checkpoints(run)
        if ended and not problems:
            problems += place.same(variant, run)
            run = place.fresh("killed")
    problems = problems or place.finish(variant, run)
    return {"kills": done, "inside a save": inside, "problems": problems}


def _wait_for_save(ranks: Ranks, run: Path, draws: Random) -> bool:
    """Return within the first, second or third save that begins from now on; True if the run has ended instead."""
    seen: set[str] = set(left_by_a_save(run))
    wanted = draws.randint(1, 3)
    while wanted:
        if _has_ended(ranks):
            return True
        new = set(left_by_a_save(run)) - seen
        seen |= new
        wanted -= min(wanted, len(new))
        time.sleep(0.0005)
    time.sleep(draws.uniform(0, LONGEST_SAVE) if draws.random() < 0.7 else 0)
    return _has_ended(ranks)


def _ended_within(ranks: Ranks, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if _has_ended(ranks):
            return True
        time.sleep(0.002)
    return _has_ended(ranks)


def _has_ended(ranks: Ranks) -> bool:
    """Whether one of the ranks is no more. It is left for `answers` to be waited for."""
    return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in ranks.pids)


def _kill(ranks: Ranks, draws: Random) -> None:
    """All ranks at once, as when a machine goes down, or one of them; the others are killed a little later."""
    pids: Sequence[int] = ranks.pids if draws.random() < 0.5 else [draws.choice(ranks.pids)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def left_by_a_save(run: Path) -> list[str]:
    """Folders of checkpoints that are not whole yet, or no more: of a run that was killed, inside a save."""
    return [path.name for pattern in LEFT for path in (run / "checkpoints").glob(pattern)]
