"""What cleaning 10 TB on 64 nodes takes, from the measured costs of its stages.

    python -m benchmarks.cleaning_page RESULTS.json [--storage 1] [--latency 1] [--output PAGE.md]

RESULTS.json is what `benchmarks.cleaning_stages` has measured. Seconds, bytes and metadata operations are fitted as
a · MB + b · tasks, and a constant where a stage has tasks of its own number (least squares, none below 0); memory
likewise. From that is computed what 10 TB take in tasks of 256 MiB, the default run.piece_bytes.

How long storage makes them wait is not measured but computed with two numbers that are yours: --storage, the GB/s that
a node reads and writes, for bytes; --latency, in ms, for metadata operations.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colonnade.corpus.recipe import DeduplicateStep
from colonnade.corpus.signatures import num_gathered
from colonnade.data.token_stages import num_joins

SPLIT_BYTES, LARGE_SPLIT_BYTES, MANY_TASKS = 256 << 10, 16 << 20, 320
TOTAL_BYTES, NODES, CORES, TASK_BYTES = 10e12, 64, 32, 256 << 20
NUM_TASKS = round(TOTAL_BYTES / TASK_BYTES)
PAGE = 5_000  # characters of a document, about
STAGES = ("documents", "gather", "match", "group", "finish", "account", "tokens", "join", "list")
SINGLE = ("group", "account", "list")
DOCUMENTS_PER_TASK = 4  # of those that are made up


@dataclass(frozen=True)
class Cost:
    """A stage of one run."""

    stage: str
    megabytes: float
    run_tasks: int
    """Of the run: of its stage `documents`."""
    tasks: int
    seconds: float
    """Of processor time."""
    read: float
    """[MB]"""
    written: float
    """[MB]"""
    operations: int
    """On metadata."""
    memory: float
    """[MB] The most that the process had resident."""
    descriptors: int
    """The most that were open."""
    files: int
    """More in the folder of the result than before."""


@dataclass(frozen=True)
class Comparing:
    """Processor seconds of the stages that look at all tasks."""

    num_tasks: int
    gather: float
    """Per file of 64 tasks."""
    match: float
    """Per task."""
    group: float
    finish: float
    """To find out what is dropped, per task."""


@dataclass(frozen=True)
class Bulk:
    """A task of a stage that holds as much at a time as that of a large run."""

    megabytes: float
    """Of what it reads."""
    seconds: float
    """Of processor time."""
    memory: float
    """[MB]"""


@dataclass(frozen=True)
class Whole:
    """A stage of 10 TB, computed."""

    stage: str
    tasks: int
    seconds: float
    """Of processor time, of all tasks."""
    read: float
    """[MB]"""
    written: float
    """[MB]"""
    operations: float
    memory: str
    """Of a task."""


def fitted(facts: Sequence[Sequence[float]], values: Sequence[float]) -> NDArray[np.float64]:
    """The factors of the facts in the values: least squares, none below 0."""
    known, wanted = np.array(facts, float), np.array(values)
    best, least = np.zeros(known.shape[1]), float("inf")
    columns = range(known.shape[1])
    for chosen in (list(each) for count in columns for each in combinations(columns, count + 1)):
        answer = np.zeros(known.shape[1])
        answer[chosen] = np.linalg.lstsq(known[:, chosen], wanted, rcond=None)[0]
        error = float(((known @ answer - wanted) ** 2).sum())
        if (answer >= 0).all() and error < least - 1e-9 * float((wanted**2).sum()):
            best, least = answer, error
    return best


def facts_of(cost: Cost, key: str) -> list[float]:
    """What one of a stage's costs grows with: text, tasks of the run, tasks of the stage where these are others. Some
    stages see no text, and `group` opens a file of pairs for each task, however many pairs there are. A task of
    `gather` has a number of tasks of the run."""
    has_text = cost.stage not in ("account", "list") and (cost.stage, key) != ("group", "operations")
    own = cost.tasks if cost.stage in (*SINGLE, "gather", "join") else 0
    return [cost.megabytes * has_text, 0 if cost.stage == "gather" else cost.run_tasks, own]


def factors(costs: Sequence[Cost], key: str) -> NDArray[np.float64]:
    """What one of a stage's costs grows by, with each of `facts_of`."""
    like = alike(costs)
    return fitted([facts_of(cost, key) for cost in like], [getattr(cost, key) for cost in like])


