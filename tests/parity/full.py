"""The full matrix, as much of it as an hour allows: every layout with every schedule, ZeRO stage and recomputation.

    python -m tests.parity.full                 for about an hour; go on by starting it again
    python -m tests.parity.full --minutes 5     a short sample

All valid combinations of what makes a layout (tp, pp, dp, schedule, micro-batch size, sequence parallelism, ZeRO,
recomputation) are put in an order that is random and always the same, so that any beginning of it is a broad sample.
What is trained (optimizer, tied, dropout, positions, norms, vocabulary, masks, clipping, partition) changes from one to
the next. Each is compared as `tests/parity/test_parity.py` does; the worst differences of each layout are written to
benchmarks/results, with machine, commit and command. Exits 1 if anything is wrong.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.hardware import command_line, describe, machine_name
from tests.parity.compare import NEAR_NOTHING, TOLERANCE, WHAT, Outcome, by_layout, compare
from tests.parity.covering import FREE, Combination, cores, cycled, job
from tests.parity.runs import Case, Job, Reference

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
AT_ONCE = 48
"""Combinations between two looks at the clock; those of one layout share their processes."""
TIME_LIMIT = 600.0
"""[seconds] For the combinations of one layout in one go."""


def matrix() -> list[Combination]:
    """Every combination, in the order in which they run.

    Sequence parallelism over one rank is left out: it cuts the stream in one part.
    """
    ways = [
        {**core, "sequence_parallel": sequence_parallel, "zero": zero, "recompute": recompute}
        for core, sequence_parallel, zero, recompute in product(
            cores(), FREE["sequence_parallel"], FREE["zero"], FREE["recompute"]
        )
        if core["tp"] > 1 or not sequence_parallel
    ]
    Random(0).shuffle(ways)
    return [{**cycled(number), **way} for number, way in enumerate(ways)]


def row(outcome: Outcome) -> dict[str, Any]:
    """What is kept of a comparison."""
    worst = {what: outcome.worst(what).size for what in WHAT}
    return {"job": named(outcome.job), "worst": worst, "problems": outcome.problems()}


def named(job: Job) -> str:
    """The way, and what of the case is not the default."""
    case, way = job
    changed = [f"{name}={value}" for name, value in vars(case).items() if value != getattr(Case(), name)]
    return " ".join([str(way), "|", *changed])


def run(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Rows of these jobs. Where the ranks of a layout fail, each of its jobs is tried alone."""
    rows: dict[Job, dict[str, Any]] = {}
    references: dict[Case, Reference] = {}
    for together in by_layout(jobs).values():
        try:
            rows |= {outcome.job: row(outcome) for outcome in compare(together, references, time_limit=TIME_LIMIT)}
        except Exception:  # noqa: BLE001  whatever a rank raised, the row of the job that does it says so
            rows |= {one: run_alone(one, references) for one in together}
    return [rows[one] for one in jobs]


def run_alone(one: Job, references: dict[Case, Reference]) -> dict[str, Any]:
    """The row of one job, which may fail."""
    try:
        (outcome,) = compare([one], references, time_limit=TIME_LIMIT)
        return row(outcome)
    except Exception as error:  # noqa: BLE001  it is what the row is about
        return {"job": named(one), "worst": {}, "problems": [f"{type(error).__name__}: {error}"]}


# --- what is written --------------------------------------------------------------------------------------------------


def begun(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The newest results of this machine if they are of the same commit, with their file; else a new file and none."""
    fresh: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": describe(),
        "command": command_line(),
        "seconds": 0.0,
        "rows": [],
    }
    for path in sorted(folder.glob(f"parity-*-{machine_name()}.json"))[-1:]:
        found: dict[str, Any] = json.loads(path.read_text())
        if found["hardware"]["commit"] == fresh["hardware"]["commit"]:
            return path, found
    return folder / f"parity-{fresh['date'][:10]}-{machine_name()}.json", fresh


def page(results: dict[str, Any], total: int) -> str:
    """The table, in Markdown."""
    hardware, rows = results["hardware"], results["rows"]
    wrong = [row for row in rows if row["problems"]]
    lines = [
        f"# Parity of layouts, {results['date'][:10]}, {hardware['cpu']}, {hardware['cores']} cores",
        "",
        f"{len(rows)} of {total} combinations, five float64 steps each, beside the serial run, in "
        f"{results['seconds'] / 60:.0f} minutes; Python {hardware['python']}, torch {hardware['torch']}, "
        f"{hardware['system']}; commit {hardware['commit']}; `{results['command']}`.",
        "",
        f"{len(rows) - len(wrong)} are equal up to {TOLERANCE:.0e} ({' and '.join(NEAR_NOTHING)} up to "
        f"{WHAT['key_biases']:.0e}), copies to the bit. The largest difference of each layout, "
        "relative to the largest element of its tensor:",
        "",
        f"| layout | combinations | {' | '.join(WHAT)} |",
        "|---" * (len(WHAT) + 2) + "|",
        *(_line(name, of_layout) for name, of_layout in sorted(_grouped(rows).items())),
        "",
        *(f"* WRONG: {row['job']}: {'; '.join(row['problems'])}" for row in wrong),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _grouped(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in rows:
        sizes = dict.fromkeys(("tp", "pp", "dp"), "1") | dict(
            word.split("=") for word in each["job"].split() if word[:2] in ("tp", "pp", "dp")
        )
        groups[" ".join(f"{name}{size}" for name, size in sizes.items())].append(each)
    return groups


def _line(name: str, rows: Sequence[dict[str, Any]]) -> str:
    worst = [max((row["worst"].get(what, float("inf")) for row in rows), default=0.0) for what in WHAT]
    return f"| {name} | {len(rows)} | {' | '.join(f'{size:.0e}' for size in worst)} |"


def write(path: Path, text: str) -> None:
    """All of it or nothing."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.full", description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="time after which nothing new is started")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    everything, (path, results) = matrix(), begun(given.output)
    rest, end = iter(everything[len(results["rows"]) :]), time.monotonic() + 60.0 * given.minutes
    while time.monotonic() < end and (combinations := list(islice(rest, AT_ONCE))):
        started = time.monotonic()
        results["rows"] += run([job(combination) for combination in combinations])
        results["seconds"] += time.monotonic() - started
        write(path, json.dumps(results))
        write(path.with_suffix(".md"), page(results, len(everything)))
        print(_progress(results, len(everything)), flush=True)
    print(page(results, len(everything)))
    return 1 if any(row["problems"] for row in results["rows"]) else 0


def _progress(results: dict[str, Any], total: int) -> str:
    done = len(results["rows"])
    wrong = sum(bool(row["problems"]) for row in results["rows"])
    rest = results["seconds"] / done * (total - done) / 60
    return f"{done} of {total}, {wrong} wrong, {results['seconds'] / 60:.1f} minutes; all would take {rest:.0f} more"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
