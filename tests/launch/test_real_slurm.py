"""A job on a real Slurm of one node, which the test starts on this machine where it is installed."""

import json
import time
from pathlib import Path

import pytest

from tests.commands import colonnade, environment
from tests.launch import slurm_cluster
from tests.runs import metrics


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm_cluster.why_not()), reason=slurm_cluster.why_not() or "-")
def test_a_job_leaves_before_its_end_is_queued_again_and_ends(config: Path, tmp_path: Path) -> None:
    """Two ranks on a Slurm of one node: a signal long before the end, a requeue, and the whole run."""
    run, job = tmp_path / "run", tmp_path / "job.sbatch"
    keys = ["train.steps=400", "checkpoint.every=100", "train.evaluate_every=0", "optim.decay_steps=6"]
    arguments = ["slurm", config, f"run.folder={run}", "parallel.dp=2", *keys, "--ranks-per-node", 2]
    answer = colonnade(*arguments, "--time", "60", "--output", job)
    assert answer.status == 0, answer
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm_cluster.cluster(folder) as slurm:
        variables = {**environment(), **slurm}
        number = slurm_cluster.said("sbatch", "--parsable", str(job), environment=variables).strip()
        _until(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) > 20)
        slurm_cluster.said("scancel", "--batch", "--signal=USR1", number, environment=variables)
        _until(lambda: (run / "ended.json").exists())
        assert json.loads((run / "ended.json").read_text())["status"] == 99
        _until(lambda: "PD" in slurm_cluster.said("squeue", "-h", "-o", "%t", environment=variables))
        time.sleep(3.0)  # what a job may do is withdrawn by the second: Slurm kills one that starts again within it
        at_once = ("scontrol", "update", f"JobId={number}", "StartTime=now")  # a requeued job waits for two minutes
        slurm_cluster.said(*at_once, environment=variables)
        _until(lambda: "finished" in (run / "events.jsonl").read_text())
        _until(lambda: number not in slurm_cluster.said("squeue", "-h", "-o", "%i", environment=variables))
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert "interrupted" in events and "resumed" in events and [line["step"] for line in metrics(run)][-1] == 400


def _until(is_so: object, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end, "too late"
        time.sleep(0.2)
