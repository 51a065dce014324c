"""The whole drill, as much of it as there is time for: kills, lost disks, signals, clocks, restarts, histories, damage.

    python -m tests.drills.full                 to the end (hours on one core); go on by starting it again
    python -m tests.drills.full --minutes 5     the beginning
    python -m tests.drills.full --only "clock"  some of it

A fixed list of jobs, each made from a seed, in an order that makes any beginning of it a broad sample. A run must end
in the same bits as one that was left alone, a damaged file must be refused or read rightly, and nothing may end in a
traceback or hang. Counts and problems go to benchmarks/results with machine, commit and command. Exits 1 if anything
is wrong.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.hardware import command_line, describe, machine_name
from tests.drills.clocks import clock_drill, slow_drill
from tests.drills.disturb import disk_drill, signal_drill, stop_drill
from tests.drills.faults import again_drill, fewer_drill, flip_drill, memory_drill, restart_drill
from tests.drills.fuzz import checkpoint_drill, file_drill
from tests.drills.histories import history_drill
from tests.drills.kills import kill_drill
from tests.drills.lost import lost_drill, rename_drill
from tests.drills.runs import VARIANTS, Place, Variant

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROUNDS = 5
FLIPPED = Variant("dp2, copies of all state", 2, ("parallel.dp=2",))
HISTORIES = 12  # a round
KILLS = 13  # of a run
PROMISED = 500
"""Kills of `kill_drill` in all rounds, at least; half of those that a page tells of are to be inside a save."""
Row = dict[str, Any]
Drill = Callable[..., Row]
ANY: tuple[tuple[str, Drill], ...] = (
    ("full disk", disk_drill),
    ("signals", signal_drill),
    ("SIGSTOP", stop_drill),
    ("lost file system", lost_drill),
    ("killed at a rename", rename_drill),
)
"""On every variant."""
SEVERAL: tuple[tuple[str, Drill], ...] = (
    ("restarts", restart_drill),
    ("restarts with fewer ranks", fewer_drill),
    ("killed while starting again", again_drill),
    ("clock jumps", clock_drill),
    ("restarts from memory", memory_drill),
)
"""On those of several ranks."""


class Job(NamedTuple):
    """One thing to do; its name is unique."""

    name: str
    do: Drill
    asked: Mapping[str, Any]
    """What the drill is asked for: variant, seed, number of kills."""


def jobs(rounds: int = ROUNDS, kills: int = KILLS, tries: int = 100) -> Iterator[Job]:
    """All of them: what each drill does in each round."""
    for seed in range(rounds):
        for variant in VARIANTS:
            asked = {"variant": variant, "seed": seed}
            yield Job(f"kills | {variant.name} | {seed}", kill_drill, {**asked, "kills": kills})
            for what, drill in ANY:
                yield Job(f"{what} | {variant.name} | {seed}", drill, asked)
            if variant.num_ranks > 1:
                for what, drill in SEVERAL:
                    yield Job(f"{what} | {variant.name} | {seed}", drill, asked)
            if variant.num_ranks > 1 and "pp" not in variant.name:
                yield Job(f"slow rank | {variant.name} | {seed}", slow_drill, asked)
            if "dp2" in variant.name:
                yield Job(f"flipped bit | {variant.name} | {seed}", flip_drill, {**asked, "variant": FLIPPED})
        for number in range(seed * HISTORIES, (seed + 1) * HISTORIES):
            yield Job(f"histories | drawn | {number}", history_drill, {"seed": number})
        yield Job(f"checkpoints | damaged or forged | {seed}", checkpoint_drill, {"seed": seed, "tries": tries})
        yield Job(f"files | changed bytes | {seed}", file_drill, {"seed": seed, "tries": 6 * tries})


def run(job: Job, place: Place) -> Row:
    """The row of one job. Whatever it raises is a problem."""
    started = time.monotonic()
    try:
        row = job.do(place, **job.asked)
    except Exception as error:  # noqa: BLE001  it is what the row is about
        row = {"problems": [f"{type(error).__name__}: {str(error)[:500]} {traceback.format_exc()[-500:]}"]}
    return {"job": job.name, **row, "seconds": round(time.monotonic() - started, 1)}


# --- what is written --------------------------------------------------------------------------------------------------


def begun(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The newest results of this machine if they are of the same commit, with their file; else a new file and none."""
    fresh: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": describe(),
        "command": command_line(),
        "rows": [],
    }
    for path in sorted(folder.glob(f"drills-*-{machine_name()}.json"))[-1:]:
        found: dict[str, Any] = json.loads(path.read_text())
        if found["hardware"]["commit"] == fresh["hardware"]["commit"]:
            return path, found
    return folder / f"drills-{fresh['date'][:10]}-{machine_name()}.json", fresh


