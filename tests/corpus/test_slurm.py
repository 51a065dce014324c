"""Stages on Slurm: all arrays of one wait for all arrays of the one before, and no missing task changes the result."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colonnade.corpus.executors import slurm_executor
from colonnade.corpus.recipe import RunSection
from colonnade.corpus.slurm import check_no_jobs, remember_jobs
from colonnade.data.cleaning import clean
from colonnade.errors import DataError, LockError
from tests.corpus.recipes import Result, make_recipe, words
from tests.corpus.slurm import Cluster
from tests.corpus.test_run import same

Run = Callable[..., Result]
STEPS: dict[str, Any] = {"deduplicate": {"keep": "first"}, "split": {}}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


@pytest.fixture
def corpus(write_lines: Any) -> Path:
    """60 documents, of which some come again in another task."""
    texts = [" ".join(words(40, seed * seed % 43)) for seed in range(60)]
    path: Path = write_lines("in.jsonl", [{"text": text, "id": f"d{number}"} for number, text in enumerate(texts)])
    return path


def start(corpus: Path, folder: Path, **more: Any) -> str:
    options = {"piece_bytes": 3_000, "executor": "slurm", "slurm_partition": "cpu", "slurm_max_array": 3, **more}
    return clean(make_recipe(corpus, folder=folder, **STEPS, run=options), progress=False)


def stages(cluster: Cluster, jobs: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for job in jobs:
        found.setdefault(cluster.name(job), []).append(job)
    return found


def test_a_stage_waits_for_all_arrays_of_the_one_before(tmp_path: Path, cluster: Cluster, corpus: Path) -> None:
    said = start(corpus, tmp_path / "out", memory_gb=3, slurm_time="01:02:03", workers=2)
    by_stage = stages(cluster, cluster.submitted())
    assert list(by_stage) == ["documents", "match", "group", "finish", "account"]
    assert [cluster.size(job) for job in by_stage["documents"]] == [3, 3, 2]
    assert f"{3 + 3 + 1 + 3 + 1} jobs are submitted" in said
    for jobs in by_stage.values():
        told = [cluster.arguments(job).split()[0] for job in jobs]
        assert told == [f"--export=ALL,RUN_OFFSET={number}" for number in range(len(jobs))], "each has its own tasks"
    before: list[str] = []
    for jobs in by_stage.values():
        assert all(cluster.waits_for(job) == before for job in jobs), (
            "side by side, each behind all of the stage before"
        )
        assert all("--kill-on-invalid-dep=yes" in cluster.arguments(job) for job in jobs)
        before = jobs
    for line in ("#SBATCH --partition=cpu", "#SBATCH --mem-per-cpu=3G", "#SBATCH --time=01:02:03", "launch_pickled_"):
        assert line in cluster.script(by_stage["documents"][0])
    assert f"export PATH={sys.prefix}/bin:$PATH\n" in cluster.script(by_stage["documents"][0]), "this Python's programs"
    assert "--array=0-2%2\n" in cluster.script(by_stage["documents"][0]), "so many workers at once"
    assert "#SBATCH --requeue\n" in cluster.script(by_stage["documents"][0]), "an option that takes no value"
    assert "--qos" not in cluster.script(by_stage["documents"][0]), "a cluster need not have one"


def test_a_job_has_its_number_also_where_slurm_names_the_cluster_behind_it(
    tmp_path: Path, cluster: Cluster, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "c1")
    start(corpus, tmp_path / "out")
    jobs = cluster.submitted()
    assert json.loads((tmp_path / "out" / "state" / "jobs.json").read_text()) == jobs
    by_stage = stages(cluster, jobs)
    assert all(cluster.waits_for(job) == by_stage["documents"] for job in by_stage["match"])


def test_a_folder_with_a_space_is_one_path_to_slurm_and_to_the_shell(
    tmp_path: Path, cluster: Cluster, corpus: Path
) -> None:
    logs = tmp_path / "two words" / "state" / "logs" / "documents"
    start(corpus, tmp_path / "two words")
    job = cluster.submitted()[0]
    assert cluster.command_line(job)[-2:] == ["launch_pickled_pipeline", str(logs / "executor.pik")]
    options = cluster.options(job)
    assert options["--output"] == options["--error"] == str(logs / "slurm_logs" / "%A_%a.out")
    assert cluster.task(job, 0) is None and (logs / "completions" / "00000").exists()


def test_a_python_below_a_folder_with_a_space_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/two words")
    executor = slurm_executor(RunSection(), [], tasks=1, log=tmp_path, name="documents", after=[])
    assert executor.env_command == "export PATH='/two words'/bin:$PATH"


def test_tasks_that_fill_their_arrays_have_no_empty_one_behind(tmp_path: Path, cluster: Cluster, corpus: Path) -> None:
    start(corpus, tmp_path / "out", slurm_max_array=4)
    sizes = {stage: [cluster.size(job) for job in jobs] for stage, jobs in stages(cluster, cluster.submitted()).items()}
    assert sizes["documents"] == [4, 4] and min(map(min, sizes.values())) > 0


@pytest.mark.slow
def test_failing_late_and_repeated_tasks_change_nothing(
    tmp_path: Path, cluster: Cluster, corpus: Path, run: Run
) -> None:
    """A task of the first array is lost; the next stage does not start, and stops by itself when it is made to. Then
    the same command again: it does what is missing, the last array first, one task twice."""
    whole = run(corpus, folder="whole", **STEPS, run={"piece_bytes": 3_000})
    assert sum(whole.reasons("deduplicate").values()) > 10
    start(corpus, tmp_path / "out")
    first = stages(cluster, cluster.submitted())
    for job in reversed(first["documents"]):
        cluster.run(job, without=[1] if job == first["documents"][0] else (), order=-1)
    assert not any(cluster.run(job) for job in first["match"])
    error = cluster.task(first["match"][0], 0)
    assert isinstance(error, DataError) and "1 of 8 tasks of the stage documents are not done" in str(error)
    assert "documents/00001" in str(error)
    for stage in ("group", "finish", "account"):
        assert isinstance(cluster.task(first[stage][0], 0), DataError), "whoever starts it"
    known = set(cluster.submitted())
    start(corpus, tmp_path / "out")
    again = stages(cluster, [job for job in cluster.submitted() if job not in known])
    assert [cluster.size(job) for job in again["documents"]] == [1], "only what is missing"
    for jobs in again.values():
        for job in reversed(jobs):
            assert cluster.run(job, order=-1)
            assert cluster.task(job, 0) is None, "put into the queue again by Slurm"
    same(whole, Result(tmp_path / "out", ""))
    assert "nothing is left to do" in start(corpus, tmp_path / "out")


def test_a_folder_with_jobs_in_the_queue_takes_no_others(tmp_path: Path, cluster: Cluster, corpus: Path) -> None:
    start(corpus, tmp_path / "out")
    cluster.command(
        "squeue", '#!/bin/bash\necho "$@" > ' + str(tmp_path / "asked") + "\necho 1000_2\necho 1003_[0-2]\n"
    )
    with pytest.raises(LockError, match=r"in use by 2 Slurm jobs \(1000_2, 1003_\[0-2\]\).*scancel 1000 1001 "):
        start(corpus, tmp_path / "out")
    assert "--jobs=1000,1001," in (tmp_path / "asked").read_text()


def test_a_job_is_written_down_before_the_next_one_is_submitted(tmp_path: Path, cluster: Cluster, corpus: Path) -> None:
    """However the command ends meanwhile, the next start knows of all that Slurm has taken."""
    known = tmp_path / "known"
    known.write_text("")
    cluster.command(
        "sbatch",
        f"#!/bin/bash\nn=$(wc -l < {known})\ncat {tmp_path}/out/state/jobs.json >> {known}\necho >> {known}\n"
        "echo $((1000 + n))\n",
    )
    start(corpus, tmp_path / "out")
    jobs = [str(1000 + number) for number in range(11)]
    assert [json.loads(line or "[]") for line in known.read_text().splitlines()] == [jobs[:n] for n in range(11)]
    assert json.loads((tmp_path / "out" / "state" / "jobs.json").read_text()) == jobs


@pytest.mark.parametrize(
    ("taken", "stage"), [(0, "documents"), (3, "match"), (1, "documents")], ids=["first", "later", "second array"]
)
def test_a_job_that_slurm_does_not_take_is_told_with_those_that_are_submitted(
    tmp_path: Path, cluster: Cluster, corpus: Path, capfd: pytest.CaptureFixture[str], taken: int, stage: str
) -> None:
    cluster.refuse(taken)
    with pytest.raises(DataError) as told:
        start(corpus, tmp_path / "out")
    jobs = [str(1000 + number) for number in range(taken)]
    submitted = (
        f"Jobs {', '.join(jobs)} are submitted already: cancel them (scancel {' '.join(jobs)}), or wait until they "
    )
    assert str(told.value) == (
        f"Slurm has not taken a job of the stage {stage}: `sbatch` ended with exit status 3; what it said stands "
        "above. See whether run.slurm_partition, run.slurm_time, run.slurm_max_array, run.memory_gb and run.workers "
        "are what the cluster takes. "
        + (f"{submitted}have ended, and start again." if jobs else "Nothing is submitted: start again.")
    )
    assert "sbatch: error: invalid" in capfd.readouterr().err
    assert cluster.submitted() == jobs
    cluster.command("squeue", f"#!/bin/bash\necho {' '.join(jobs)}\n")
    cluster.refuse("none")
    if jobs:
        with pytest.raises(LockError, match=rf"in use by {taken} Slurm jobs .*: scancel {' '.join(jobs)}$"):
            start(corpus, tmp_path / "out")
    else:
        assert "jobs are submitted" in start(corpus, tmp_path / "out")


def test_where_nobody_knows_the_queue_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without Slurm, or in a folder in which nothing was ever submitted."""
    check_no_jobs(tmp_path)
    remember_jobs(tmp_path, ["1000", "1001"])
    monkeypatch.setenv("PATH", str(tmp_path))
    check_no_jobs(tmp_path)
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 1 2 3 4 5 6\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(LockError, match=r"in use by 6 Slurm jobs \(1, 2, 3, 4, 5, …\)\. .*: scancel 1000 1001$"):
        check_no_jobs(tmp_path)
    squeue.write_text("#!/bin/sh\necho 1001_7\n")
    with pytest.raises(LockError, match=r"in use by 1 Slurm jobs \(1001_7\)\. "):
        check_no_jobs(tmp_path)
    squeue.write_text("#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2\nexit 1\n")
    check_no_jobs(tmp_path)


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (
            "echo slurm_load_jobs error: Unable to contact slurm controller >&2",
            "slurm_load_jobs error: Unable to contact slurm controller",
        ),
        (":", "no message"),
    ],
)
def test_a_queue_that_cannot_be_asked_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, told: str
) -> None:
    remember_jobs(tmp_path, ["1000", "1001"])
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n{says}\nexit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        LockError,
        match=rf"not known: `squeue` ended with exit status 1 \({told}\)\. "
        r".*if jobs 1000, 1001 have ended, remove .*/state/jobs\.json\.$",
    ):
        check_no_jobs(tmp_path)


@pytest.mark.slow
def test_more_tasks_than_files_may_be_open(tmp_path: Path, run: Run, write_lines: Any) -> None:
    """70 tasks with at most 100 more open files; their bands are gathered into two files, and each has a document that
    is compared, for which two files are read."""
    texts = [" ".join(words(12, seed % 20)) for seed in range(70)]
    source = write_lines("in.jsonl", [{"id": f"d{number}", "text": text} for number, text in enumerate(texts)])
    whole = run(source, folder="whole", deduplicate={"keep": "first"})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 100, hard))
    try:
        many = run(source, folder="many", deduplicate={"keep": "first"}, run={"piece_bytes": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(many.manifest["inputs"]) == 70
    assert (many.folder / "state" / "logs" / "gather" / "completions" / "00001").exists()
    assert many.texts() == whole.texts() == texts[:20]