def alike(costs: Sequence[Cost]) -> Sequence[Cost]:
    """The runs whose costs say what those of a large one are. Two documents that are alike agree in up to as many tasks
    of `match` as there are bands, and are compared in each; and what is compared comes from files of which 64 are kept
    open, which are few of those of many tasks. Runs of fewer tasks say too little of `match`, and of the pairs that
    `group` reads."""
    many = [cost for cost in costs if cost.run_tasks >= MANY_TASKS // 2]
    return many if many and costs[0].stage in ("match", "group") else costs


def num_tasks_of(stage: str) -> int:
    """Tasks of a stage, of 10 TB."""
    files = {"gather": num_gathered(NUM_TASKS), "join": num_joins(NUM_TASKS)}
    return 1 if stage in SINGLE else files.get(stage, NUM_TASKS)


def whole(name: str, costs: Sequence[Cost], compared: Sequence[Comparing], bulk: Mapping[str, Bulk]) -> Whole:
    """A stage of 10 TB, from those of the runs."""
    tasks = num_tasks_of(name)
    facts = np.array([TOTAL_BYTES / 1e6, NUM_TASKS, tasks])
    by = {key: factors(costs, key) for key in ("seconds", "read", "written", "operations")}
    if name in bulk:  # of which the runs have too little
        by["seconds"][0] = by["read"][0] * bulk[name].seconds / bulk[name].megabytes
    all_of = {key: float(facts @ each) for key, each in by.items()}
    all_of["seconds"] += NUM_TASKS * NUM_TASKS * _growth(name, compared)
    all_of["operations"] += NUM_TASKS * _looked_up() if name == "match" else 0
    return Whole(name, tasks, **all_of, memory=_memory(name, costs, bulk))


def _growth(stage: str, compared: Sequence[Comparing]) -> float:
    """Processor seconds of a task of a stage for each task of the run."""
    if stage not in ("match", "finish") or not compared:
        return 0.0
    known = [[1, each.num_tasks] for each in compared]
    return float(fitted(known, [getattr(each, stage) for each in compared])[1])


def _looked_up() -> float:
    """Gathered files that a match task opens, and reads by which it finds both ends of its part in each, by halving."""
    entries = TOTAL_BYTES / PAGE * DeduplicateStep().bands / num_gathered(NUM_TASKS)
    return num_gathered(NUM_TASKS) * (1 + 2 * math.log2(entries))


def _memory(stage: str, costs: Sequence[Cost], bulk: Mapping[str, Bulk]) -> str:
    """Peak of a task: grown with its bytes, or with the number of tasks whose counts it reads."""
    if stage == "group":
        return "130 B per near-duplicate"
    if stage == "join":
        return "–"  # grows with what is joined, of which so little text says nothing
    if stage == "gather":
        return f"{bulk[stage].memory / 1e3:.1f} GB"
    account, single = stage == "account", stage in SINGLE
    facts = [[1, cost.run_tasks * account, 0 if single else cost.megabytes / cost.run_tasks] for cost in costs]
    large = np.array([1, NUM_TASKS, 0 if single else TASK_BYTES / 1e6])
    return f"{float(large @ fitted(facts, [cost.memory for cost in costs])) / 1e3:.1f} GB"


def measured_table(runs: Sequence[Sequence[Cost]]) -> str:
    """What was measured: a row for each stage."""
    head = [f"{run[0].megabytes:.3g} MB, {run[0].run_tasks} tasks" for run in runs]
    lines = [
        f"| stage | {' | '.join(head)} | s per GB | ms per task | ms once | read, written per MB of input "
        "| most memory | most descriptors | files per task | metadata operations per task |",
        "|---" * (len(head) + 9) + "|",
    ]
    for name, costs in _by_stage(runs):
        by_mb, by_task, by_own = factors(costs, "seconds")
        if name == "gather":
            by_task, by_own = by_own, 0
        shown = " | ".join(next((f"{c.seconds:.2f} s" for c in run if c.stage == name), "–") for run in runs)
        moved = f"{costs[-1].read / costs[-1].megabytes:.2f}, {costs[-1].written / costs[-1].megabytes:.2f}"
        files, operations = (max(getattr(c, key) / c.tasks for c in costs) for key in ("files", "operations"))
        lines.append(
            f"| {name} | {shown} | {by_mb * 1e3:.1f} | {by_task * 1e3:.1f} | {by_own * 1e3:.0f} | {moved} MB | "
            f"{max(c.memory for c in costs):.0f} MB | {max(c.descriptors for c in costs)} | {round(files, 1):g} | "
            f"{operations:,.0f} |"
        )
    return "\n".join(lines)


def comparing_table(compared: Sequence[Comparing]) -> str:
    head = "| tasks | gather, per file | match, per task | group | finish: what is dropped, per task |"
    lines = [head, "|---" * 5 + "|"]
    for each in compared:
        cells = " | ".join(f"{value * 1e3:,.1f} ms" for value in (each.gather, each.match, each.group, each.finish))
        lines.append(f"| {each.num_tasks:,} | {cells} |")
    return "\n".join(lines)


def computed_table(found: Sequence[Whole]) -> str:
    """What the measurements are for 10 TB: a row for each stage, and one for all."""
    lines = [
        "| stage | tasks | processor hours | seconds per task | read | written | metadata operations "
        "| memory per task |",
        "|---" * 8 + "|",
    ]
    lines += [
        f"| {each.stage} | {each.tasks:,} | {each.seconds / 3600:,.1f} | {each.seconds / each.tasks:,.1f} | "
        f"{each.read / 1e6:,.2f} TB | {each.written / 1e6:,.2f} TB | {_millions(each.operations)} | "
        f"{each.memory} |"
        for each in found
    ]
    seconds, read, written, operations = (
        sum(getattr(each, key) for each in found) for key in ("seconds", "read", "written", "operations")
    )
    lines.append(
        f"| **all** | | **{seconds / 3600:,.0f}** | | **{read / 1e6:,.1f} TB** | **{written / 1e6:,.1f} TB** | "
        f"**{_millions(operations)}** | |"
    )
    return "\n".join(lines)


def walls(stage: Whole, storage: float, latency: float) -> tuple[float, float, float]:
    """[s] For which a stage computes on NODES, moves its bytes at `storage` GB/s of a node, and waits `latency` ms for
    each metadata operation, as many at a time as tasks run."""
    at_once = min(stage.tasks, NODES * CORES)
    moved = (stage.read + stage.written) / 1e3 / (storage * min(stage.tasks, NODES))
    return stage.seconds / at_once, moved, stage.operations * latency / 1e3 / at_once


def walls_table(found: Sequence[Whole], storage: float, latency: float) -> str:
    """Wall time: what was measured beside what is assumed."""
    lines = [
        f"| stage | computing (from what was measured) | *bytes, at {storage:g} GB/s (assumed)* "
        f"| *metadata, at {latency:g} ms (assumed)* | all three |",
        "|---" * 5 + "|",
    ]
    times = [walls(each, storage, latency) for each in found]
    for each, (computing, moved, waited) in zip(found, times, strict=True):
        told = f"*{_duration(moved)}* | *{_duration(waited)}* | {_duration(computing + moved + waited)}"
        lines.append(f"| {each.stage} | {_duration(computing)} | {told} |")
    computing, moved, waited = (sum(column) for column in zip(*times, strict=True))
    lines.append(
        f"| **all** | **{_duration(computing)}** | ***{_duration(moved)}*** | ***{_duration(waited)}*** | "
        f"**{_duration(computing + moved + waited)}** |"
    )
    return "\n".join(lines)


def _by_stage(runs: Sequence[Sequence[Cost]]) -> Iterator[tuple[str, list[Cost]]]:
    for name in STAGES:
        if costs := [cost for run in runs for cost in run if cost.stage == name]:
            yield name, costs


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f} million" if count >= 1e7 else f"{count / 1e6:.2g} million"


