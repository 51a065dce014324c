"""Which task reads what: written once, when a run is planned; each task reads its own line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from colonnade.atomic import written
from colonnade.corpus.formats import InputSplit


def store_tasks(folder: Path, tasks: Sequence[Sequence[InputSplit]]) -> None:
    """Writes down the input splits of all tasks, one line per task, and where each line begins."""
    lines = [f"{json.dumps([asdict(split) for split in task])}\n".encode("utf-8", "surrogatepass") for task in tasks]
    with written(_path(folder, "offsets")) as stream:
        stream.write(np.cumsum([0, *map(len, lines)]).astype("<i8").tobytes())
    with written(_path(folder, "jsonl")) as stream:
        stream.writelines(lines)


def stored_task(folder: Path, task: int) -> list[InputSplit]:
    """The input splits of one task."""
    with _path(folder, "offsets").open("rb") as offsets, _path(folder, "jsonl").open("rb") as lines:
        start, stop = np.frombuffer(os.pread(offsets.fileno(), 16, 8 * task), "<i8").tolist()
        return [InputSplit(**split) for split in json.loads(os.pread(lines.fileno(), stop - start, start))]


def _path(folder: Path, ending: str) -> Path:
    return folder / "state" / f"tasks.{ending}"
