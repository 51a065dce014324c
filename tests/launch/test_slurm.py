"""The batch script of a run: what it asks for, what is refused, and when it is queued again."""

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.launch.slurm import Job, problems, script, seconds_of
from colonnade.lock import locked
from tests.commands import here

GPUS = Job(2, 8, "24:00:00", name="books", logs="runs")


@pytest.fixture
def settings(config: Path) -> Config:
    return load(config, ["parallel.tp=2", "parallel.dp=8", "train.global_batch_size=64", "train.device=auto"])


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("24:00:00", 86400),
        ("2-12", 216000),
        ("1-2:30", 95400),
        ("1-1:1:1", 90061),
        ("x", None),
        ("1:2:3:4", None),
    ],
)
def test_times(time: str, seconds: int | None) -> None:
    assert seconds_of(time) == seconds


def test_in_the_name_of_the_logs_folder_a_percent_sign_is_one(settings: Config) -> None:
    """Slurm reads %n and its like in the names of files."""
    text = script(settings, Job(2, 8, "24:00:00", name="50%n", logs="100%n/5%j"), ["books.toml"], "python")
    assert "#SBATCH --output=100%%n/5%%j/%x-%j.log" in text.splitlines()


def test_what_is_asked_for(settings: Config) -> None:
    text = script(settings, GPUS, ["books.toml", "train.steps=5 000"], "/usr/bin/python3")
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --output=runs/%x-%j.log",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        '  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=8 --max-restarts=3 \\',
        "  -m colonnade train books.toml 'train.steps=5 000' &",
    ):
        assert line in text.splitlines(), line
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert not [line for line in asked if "partition" in line or "account" in line or "array" in line]
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    job = Job(2, 8, "24:00:00", array="1-4", partition="long", account="ada")
    staged = script(settings, job, ["books.toml"], "python")
    assert "#SBATCH --array=1-4%1" in staged and "scontrol requeue" not in staged
    assert {"#SBATCH --partition=long", "#SBATCH --account=ada"} <= {*staged.splitlines()}


@pytest.mark.parametrize(
    ("job", "asked"),
    [
        (
            GPUS,
            [
                "gpus-per-node=8",
                "cpus-per-task=8",
                "time=24:00:00",
                "signal=B:USR1@300",
                "output=runs/%x-%j.log",
                "open-mode=append",
            ],
        ),
        (
            Job(4, 4, "90", gpus=False, cpus_per_rank=3, margin=60, array="1-4", account="ada"),
            [
                *("cpus-per-task=12", "time=90", "signal=B:USR1@60", "output=./%x-%A-%a.log", "open-mode=append"),
                *("array=1-4%1", "account=ada"),
            ],
        ),
    ],
)
def test_one_task_on_each_node_starts_its_ranks(settings: Config, job: Job, asked: list[str]) -> None:
    """Torchrun does, from one task. Stages of an array have a log each."""
    lines = script(settings, job, ["books.toml"], "python").splitlines()
    options = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert options == [f"job-name={job.name}", f"nodes={job.nodes}", "ntasks-per-node=1", *asked, "requeue"]


@pytest.mark.parametrize("gpus", [True, False])
@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_a_run_has_the_devices_that_it_computes_on(settings: Config, device: str, gpus: bool) -> None:
    train = settings.train.model_copy(update={"device": device})
    found = list(problems(settings.model_copy(update={"train": train}), Job(2, 8, "60", gpus=gpus)))
    expected = {("cpu", True): "--gpus-per-node asks for GPUs", ("cuda", False): "--ranks-per-node asks for no GPUs"}
    assert [each.partition(",")[0] for each in found] == [
        why for which, why in expected.items() if which == (device, gpus)
    ]


