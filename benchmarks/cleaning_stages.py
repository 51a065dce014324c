"""What does each stage of a cleaning run cost, how does that grow, and what would it be for 10 TB on 64 nodes?

    python -m benchmarks.cleaning_stages INPUT… --tokenizer TOKENIZER [--test SET.jsonl] [--megabytes 5 20 80]
        [--tasks 64 256 1024 4096] [--folder FOLDER] [--output OUT.md]

The input's documents, cut to the length of web pages, and changed copies of a tenth of them are cleaned at three sizes
in tasks of 256 KiB, and at the largest in tasks of 16 MiB too; each run in a process of its own, whose processor time,
bytes (/proc/self/io), resident memory, open descriptors and files are taken stage by stage. What comparing costs with
so and so many tasks is measured apart, on made-up signatures. Seconds and bytes are fitted as a · MB + b · tasks, and a
constant where a stage has tasks of its own number (least squares, none below 0); memory likewise. From that is computed
what 10 TB take in tasks of 256 MiB, the default run.piece_bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.hardware import command_line, commit, cpu_name, describe
from benchmarks.minhash_speed import changed_copies
from colonnade.corpus.components import PAIR
from colonnade.corpus.documents import read_documents
from colonnade.corpus.duplicates import (
    Comparison,
    Gather,
    Group,
    Match,
    RemoveDuplicates,
    drops_path,
    pairs_path,
    sign_folder,
)
from colonnade.corpus.load import build
from colonnade.corpus.minhash import Bands
from colonnade.corpus.plan import keep_plan, make_plan
from colonnade.corpus.recipe import DeduplicateStep, Recipe
from colonnade.corpus.run import run_stage
from colonnade.corpus.signatures import SignatureWriter, num_gathered
from colonnade.corpus.stages import stages
from colonnade.corpus.step import Setting
from colonnade.data.cleaning import Tokenizers
from colonnade.data.token_stages import JOINED
from colonnade.lock import locked

SPLIT_BYTES, LARGE_SPLIT_BYTES = 256 << 10, 16 << 20
TOTAL_BYTES, NODES, CORES, TASK_BYTES = 10e12, 64, 32, 256 << 20
NUM_TASKS = round(TOTAL_BYTES / TASK_BYTES)
PAGE = 5_000  # characters of a document, about
SINGLE = ("group", "account", "list")
DOCUMENTS_PER_TASK, SHINGLES, SAMPLED = 4, 40, 8


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


class Watch:
    """What a piece of work takes of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._over, self.descriptors = folder, threading.Event(), 0
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
        self._files, self._io, self._started = _num_files(folder), _io(), time.process_time()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()

    def _count(self) -> None:
        while not self._over.wait(0.005):
            self.descriptors = max(self.descriptors, len(os.listdir("/proc/self/fd")) - 1)

    def stop(self) -> dict[str, Any]:
        seconds, io = time.process_time() - self._started, _io()
        self._over.set()
        self._thread.join()
        memory = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return {
            "seconds": seconds,
            "read": (io[0] - self._io[0]) / 1e6,
            "written": (io[1] - self._io[1]) / 1e6,
            "memory": int(memory.split()[1]) * 1024 / 1e6,
            "descriptors": self.descriptors,
            "files": _num_files(self._folder) - self._files,
        }


