"""A stage starts when all tasks of the one before are done: whoever runs the tasks, and in whatever order.

The first task that finds all of them done leaves a file that says so, so that the others need not look at each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from colonnade.atomic import written
from colonnade.corpus.step import Setting
from colonnade.errors import DataError

_NAMED = 10


class Needs(PipelineStep):
    """The first step of a stage: stops its tasks unless all tasks of the stage before are done."""

    type, name = "colonnade", "needs"

    def __init__(self, stage: str, tasks: int, setting: Setting) -> None:
        self.stage, self.tasks, self.setting = stage, tasks, setting
        super().__init__()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        """What it is given. Raises DataError, with their names, where tasks are missing."""
        require(self.setting.folder, self.stage, self.tasks)
        return data


def require(folder: Path, stage: str, tasks: int) -> None:
    """Raises DataError unless all tasks of a stage are done."""
    proof = folder / "state" / "done" / stage
    if proof.exists():
        return
    if missing := missing_tasks(folder, stage, tasks):
        names = ", ".join(f"{stage}/{task:05d}" for task in missing[:_NAMED])
        more = ", …" if len(missing) > _NAMED else ""
        raise DataError(
            f"{len(missing)} of {tasks} tasks of the stage {stage} are not done, and what follows needs all of them: "
            f"{names}{more}. {log_folder(folder, stage)}/logs has a log of each. Start the same command again when the "
            "cause is mended: what is done is kept."
        )
    with written(proof) as stream:
        stream.write(f"{tasks}\n".encode())


def missing_tasks(folder: Path, stage: str, tasks: int) -> list[int]:
    """The tasks of a stage that are not done."""
    place = log_folder(folder, stage) / "completions"
    done = {entry.name for entry in os.scandir(place)} if place.is_dir() else set()
    return [task for task in range(tasks) if f"{task:05d}" not in done]


def log_folder(folder: Path, stage: str) -> Path:
    """Where a stage keeps its logs, and which of its tasks are done."""
    return folder / "state" / "logs" / stage