def test_all_that_is_impossible_is_told_at_once(settings: Config) -> None:
    with pytest.raises(ConfigError) as caught:
        script(settings, Job(1, 3, "4", gpus=False, array="x", margin=300), ["books.toml"], "python")
    said = str(caught.value)
    assert said.startswith("no such job: 4 problems") and said.count("\n  - ") == 4
    assert "1 node × 3 ranks = 3 ranks, but the layout, tp 2 × pp 1 × dp 8, has 16" in said
    assert "A layout for them: parallel." in said and "tensor-parallel ranks would lie across two nodes" in said
    with pytest.raises(ConfigError, match=r"Ask for 16, or parallel\.dp=16"):
        script(settings, Job(4, 8, "60"), ["books.toml"], "python")


@pytest.mark.parametrize(
    ("ranks", "tp", "fits"), [(8, 8, True), (8, 2, True), (8, 16, False), (6, 4, False), (1, 2, False)]
)
def test_ranks_of_a_tensor_parallel_group_share_a_node(config: Path, ranks: int, tp: int, fits: bool) -> None:
    known = load(config)
    parallel = known.parallel.model_copy(update={"tp": tp, "dp": ranks * 4 // tp})
    found = problems(known.model_copy(update={"parallel": parallel}), Job(4, ranks, "24:00:00", gpus=False))
    assert any("would lie across two nodes" in each for each in found) != fits


@pytest.mark.parametrize(
    ("example", "nodes", "said"),
    [
        ("gpt2-355m", 3, r"Ask for 8\.$"),  # 24 does not divide the batch
        ("gpt2-355m", 2, r"Ask for 8, or parallel\.dp=16\.$"),
        ("bloom-176b", 47, r"A layout for them: parallel\.pp="),
        ("gpt2-8.3b", 31, r"A layout for them: parallel\.pp="),
        ("gpt2-8.3b", 32, r"A layout for them: parallel\.dp=32\.$"),
        ("gpt2-8.3b", 65, r"Ask for 512\.$"),
        ("gpt2-8.3b", 1, r"A layout for them: parallel\.dp=1\.$"),
    ],
)
def test_what_is_proposed_can_be_asked_for(example: str, nodes: int, said: str) -> None:
    """All machines are in it then, and no check has anything against it."""
    file = Path(__file__).parents[2] / "examples" / f"{example}.toml"
    (found,) = problems(load(file), Job(nodes, 8, "60"))
    assert re.search(f"each place needs a rank. (?:{said})", found), found
    for before in ("A layout for them: ", ", or "):
        keys = found.partition(before)[2].removesuffix(".").split()
        assert not keys or list(problems(load(file, keys), Job(nodes, 8, "60"))) == []


def test_as_many_whole_machines_are_proposed_as_a_layout_has() -> None:
    """Of 4 units there are no 7 stages, and 7 data-parallel ranks do not divide the batch."""
    file = Path(__file__).parents[2] / "examples" / "gpt2-355m.toml"
    (found,) = problems(load(file, ["model.num_layers=2", "parallel.tp=4"]), Job(7, 4, "60"))
    assert found.endswith("No layout has so many. Ask for 24, with parallel.pp=3 parallel.dp=2."), found


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 5), (1, 3), (5, 1), (2, 3)])
def test_no_proposal_tears_a_tensor_parallel_group(config: Path, nodes: int, ranks: int) -> None:
    keys = ["parallel.tp=2", "parallel.dp=4", "train.micro_batch_size=1"]
    found = next(problems(load(config, keys), Job(nodes, ranks, "60", gpus=False)))
    asked = re.search(r"Ask for (\d+), with (.*)\.$", found)
    proposed = asked[2] if asked else found.partition("A layout for them: ")[2].removesuffix(".")
    count = int(asked[1]) if asked else nodes * ranks
    machines = count // ranks or 1
    job = Job(machines, count // machines, "60", gpus=False)
    assert list(problems(load(config, [*keys, *proposed.split()]), job)) == []


@pytest.mark.parametrize(("array", "fits"), [("1", True), ("1-1", True), ("9-10", True), ("4-1", False), ("1-", False)])
def test_stages_rise(settings: Config, array: str, fits: bool) -> None:
    found = list(problems(settings, Job(2, 8, "24:00:00", array=array)))
    assert found == ([] if fits else [f"--array {array!r} names no stages. Write for instance 1-4."])


def test_a_folder_with_spaces_is_one_word(settings: Config) -> None:
    """As sbatch reads a line, which has the shell's quotes."""
    text = script(settings, Job(2, 8, "60", name="my books", logs="my runs/a"), ["books.toml"], "python")
    options = [shlex.split(line.removeprefix("#SBATCH ")) for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert all(len(words) == 1 for words in options)
    assert ["--output=my runs/a/%x-%j.log"] in options and ["--job-name=my books"] in options


def test_the_log_has_a_folder(config: Path, tmp_path: Path) -> None:
    """Slurm makes none."""
    arguments = ("slurm", config, "--ranks-per-node", 1, "--time", "1:00:00")
    answer = here(*arguments, f"run.folder={tmp_path}/runs/a/books")
    assert (answer.status, answer.err) == (0, "") and (tmp_path / "runs" / "a").is_dir(), answer
    (tmp_path / "file").touch()
    for logs in ("file", "file/deep"):
        answer = here(*arguments, f"run.folder={tmp_path}/{logs}/books")
        assert answer.status == 0 and answer.out.startswith("#!/bin/bash"), answer
        assert f"{tmp_path}/{logs}, where Slurm writes the job's log, cannot be made here" in answer.err


def test_a_job_has_a_minute_before_its_margin(settings: Config) -> None:
    assert "#SBATCH --time=6" in script(settings, Job(2, 8, "6", margin=300), ["books.toml"], "python")
    with pytest.raises(ConfigError, match="nothing would be trained"):
        script(settings, Job(2, 8, "5:59", margin=300), ["books.toml"], "python")


def test_the_command(config: Path, tmp_path: Path) -> None:
    written = tmp_path / "job" / "books.sbatch"
    arguments = ["slurm", config, "parallel.dp=2", "--ranks-per-node", 2, "--time", "1:00:00", "--output", written]
    answer = here(*arguments)
    assert answer.status == 0 and "2 ranks" in answer.out and written.read_text().startswith("#!/bin/bash\n")
    assert f"  -m colonnade train {config} parallel.dp=2 &" in written.read_text().splitlines()
    assert here("slurm", config).status == 2
    refused = here("slurm", config, "parallel.dp=2", "--gpus-per-node", 2)
    assert refused.status == 2 and 'train.device = "cpu" uses none' in refused.err


# --- a fake srun: what the script does with each end ------------------------------------------------------------------


PREEMPTED = "JobState=RUNNING Reason=None PreemptTime=2026-11-29T17:38:45"
ONE_RANK = Job(1, 1, "60", gpus=False)
STAGES = Job(1, 1, "60", gpus=False, array="1-2")
ASKED_TO_LEAVE = r"""
until [ -e "$RUN/leave" ]; do
  kill -USR1 $PPID  # the script, as Slurm does before the time is over; bash may miss one just before it waits
  sleep 0.1
done
sleep 0.2  # ranks that save: the script waits for them
echo '{"run": "7.0", "status": 99, "why": "", "time": 5.0}' > "$RUN/ended.json"
exit 1
"""
HAS_THE_FOLDER = """echo '{"run": "7.0", "status": null, "why": "", "time": 4.0}' > "$RUN/ended.json"; """
SAVES = 'mkdir -p "$RUN/checkpoints/step_00000010"; '


@pytest.mark.parametrize(
    ("srun", "status", "requeued"),
    [
        ("exit 0", 0, False),
        ('[ -e "$RUN/leave" ] && exit 5; exit 0', 0, False),
        ('echo \'{"run": "7.0", "status": 99, "why": ""}\' > "$RUN/ended.json"; exit 1', 99, True),
        ('echo \'{"run": "7.0", "status": 2, "why": ""}\' > "$RUN/ended.json"; exit 1', 2, False),
        ("exit 1", 1, False),
        (HAS_THE_FOLDER + "exit 1", 1, False),
        (HAS_THE_FOLDER + SAVES + "exit 1", 1, True),
        ('rm "$RUN/ended.json";' + SAVES + "exit 1", 1, True),
        ('echo \'{"run": "17.0", "status": 99, "why": ""}\' > "$RUN/ended.json"; exit 1', 1, False),
        ('echo \'{"run": "7.01", "status": 99, "why": ""}\' > "$RUN/ended.json"; exit 1', 1, False),
        (SAVES + "exit 1", 1, False),
        (HAS_THE_FOLDER + SAVES + 'touch "$RUN/stop"; exit 1', 1, False),
        (ASKED_TO_LEAVE, 99, True),
        (ASKED_TO_LEAVE.replace("-USR1", "-TERM"), 99, True),
    ],
)
def test_what_is_queued_again(config: Path, tmp_path: Path, srun: str, status: int, requeued: bool) -> None:
    """A job that has never had the folder, which names another, has saved nothing: it was refused, say. Where the disk
    was full, no job could be named.
    """
    assert ended(config, tmp_path, srun) == (status, requeued)


@pytest.mark.parametrize(
    ("said", "requeued"),
    [
        ("JobState=COMPLETING Reason=None PreemptTime=None", False),
        ("JobState=COMPLETING Reason=TimeLimit", True),
        ("JobState=COMPLETING Reason=None PreemptTime=2026-11-29T17:38:45", True),
    ],
    ids=["cancelled", "at its limit", "preempted"],
)
def test_a_job_that_is_cancelled_does_not_come_back(config: Path, tmp_path: Path, said: str, requeued: bool) -> None:
    """As Slurm 22.05 shows a job that it is ending, and whose ranks have saved and left meanwhile."""
    assert ended(config, tmp_path, ASKED_TO_LEAVE.replace("-USR1", "-TERM"), said)[1] == requeued


def test_a_job_that_is_preempted_before_its_first_step_comes_back(config: Path, tmp_path: Path) -> None:
    assert ended(config, tmp_path, "exit 1", PREEMPTED) == (1, True)


def test_a_job_leaves_alone_what_another_is_asked_that_has_the_run(config: Path, tmp_path: Path) -> None:
    """As where the same script is submitted twice."""
    with locked(tmp_path / "run", "colonnade train"):
        assert ended(config, tmp_path, '[ -e "$RUN/leave" ] && exit 5; exit 1') == (5, False)


def test_where_nothing_can_be_locked_the_leave_of_a_job_before_is_taken_back(config: Path, tmp_path: Path) -> None:
    """As on Lustre without its option `flock`: the job would leave behind its first step."""
    refuses = "echo 'flock: 3: Function not implemented' >&2; exit 69"
    assert ended(config, tmp_path, '[ -e "$RUN/leave" ] && exit 5; exit 0', flock=refuses) == (0, False)


def test_the_last_stage_is_judged_by_itself(config: Path, tmp_path: Path) -> None:
    """Its own number stands for all stages, of which another may have been preempted."""
    assert ended(config, tmp_path, "exit 1", job=STAGES) == (1, False)


@pytest.mark.parametrize(("last", "status"), [(2, 99), (4, 0)])
def test_only_a_stage_that_another_follows_has_ended_well_where_the_run_has_not(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, status: int
) -> None:
    """Whoever waits for the array with `afterok` waits for the run."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", str(last))
    assert ended(config, tmp_path, ASKED_TO_LEAVE, job=STAGES) == (status, False)


@pytest.mark.parametrize(("start", "status", "requeued"), [(0, 1, False), (1, 99, True)])
def test_each_start_of_a_job_has_a_name_of_its_own(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, status: int, requeued: bool
) -> None:
    """By which its ranks, and the script, know their end from that of the start before."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    notes = f"""echo '{{"run": "7.{start}", "status": 99, "why": ""}}' > "$RUN/ended.json"; """
    assert ended(config, tmp_path, notes + f'echo "$@" > {tmp_path}/asked; exit 1') == (status, requeued)
    assert "--rdzv-id=7.1" in (tmp_path / "asked").read_text().split()


def test_the_run_of_a_job_may_be_new(config: Path, tmp_path: Path) -> None:
    new = tmp_path / "runs" / "new"
    assert ended(config, tmp_path, f"[ -d {new} ] || exit 5; [ ! -e {new}/leave ]", keys=[f"run.folder={new}"])[0] == 0


def test_a_step_has_the_cores_that_its_job_was_given(config: Path, tmp_path: Path) -> None:
    """Srun of Slurm 22.05 and later does not take them from the job, and `sbatch -c` may have asked for others."""
    ended(config, tmp_path, f'echo "$2" > {tmp_path}/asked')
    assert (tmp_path / "asked").read_text() == "--cpus-per-task=3\n"


@pytest.mark.parametrize(
    ("ranks", "chosen", "openmp", "told"),
    [
        (1, 0, "", "train.threads=3"),
        (2, 0, "", "train.threads=1"),
        (4, 0, "", "train.threads=0"),
        (1, 2, "", "train.threads=2"),
        (1, 0, "8", "train.threads=0"),
        (1, 0, "1", "train.threads=1"),
        (2, 0, "1", "train.threads=1"),
    ],
)
def test_ranks_share_the_cores_that_the_job_was_given(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, chosen: int, openmp: str, told: str
) -> None:
    """Of a machine of the job: a step of Slurm may use all cores by default. What somebody has chosen stays."""
    monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    keys = [f"train.threads={chosen}", "train.micro_batch_size=1", "train.global_batch_size=8"]
    keys += [f"parallel.dp={2 * ranks}"]
    ended(config, tmp_path, f'echo "$@" > {tmp_path}/asked', job=Job(2, ranks, "60", gpus=False), keys=keys)
    words = (tmp_path / "asked").read_text().split()
    given = [*keys, *(word for word in words if word.startswith("train.threads="))]
    assert f"train.threads={load(config, given).train.threads}" == told


def ended(
    config: Path,
    tmp_path: Path,
    srun: str,
    said: str = "JobState=RUNNING Reason=None",
    job: Job = ONE_RANK,
    keys: Sequence[str] = (),
    flock: str = "",
) -> tuple[int, bool]:
    """(exit status of the script, whether its job is queued again), with such an srun and a job that Slurm shows so."""
    run, programs = tmp_path / "run", tmp_path / "bin"
    programs.mkdir()
    run.mkdir(exist_ok=True)
    (run / "checkpoints" / "step_00000005").mkdir(parents=True, exist_ok=True)  # of the job before, as the next lines
    (run / "leave").touch()
    (run / "ended.json").write_text('{"run": "6.0", "status": 99, "why": ""}')
    queued = tmp_path / "queued"
    shown = f"""case "$*" in
      "show job {"7_2" if job.array else 7}") echo "{said}";;
      "show job "*) echo "{PREEMPTED}";;
      *) echo node1;;
    esac"""
    commands = {"srun": srun, "scontrol": f'[ "$1" = requeue ] && echo "$2" >> {queued}; {shown}'}
    commands |= {"flock": flock} if flock else {}
    for name, body in commands.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(stat.S_IRWXU)
    text = script(load(config, [f"run.folder={run}", *keys]), job, [str(config)], sys.executable)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1", "RUN": str(run)}
    variables |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_PER_TASK": "3"}
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], env={**os.environ, **variables, **path}, check=False, timeout=60)
    return done.returncode, queued.exists()