def _io() -> tuple[int, int]:
    """Bytes that this process has read and written."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["rchar"]), int(facts["wchar"])


def _num_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def pages(inputs: Sequence[Path], megabytes: float) -> list[str]:
    """Documents of about PAGE characters, cut between paragraphs, in an order by chance; a tenth has a changed copy."""
    found = [page for text in read_documents(inputs) for page in _cut(text)]
    random.Random(0).shuffle(found)
    size, count = 0, 0
    while size < megabytes * 1e6 / 1.1 and count < len(found):
        size, count = size + len(found[count].encode()), count + 1
    texts = found[:count] + changed_copies(found[: count // 10], 1)[: count // 10]
    random.Random(1).shuffle(texts)
    return texts


def _cut(text: str) -> Iterator[str]:
    kept, size = list[str](), 0
    for paragraph in text.split("\n\n"):
        kept.append(paragraph)
        size += len(paragraph)
        if size >= PAGE:
            yield "\n\n".join(kept)
            kept, size = [], 0
    if size:
        yield "\n\n".join(kept)


def measured(source: Path, split_bytes: int, tokenizer: str, test: str | None, folder: str | None) -> list[Cost]:
    """The stages of one run over some texts."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        content: dict[str, Any] = {
            "run": {"workers": 1, "piece_bytes": split_bytes, "tokenizer": tokenizer},
            "read": {"paths": [str(source)]},
            "write": {"folder": str(Path(name) / "out")},
            "filter": {"quality": ["gopher", "repetition", "c4"]},
            **{section: {} for section in ("repair", "language", "deduplicate", "split", "tokenize")},
            **({"decontaminate": {"tests": {"test": test}}} if test else {}),
        }
        return _stages(build(content), source.stat().st_size / 1e6)


def _stages(recipe: Recipe, megabytes: float) -> list[Cost]:
    found, folder = [], Path(recipe.write.folder)
    with locked(folder / "state", "a benchmark") as lock:
        plan = keep_plan(make_plan(recipe), recipe)
        for stage in stages(recipe, plan, Tokenizers()):
            watch = Watch(folder)
            run_stage(recipe, stage, plan, folder, lock, progress=False)
            found.append(Cost(stage.name, megabytes, len(plan.tasks), stage.tasks, **watch.stop()))
            print(found[-1], flush=True)
    return found


