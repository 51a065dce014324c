"""A stage as Slurm job arrays: all of them are submitted at once, and what follows waits for every one of them.

    stage 1   array 0-1000 ┐
              array 0-1000 ├─ afterok ─▶ stage 2   array …        a cluster takes arrays of so many tasks only
              array 0-47   ┘

A task that fails keeps the later stages from starting: Slurm cancels them. Starting the same command again submits what
is missing, once no job of the folder is in the queue any more.
"""

from __future__ import annotations

import importlib
import json
import math
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.executor.slurm import SlurmPipelineExecutor, launch_slurm_job

from colonnade.atomic import written
from colonnade.errors import LockError

_LONG_GONE = "Invalid job id"


class SlurmExecutor(SlurmPipelineExecutor):
    """datatrove's executor, with all arrays of a stage side by side."""

    def __init__(self, *arguments: Any, after: list[str], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.after = after

    def submitted(self) -> Iterator[str]:
        """Submits the tasks that are missing, one array after the other, and gives the number of each once Slurm has
        taken it; none where nothing is missing."""
        missing: list[int] = self.get_incomplete_ranks()
        if not missing:
            return
        with self.logging_dir.open("executor.pik", "wb") as stream:
            _dump(self, stream)
        with self.logging_dir.open("ranks_to_run.json", "w") as stream:
            json.dump(missing, stream)
        pickled = shlex.quote(self.logging_dir.resolve_paths("executor.pik"))
        script = f"srun -l -n 1 launch_pickled_pipeline {pickled}"
        for offset in range(math.ceil(len(missing) / self.max_array_size)):
            size = min(self.max_array_size, len(missing) - offset * self.max_array_size)
            arguments = [f"--export=ALL,RUN_OFFSET={offset}", "--kill-on-invalid-dep=yes", "--parsable"]
            if self.after:
                arguments.append(f"--dependency=afterok:{':'.join(self.after)}")
            # sbatch takes quotes as a shell does
            options = {name: value and shlex.quote(str(value)) for name, value in self.get_sbatch_args(size).items()}
            content = self.get_launch_file_contents(options, script)
            yield launch_slurm_job(content, _number, *arguments)


def _number(said: str) -> str:
    """Of a job, in what `sbatch --parsable` says: NUMBER, or NUMBER;CLUSTER where there are several clusters."""
    return said.split()[-1].partition(";")[0]


def _dump(executor: Any, stream: Any) -> None:
    dill: Any = importlib.import_module("dill")
    dill.dump(executor, stream, fmode=dill.CONTENTS_FMODE)


def not_taken(stage: str, status: int, jobs: list[str]) -> str:
    """What is said where `sbatch` has not taken a job. `jobs`: those that it has taken before."""
    said = (
        f"Slurm has not taken a job of the stage {stage}: `sbatch` ended with exit status {status}; what it said "
        "stands above. See whether run.slurm_partition, run.slurm_time, run.slurm_max_array, run.memory_gb and "
        "run.workers are what the cluster takes."
    )
    if not jobs:
        return f"{said} Nothing is submitted: start again."
    return (
        f"{said} Jobs {', '.join(jobs)} are submitted already: cancel them (scancel {' '.join(jobs)}), or wait until "
        "they have ended, and start again."
    )


def remember_jobs(folder: Path, jobs: list[str]) -> None:
    """Writes down which jobs work on a folder."""
    with written(_jobs_path(folder)) as stream:
        stream.write(json.dumps(jobs).encode())


def check_no_jobs(folder: Path) -> None:
    """Raises LockError where jobs of an earlier start are still in the queue, or may be."""
    path = _jobs_path(folder)
    if not path.exists() or shutil.which("squeue") is None:
        return
    jobs = json.loads(path.read_bytes())
    asked = ["squeue", "--noheader", "--format=%i", f"--jobs={','.join(jobs)}"]
    answer = subprocess.run(asked, capture_output=True, text=True)  # of jobs long gone it is silent, of one an error
    if answer.returncode and _LONG_GONE not in answer.stderr:
        said = " ".join(answer.stderr.split()) or "no message"
        raise LockError(
            f"whether jobs of an earlier start still work in {folder} is not known: `squeue` ended with exit status "
            f"{answer.returncode} ({said}). Start again when it answers; or, if jobs {', '.join(jobs)} have ended, "
            f"remove {path}."
        )
    found = answer.stdout.split()
    if found:
        raise LockError(
            f"{folder} is in use by {len(found)} Slurm jobs ({', '.join(found[:5])}{', …' if len(found) > 5 else ''}). "
            f"Wait until they have ended, or cancel them: scancel {' '.join(jobs)}"
        )


def _jobs_path(folder: Path) -> Path:
    return folder / "state" / "jobs.json"
