"""What does each stage of a cleaning run cost, and what would it cost for 10 TB on 64 nodes?

    python -m benchmarks.cleaning_stages INPUT --tokenizer TOKENIZER [--test SET.jsonl] [--documents 250] [--output OUT]

The input's documents and changed copies of them are cleaned at three sizes, and at the largest in larger pieces too, in
one process. Processor seconds of each stage are fitted as a · MB + b · tasks (least squares, neither below 0) and
extrapolated to tasks of 256 MiB (the default run.piece_bytes) on all cores of all nodes, or on one core for each task.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.hardware import command_line, commit, cpu_name, describe
from benchmarks.minhash_speed import changed_copies
from colonnade.corpus.documents import read_documents
from colonnade.corpus.load import build
from colonnade.corpus.plan import keep_plan, make_plan
from colonnade.corpus.recipe import Recipe
from colonnade.corpus.run import run_stage
from colonnade.corpus.stages import stages
from colonnade.data.cleaning import Tokenizers
from colonnade.lock import locked

COPIES, PIECE, LARGE_PIECE = (0, 1, 3), 64 << 10, 512 << 10
TOTAL_BYTES, NODES, CORES, TASK_BYTES = 10e12, 64, 32, 256 << 20


class Cost(NamedTuple):
    """A stage of one run."""

    stage: str
    megabytes: float
    run_tasks: int
    """Of the run: of its stage `documents`."""
    tasks: int
    seconds: float
    """Of processor time."""


def measured(texts: Sequence[str], piece_bytes: int, tokenizer: str, test: str | None) -> list[Cost]:
    """The stages of one run over some texts."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "in.jsonl"
        source.write_text("".join(json.dumps({"text": text, "id": f"{n}"}) + "\n" for n, text in enumerate(texts)))
        content: dict[str, Any] = {
            "run": {"workers": 1, "piece_bytes": piece_bytes, "tokenizer": tokenizer},
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
            started = time.process_time()
            run_stage(recipe, stage, plan, folder, lock, progress=False)
            seconds = time.process_time() - started
            found.append(Cost(stage.name, megabytes, len(plan.tasks), stage.tasks, seconds))
    return found


def fitted(costs: Sequence[Cost]) -> tuple[float, float]:
    """(processor seconds for each MB, for each task of the run), neither below 0."""
    facts = np.array([(cost.megabytes, cost.run_tasks) for cost in costs])
    seconds = np.array([cost.seconds for cost in costs])
    best, least = (0.0, 0.0), float("inf")
    for chosen in ([0, 1], [0], [1]):
        answer = np.zeros(2)
        answer[chosen] = np.linalg.lstsq(facts[:, chosen], seconds, rcond=None)[0]
        error = float(((facts @ answer - seconds) ** 2).sum())
        if (answer >= 0).all() and error < least:
            best, least = (float(answer[0]), float(answer[1])), error
    return best


def table(runs: Sequence[Sequence[Cost]]) -> str:
    """A row for each stage."""
    head = [f"{run[0].megabytes:.1f} MB, {run[0].run_tasks} tasks" for run in runs]
    lines = [
        f"| stage | {' | '.join(head)} | s per GB | ms per task | 10 TB: tasks | 10 TB: wall time |",
        "|---" * (len(head) + 5) + "|",
    ]
    for name in dict.fromkeys(cost.stage for run in runs for cost in run):
        costs = [next((cost for cost in run if cost.stage == name), None) for run in runs]
        present = [cost for cost in costs if cost]
        by_mb, by_task = fitted(present)
        run_tasks = TOTAL_BYTES / TASK_BYTES
        seconds = by_mb * TOTAL_BYTES / 1e6 + by_task * run_tasks
        ratio = present[-1].tasks / present[-1].run_tasks
        single = all(cost.tasks == 1 for cost in present) and name not in ("gather", "join")
        tasks = {"gather": run_tasks / 64, "join": run_tasks / 1024}.get(name, 1 if single else run_tasks * ratio)
        wall = seconds / min(tasks, NODES * CORES)
        shown = " | ".join(f"{cost.seconds:.2f} s" if cost else "–" for cost in costs)
        lines.append(
            f"| {name} | {shown} | {by_mb * 1e3:.2f} | {by_task * 1e3:.1f} | {tasks:,.0f} | {_duration(wall)} |"
        )
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds > 5_400:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--test")
    parser.add_argument("--documents", type=int, default=250)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    texts = list(islice(read_documents([options.input]), options.documents))
    runs = [measured(changed_copies(texts, copies), PIECE, options.tokenizer, options.test) for copies in COPIES]
    runs.append(measured(changed_copies(texts, COPIES[-1]), LARGE_PIECE, options.tokenizer, options.test))
    text = (
        f"# Cost of each stage of cleaning\n\n{cpu_name()}, {describe()['cores']} cores, Python "
        f"{describe()['python']}, commit {commit()};\n`{command_line()}`\n\n{table(runs)}\n\n"
        f"The last column is for {NODES} nodes of {CORES} cores. Storage and network are not in it.\n"
    )
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
