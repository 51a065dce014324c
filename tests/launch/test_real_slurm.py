"""A job on a real Slurm of one node, which the test starts on this machine where it is installed."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import colonnade, environment
from tests.launch import slurm_cluster
from tests.runs import events, metrics, saved_steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_cluster.why_not()), reason=slurm_cluster.why_not() or "-"),
]


def test_a_job_leaves_before_its_end_is_queued_again_and_ends(config: Path, tmp_path: Path) -> None:
    """Two ranks on a Slurm of one node: a signal long before the end, a requeue, and the whole run."""
    run = tmp_path / "run"
    with _submitted(config, tmp_path, run) as (number, variables):
        slurm_cluster.said("scancel", "--batch", "--signal=USR1", number, environment=variables)
        _until(lambda: json.loads((run / "ended.json").read_text())["status"] == 99)
        _until(lambda: "PD" in slurm_cluster.said("squeue", "-h", "-o", "%t", environment=variables))
        time.sleep(3.0)  # what a job may do is withdrawn by the second: Slurm kills one that starts again within it
        at_once = ("scontrol", "update", f"JobId={number}", "StartTime=now")  # a requeued job waits for two minutes
        slurm_cluster.said(*at_once, environment=variables)
        _until(lambda: "finished" in (run / "events.jsonl").read_text())
        _until(lambda: number not in slurm_cluster.said("squeue", "-h", "-o", "%i", environment=variables))
    seen = {event["event"] for event in events(run)}
    assert {"interrupted", "resumed"} <= seen and [line["step"] for line in metrics(run)][-1] == 400


def test_a_job_that_is_cancelled_saves_and_does_not_come_back(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with _submitted(config, tmp_path, run) as (number, variables):
        slurm_cluster.said("scancel", number, environment=variables)
        _until(lambda: number not in slurm_cluster.said("squeue", "-h", "-o", "%i", environment=variables))
        shown = slurm_cluster.said("scontrol", "show", "job", number, environment=variables)
    assert "JobState=CANCELLED" in shown and "Restarts=0" in shown, shown
    assert saved_steps(run)[-1] == metrics(run)[-1]["step"] and events(run)[-1]["event"] == "interrupted"


@contextmanager
def _submitted(config: Path, tmp_path: Path, run: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(number of a job that has made more than 20 of 400 steps on two ranks, environment for Slurm's programs)."""
    job, folder = tmp_path / "job.sbatch", tmp_path / "slurm"
    keys = ["train.steps=400", "checkpoint.every=100", "train.evaluate_every=0", "optim.decay_steps=6"]
    arguments = ["slurm", config, f"run.folder={run}", "parallel.dp=2", *keys, "--ranks-per-node", 2]
    answer = colonnade(*arguments, "--time", "60", "--output", job)
    assert answer.status == 0, answer
    folder.mkdir()
    with slurm_cluster.cluster(folder) as slurm:
        variables = {**environment(), **slurm}
        number = slurm_cluster.said("sbatch", "--parsable", str(job), environment=variables).strip()
        _until(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) > 20)
        yield number, variables


def _until(is_so: object, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end, "too late"
        time.sleep(0.2)