def _duration(seconds: float) -> str:
    if seconds > 5_400:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def page(facts: dict[str, Any], storage: float, latency: float) -> str:
    """All that is measured, and what is computed from it, in Markdown."""
    runs = [[Cost(**cost) for cost in run] for run in facts["runs"]]
    compared = [Comparing(**each) for each in facts["comparing"]]
    bulk = {stage: Bulk(**each) for stage, each in facts["bulk"].items()}
    found = [whole(name, costs, compared, bulk) for name, costs in _by_stage(runs)]
    load = " to ".join(f"{each:.1f}" for each in (min(facts["load"]), max(facts["load"])))
    taken = "; ".join(
        f"`{stage}` {each.megabytes:.0f} MB in {each.seconds:.2f} s, with {each.memory:.0f} MB resident"
        for stage, each in bulk.items()
    )
    return f"""# Cost of each stage of cleaning

{facts["cpu"]}, {facts["cores"]} cores, Python {facts["python"]}, commit {facts["commit"]};
`{facts["command"]}`

## Measured

Processor time of one process, beside other work (load average {load}), in tasks of {SPLIT_BYTES >> 10} KiB, of
{LARGE_SPLIT_BYTES >> 20} MiB, and, up to `group`, in some {MANY_TASKS}. A metadata operation opens, renames, removes,
makes or lists a file or folder; a look whether one is there is not counted. Bytes are those of the last run that has
the stage, files and operations the most of all runs.

{measured_table(runs)}

`match` and `group` are fitted over the runs of {MANY_TASKS // 2} tasks and more: with fewer, a pair is found in fewer
of them, and the files of `match` are open already. What `join` takes per GB of so little text is no more than the noise
of what it takes once.

The stages that look at all tasks, with {DOCUMENTS_PER_TASK} made-up documents in each:

{comparing_table(compared)}

What they take of made-up bands and pairs, as many as a large run has at a time: {taken}.

## Computed from it

10 TB in {NUM_TASKS:,} tasks of 256 MiB; no such run was made. Nothing is assumed here but that costs go on as they were
fitted, on documents of some {PAGE:,} characters of which a tenth has a changed copy. Seconds of `gather` and `group`
per MB are those of made-up bands and pairs. To the operations of `match` belong {_looked_up():,.0f} by which each task
finds its part of {num_gathered(NUM_TASKS)} gathered files.

{computed_table(found)}

## Wall time, with storage as it is assumed

{NODES} nodes of {CORES} cores of this kind. Each stage computes, moves its bytes and waits for metadata, one after the
other: nothing is taken to overlap, and no read to come from memory. **Assumed, not measured**: a node reads and writes
{storage:g} GB/s in all (`--storage`; a 10 Gbit/s link carries at most 1.25), and a metadata operation, an open with
its first read, takes {latency:g} ms (`--latency`; what a network file system may take, where a local NVMe drive takes
some hundredths). A stage of one task has one node and one core.

{walls_table(found, storage, latency)}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is assumed of storage, and where the page goes."""
    parser.add_argument("--storage", type=float, default=1.0, help="GB/s that a node reads and writes, together")
    parser.add_argument("--latency", type=float, default=1.0, help="ms of a metadata operation")
    parser.add_argument("--output", type=Path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    add_options(parser)
    options = parser.parse_args()
    text = page(json.loads(options.results.read_text()), options.storage, options.latency)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