def page(results: dict[str, Any], total: int) -> str:
    """The counts, in Markdown."""
    hardware, rows = results["hardware"], results["rows"]
    wrong = [row for row in rows if row["problems"]]
    lines = [
        f"# Drills, {results['date'][:10]}, {hardware['cpu']}, {hardware['cores']} cores",
        "",
        f"{len(rows)} of {total} jobs in {sum(row['seconds'] for row in rows) / 60:.0f} minutes; Python "
        f"{hardware['python']}, torch {hardware['torch']}, {hardware['system']}; commit {hardware['commit']}; "
        f"`{results['command']}`. {results.get('note', '')}".rstrip(),
        "",
        f"{len(rows) - len(wrong)} of them without a problem. A run ends in the same bits as one that was left alone; "
        "a damaged file is refused, or read rightly.",
        "",
        _kills(rows),
        "",
        "| drill | on | jobs | counts | with problems |",
        "|---|---|---|---|---|",
        *(_line(name, rows) for name in dict.fromkeys(row["job"].rpartition(" | ")[0] for row in rows)),
        "",
        *(f"* WRONG: {row['job']}: {'; '.join(row['problems'])[:1000]}" for row in wrong),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _kills(rows: Sequence[Row]) -> str:
    """Those of all jobs, and whether they are as many as were promised."""
    kills, inside = (sum(row.get(what, 0) for row in rows) for what in ("kills", "inside a save"))
    enough, aimed = ("reached" if is_so else "not reached" for is_so in (kills >= PROMISED, 2 * inside >= kills > 0))
    return f"{kills} kills, {inside} inside a save. Promised are {PROMISED} ({enough}), half inside a save ({aimed})."


def _line(name: str, rows: Sequence[Row]) -> str:
    own = [row for row in rows if row["job"].rpartition(" | ")[0] == name]
    counts: Counter[str] = Counter()
    for row in own:
        counts.update({key: n for key, n in row.items() if isinstance(n, int) and not isinstance(n, bool)})
    seconds = [each for row in own for each in row.get("seconds to recover", [])]
    mean = [f"{sum(seconds) / len(seconds):.1f} s to recover on average"] if seconds else []
    told = ", ".join([*(f"{count} {key}" for key, count in counts.items()), *mean])
    return f"| {name} | {len(own)} | {told} | {sum(bool(row['problems']) for row in own)} |"


def write(path: Path, text: str) -> None:
    """All of it or nothing."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills.full", description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time after which nothing new is started")
    parser.add_argument("--only", nargs="+", default=[""], help="words: jobs that have one of them in their names")
    parser.add_argument("--note", default="", help="a sentence about the machine, for the page")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # ranks are forked
    path, results = begun(given.output)
    results |= {"note": given.note} if given.note else {}
    everything, done = list(jobs()), {row["job"] for row in results["rows"]}
    end = time.monotonic() + 60.0 * given.minutes
    with tempfile.TemporaryDirectory(prefix="drills-") as folder:
        place = Place(Path(folder))
        for job in everything:
            wanted = any(word in job.name for word in given.only)
            if not wanted or job.name in done or time.monotonic() > end:
                continue
            results["rows"].append(row := run(job, place))
            write(path, json.dumps(results, indent=1))
            write(path.with_suffix(".md"), page(results, len(everything)))
            print(f"{len(results['rows'])} of {len(everything)}: {json.dumps(row)}", flush=True)
    print(page(results, len(everything)))
    return 1 if any(row["problems"] for row in results["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