def comparing(num_tasks: int, folder: str | None) -> Comparing:
    """The stages that look at all tasks, with little in each: every other document has a near-duplicate elsewhere."""
    how, draw = DeduplicateStep(), np.random.default_rng(0)
    bands = Bands(how.bands, how.rows)
    twins = draw.integers(0, 1 << 63, (num_tasks * DOCUMENTS_PER_TASK // 4, SHINGLES), np.uint64)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        comparison, number = Comparison(how, (), place, num_tasks), 0
        for task in range(num_tasks):
            writer = SignatureWriter(sign_folder(place), task, bands)
            for _ in range(DOCUMENTS_PER_TASK):
                own = draw.integers(0, 1 << 63, SHINGLES, np.uint64)
                twin = twins[draw.integers(len(twins))]
                shingles = np.sort(np.r_[twin[:-1], own[:1]] if number % 2 else own)
                writer.add(f"{number}", 1_000, shingles)
                number += 1
            writer.close()
        files = num_gathered(num_tasks)
        gather = _seconds(lambda rank: Gather("gather", comparison).run(rank=rank), range(files))
        ranks = range(0, num_tasks, max(1, num_tasks // SAMPLED))
        match = _seconds(lambda rank: Match("match", comparison).run(rank=rank, world_size=num_tasks), ranks)
        for task in range(num_tasks):
            if task not in ranks:
                pairs_path(place, task).write_bytes(np.empty(0, PAIR).tobytes())
        group = _seconds(lambda rank: Group("group", comparison).run(), [0])
        assert drops_path(place).stat().st_size, "there are near-duplicates"
        remove = RemoveDuplicates(comparison, Setting(place, 5))
        finish = _seconds(lambda rank: remove.prepare(rank), ranks)
    return Comparing(num_tasks, gather, match, group, finish)


def _seconds(run: Callable[[int], Any], ranks: Sequence[int]) -> float:
    """Processor seconds of a task, on average."""
    started = time.process_time()
    for rank in ranks:
        for _ in run(rank) or ():
            pass
    return (time.process_time() - started) / max(len(ranks), 1)


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


def facts_of(cost: Cost) -> list[float]:
    """What seconds and bytes grow with: text, tasks of the run, tasks of the stage where these are others."""
    return [cost.megabytes, cost.run_tasks, cost.tasks if cost.stage in (*SINGLE, "gather", "join") else 0]


def alike(costs: Sequence[Cost]) -> Sequence[Cost]:
    """The runs whose seconds and bytes say what those of a large one are. Two documents that are alike agree in up to
    as many tasks of `match` as there are bands, and are compared in each: runs of fewer tasks say too little."""
    many = [cost for cost in costs if cost.run_tasks >= DeduplicateStep().bands]
    return many if many and costs[0].stage == "match" else costs


def num_tasks_of(stage: str) -> int:
    """Tasks of a stage, of 10 TB."""
    files = {"gather": num_gathered(NUM_TASKS), "join": -(-NUM_TASKS // JOINED)}
    return 1 if stage in SINGLE else files.get(stage, NUM_TASKS)


def measured_table(runs: Sequence[Sequence[Cost]]) -> str:
    """What was measured: a row for each stage."""
    head = [f"{run[0].megabytes:.0f} MB, {run[0].run_tasks} tasks" for run in runs]
    lines = [
        f"| stage | {' | '.join(head)} | s per GB | ms per task | ms once | read, written per MB of input "
        "| most memory | most descriptors | files per task |",
        "|---" * (len(head) + 8) + "|",
    ]
    for name, costs in _by_stage(runs):
        like = alike(costs)
        by_mb, by_task, by_own = fitted([facts_of(cost) for cost in like], [cost.seconds for cost in like])
        shown = " | ".join(next((f"{c.seconds:.2f} s" for c in run if c.stage == name), "–") for run in runs)
        last = costs[-1]
        moved = f"{last.read / last.megabytes:.2f}, {last.written / last.megabytes:.2f} MB"
        files = max(round(cost.files / cost.tasks, 1) for cost in costs)
        lines.append(
            f"| {name} | {shown} | {by_mb * 1e3:.1f} | {by_task * 1e3:.1f} | {by_own * 1e3:.0f} | {moved} | "
            f"{max(c.memory for c in costs):.0f} MB | {max(c.descriptors for c in costs)} | {files:g} |"
        )
    return "\n".join(lines)


def computed_table(runs: Sequence[Sequence[Cost]], compared: Sequence[Comparing]) -> str:
    """What that is for 10 TB: a row for each stage, and one for all."""
    lines = [
        "| stage | tasks | processor hours | seconds per task | wall time | read | written | memory per task |",
        "|---" * 8 + "|",
    ]
    total = np.zeros(4)
    for name, costs in _by_stage(runs):
        like = alike(costs)
        facts, tasks = [facts_of(cost) for cost in like], num_tasks_of(name)
        whole = np.array([TOTAL_BYTES / 1e6, NUM_TASKS, tasks])
        seconds, read, written = (
            float(whole @ fitted(facts, [getattr(cost, key) for cost in like]))
            for key in ("seconds", "read", "written")
        )
        seconds += NUM_TASKS * _growth(name, compared) * NUM_TASKS
        wall = seconds / min(tasks, NODES * CORES)
        total += seconds, wall, read, written
        lines.append(
            f"| {name} | {tasks:,} | {seconds / 3600:,.1f} | {seconds / tasks:,.1f} | {_duration(wall)} | "
            f"{read / 1e6:,.2f} TB | {written / 1e6:,.2f} TB | {_memory(name, costs)} |"
        )
    lines.append(
        f"| **all** | | **{total[0] / 3600:,.0f}** | | **{_duration(total[1])}** | **{total[2] / 1e6:,.1f} TB** | "
        f"**{total[3] / 1e6:,.1f} TB** | |"
    )
    return "\n".join(lines)


def _growth(stage: str, compared: Sequence[Comparing]) -> float:
    """Processor seconds of a task of a stage for each task of the run."""
    if stage not in ("match", "finish") or not compared:
        return 0.0
    known = [[1, each.num_tasks] for each in compared]
    return float(fitted(known, [getattr(each, stage) for each in compared])[1])


def _memory(stage: str, costs: Sequence[Cost]) -> str:
    """Peak of a task: grown with its bytes, with what it joins, or with the number of tasks whose counts it reads."""
    if stage == "group":
        return "130 B per near-duplicate"
    if stage == "join":
        return "–"  # grows with what is joined, of which so little text says nothing
    facts = [[1, cost.run_tasks if stage == "account" else 0, *_held(cost)] for cost in costs]
    joined = JOINED * TASK_BYTES / 1e6 if stage == "join" else 0
    whole = np.array([1, NUM_TASKS, 0 if stage in SINGLE else TASK_BYTES / 1e6, joined])
    return f"{float(whole @ fitted(facts, [cost.memory for cost in costs])) / 1e3:.1f} GB"


def _held(cost: Cost) -> list[float]:
    """[MB] Of a task, and of those that are joined."""
    return [
        0 if cost.stage in SINGLE else cost.megabytes / cost.run_tasks,
        cost.megabytes if cost.stage == "join" else 0,
    ]


def comparing_table(compared: Sequence[Comparing]) -> str:
    head = "| tasks | gather, per file | match, per task | group | finish: what is dropped, per task |"
    lines = [head, "|---" * 5 + "|"]
    for each in compared:
        cells = " | ".join(f"{value * 1e3:,.1f} ms" for value in (each.gather, each.match, each.group, each.finish))
        lines.append(f"| {each.num_tasks:,} | {cells} |")
    return "\n".join(lines)


def _by_stage(runs: Sequence[Sequence[Cost]]) -> Iterator[tuple[str, list[Cost]]]:
    order = dict.fromkeys(cost.stage for run in sorted(runs, key=len)[::-1] for cost in run)
    for name in order:
        yield name, [cost for run in runs for cost in run if cost.stage == name]


def _duration(seconds: float) -> str:
    if seconds > 5_400:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, nargs="+")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--test")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[5.0, 20.0, 80.0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--folder", help="where runs are made; a disk in memory keeps waiting out of it")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    compared = [_apart(comparing, num_tasks, options.folder) for num_tasks in options.tasks]
    print(comparing_table(compared), flush=True)
    cases = [(size, SPLIT_BYTES) for size in options.megabytes] + [(options.megabytes[-1], LARGE_SPLIT_BYTES)]
    runs = []
    for megabytes, split_bytes in cases:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            source = Path(name) / "in.jsonl"
            _apart(write_pages, options.input, megabytes, source)  # apart, so that its memory is not counted
            runs.append(_apart(measured, source, split_bytes, options.tokenizer, options.test, options.folder))
    text = (
        f"# Cost of each stage of cleaning\n\n{cpu_name()}, {describe()['cores']} cores, Python "
        f"{describe()['python']}, commit {commit()};\n`{command_line()}`\n\n## Measured\n\nProcessor time of one "
        f"process; tasks of {SPLIT_BYTES >> 10} KiB, in the last run of {LARGE_SPLIT_BYTES >> 20} MiB.\n\n"
        f"{measured_table(runs)}\n\nThe stages that look at all tasks, with {DOCUMENTS_PER_TASK} made-up documents in "
        f"each:\n\n{comparing_table(compared)}\n\n## Computed from it\n\n10 TB in {NUM_TASKS:,} tasks of 256 MiB, on "
        f"{NODES} nodes of {CORES} cores of this kind. Waiting for storage and network is not in it.\n\n"
        f"{computed_table(runs, compared)}\n"
    )
    print(text)
    if options.output:
        options.output.write_text(text)
        facts = {"runs": [[asdict(cost) for cost in run] for run in runs], "comparing": [asdict(c) for c in compared]}
        options.output.with_suffix(".json").write_text(json.dumps({**describe(), **facts}, indent=1) + "\n")


def write_pages(inputs: Sequence[Path], megabytes: float, file: Path) -> None:
    """The documents of `pages`, with their numbers as ids."""
    rows = ({"text": text, "id": f"{number}"} for number, text in enumerate(pages(inputs, megabytes)))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


if __name__ == "__main__":
    main()
