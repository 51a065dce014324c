"""Under torchrun: fewer ranks than the layout has, ranks left idle, and ends that nobody is to start again."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from colonnade import lock
from colonnade.config.fitting import Fit
from colonnade.config.load import load
from colonnade.errors import ConfigError, DiskError, LayoutError, LockError, MemoryShortError
from colonnade.launch import agent, launch
from colonnade.launch.agent import PREFIX
from colonnade.lock import locked
from colonnade.train import ending as module
from colonnade.train import start
from colonnade.train.ending import FILE, ending
from colonnade.train.memory_folder import MEMORY
from tests.commands import Answer, environment, forked
from tests.runs import assert_near, assert_same_end, events, metrics

BEGAN = time.time() - 1.0
"""When torchrun's agent has started."""


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(launch.STARTED, "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr(launch, "tell_idle", lambda: None)
    monkeypatch.setattr(agent, "began", lambda: BEGAN)
    return monkeypatch


def noted(note: Path) -> dict[str, Any]:
    """Without its time."""
    content: dict[str, Any] = json.loads(note.read_text())
    assert content.pop("time") > BEGAN
    return content


GOES_ON = {"run": "job", "status": None, "why": ""}


def test_a_mistake_and_a_leave_are_final_and_what_may_pass_is_not(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch
) -> None:
    """Also where the agent counts no restart: another machine's ranks had ended before those of this one."""
    settings = load(config)
    (tmp_path / "run").mkdir()
    note = tmp_path / "run" / FILE
    for passing in (MemoryShortError("x"), ValueError("y"), DiskError("the disk is full"), SystemExit(75)):
        with pytest.raises(type(passing)), ending(settings):
            assert noted(note) == GOES_ON
            raise passing
        assert noted(note) == GOES_ON
    with pytest.raises(ConfigError), ending(settings):
        raise ConfigError("z")
    assert noted(note) == {"run": "job", "status": 2, "why": "z"}
    for rank in "01":
        under_torchrun.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end, ending(settings):
            raise AssertionError("it has ended for good")
        assert end.value.code == 2 and noted(note)["why"] == "z"
    under_torchrun.setenv("RANK", "0")
    under_torchrun.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(SystemExit), ending(settings):
        raise SystemExit(99)
    assert noted(note) == {"run": "another", "status": 99, "why": "it was asked to leave"}


@pytest.mark.parametrize("when", [BEGAN - 0.5, BEGAN + 3600.0], ids=["older", "by a clock that is ahead"])
def test_an_earlier_job_of_the_same_name_ends_no_later_one(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch, when: float
) -> None:
    """Whatever --rdzv-id says: what is older than torchrun's agent is no end of this job."""
    settings, note = load(config), tmp_path / "run" / FILE
    note.parent.mkdir()
    earlier = {"run": "job", "status": 99, "why": "it was asked to leave", "time": when}
    note.write_text(json.dumps(earlier))
    under_torchrun.setenv("RANK", "1")
    with pytest.raises(ConfigError), ending(settings):
        raise ConfigError("it is not known yet whose folder this is")
    assert json.loads(note.read_text()) == earlier
    under_torchrun.setenv("RANK", "0")
    with pytest.raises(ValueError, match="lost"), ending(settings):
        assert noted(note) == GOES_ON
        raise ValueError("a rank is lost")
    with ending(settings):
        pass
    assert not note.exists(), "behind a good end"


def test_where_no_agent_is_known_its_count_of_restarts_tells(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch
) -> None:
    under_torchrun.setattr(agent, "began", lambda: None)
    settings, note = load(config), tmp_path / "run" / FILE
    note.parent.mkdir()
    note.write_text(json.dumps({"run": "job", "status": 99, "why": "", "time": 1.0}))
    under_torchrun.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(SystemExit), ending(settings):
        raise AssertionError("it has ended for good")
    under_torchrun.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(ValueError, match="lost"), ending(settings):
        assert noted(note) == GOES_ON
        raise ValueError("a rank is lost")


def test_a_mistake_of_one_rank_is_noted_where_the_folder_is_this_jobs(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch
) -> None:
    """Which ranks that end because of it do not take the place of, but for rank 0. At a good end none removes it."""
    settings, note, idle = load(config), tmp_path / "run" / FILE, list[str]()
    note.parent.mkdir()
    under_torchrun.setattr(launch, "tell_idle", lambda: idle.append(os.environ["RANK"]))
    with pytest.raises(ValueError, match="lost"), ending(settings):
        raise ValueError("a rank is lost")
    with pytest.raises(ConfigError, match="another's"), ExitStack() as ranks:
        under_torchrun.setenv("RANK", "2")
        ranks.enter_context(ending(settings))
        under_torchrun.setenv("RANK", "1")
        with pytest.raises(ConfigError, match="its own"), ending(settings):
            raise ConfigError("its own")
        raise ConfigError("another's")
    assert noted(note)["why"] == "its own"
    under_torchrun.setenv("RANK", "1")
    written = note.read_text()
    note.write_text(json.dumps({**GOES_ON, "time": time.time()}))
    with ending(settings):
        note.write_text(written)
    assert noted(note)["why"] == "its own"
    note.write_text(json.dumps({"run": "another", "status": 2, "why": "", "time": time.time()}))
    for rank in "10":
        under_torchrun.setenv("RANK", rank)
        with ending(settings):
            pass
    assert idle == ["0"], "ranks that are left idle are told by rank 0 alone"
    text = json.dumps({"run": "job", "status": "2", "time": time.time()})
    for damaged in (text, '{"run": "job", "status": 2}', "[2]", "{"):
        note.write_text(damaged)
        with ending(settings):
            pass


def test_rank_0_notes_its_end_whatever_is_noted(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch
) -> None:
    """Also where the disk was full as it began, or another rank was asked to leave meanwhile."""
    settings, note = load(config), tmp_path / "run" / FILE
    note.parent.mkdir()
    for before in (None, {"run": "job", "status": 99, "why": "", "time": time.time()}):
        with pytest.raises(ConfigError), ending(settings):
            note.unlink()
            if before is not None:
                note.write_text(json.dumps(before))
            raise ConfigError("z")
        assert noted(note) == {"run": "job", "status": 2, "why": "z"}
        note.unlink()


@pytest.mark.parametrize("removes", [True, False])
def test_a_disk_that_takes_no_note_ends_nobody(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch, removes: bool
) -> None:
    """The end of a job before is no more there for whoever would take it for this one's, if it can be removed."""
    settings, note = load(config), tmp_path / "run" / FILE
    note.parent.mkdir()
    note.write_text('{"run": "another", "status": 99, "why": ""}')

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    under_torchrun.setattr(module, "write_whole", refuse)
    if not removes:
        under_torchrun.setattr(Path, "unlink", refuse)
    with pytest.raises(ConfigError, match="z"), ending(settings):
        assert note.exists() is not removes
        raise ConfigError("z")
    with ending(settings):
        pass


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_job_that_finds_the_folder_in_use_notes_nothing_there(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch, rank: str
) -> None:
    """As where the same batch script is submitted twice."""
    under_torchrun.setattr(lock, "_PATIENCE_SECONDS", 0.0)
    settings, note = load(config), tmp_path / "run" / FILE
    with locked(tmp_path / "run", "colonnade train"):
        note.write_text('{"run": "first", "status": 99, "why": ""}')
        under_torchrun.setenv("WORLD_SIZE", "1" if rank == "0" else "2")
        under_torchrun.setenv("RANK", rank)
        settings = load(config, ["parallel.dp=2"] * (rank == "1"))
        with pytest.raises((LockError, ConfigError)), start.owned(settings):
            raise ConfigError("a GPU is missing")
        assert note.read_text() == '{"run": "first", "status": 99, "why": ""}'


def test_a_mistake_in_a_new_folder_is_noted(config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch) -> None:
    under_torchrun.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError), start.owned(load(config)):
        raise ConfigError("z")
    assert noted(tmp_path / "run" / FILE)["status"] == 2
    (tmp_path / "run" / FILE).unlink()
    (tmp_path / "run").rmdir()
    with start.owned(load(config)):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shows", ["train.same_run.check", "train.start._finish_rollback"])
def test_a_mistake_that_the_folder_shows_is_noted(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch, shows: str
) -> None:
    """That another run lives there, or a checkpoint of a course that was left: no later start would mend it."""

    def refused(*_: object, **_given: object) -> None:
        raise ConfigError("it is another's")

    under_torchrun.setenv("WORLD_SIZE", "1")
    under_torchrun.setattr(f"colonnade.{shows}", refused)
    with pytest.raises(ConfigError, match="another's"), start.owned(load(config)):
        pytest.fail("it is not this run's")
    assert noted(tmp_path / "run" / FILE) == {"run": "job", "status": 2, "why": "it is another's"}


def test_a_rank_beside_rank_0_notes_its_mistake_and_finds_what_is_noted(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch
) -> None:
    settings, note = load(config, ["parallel.dp=2"]), tmp_path / "run" / FILE
    note.parent.mkdir()
    note.write_text(json.dumps({**GOES_ON, "time": time.time()}))
    under_torchrun.setenv("WORLD_SIZE", "2")
    under_torchrun.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="its own"), start.owned(settings) as kept:
        assert kept == ()
        raise ConfigError("its own")
    assert noted(note) == {"run": "job", "status": 2, "why": "its own"}
    with pytest.raises(SystemExit) as end, start.owned(settings):
        pytest.fail("it has ended for good")
    assert end.value.code == 2


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_dry_run_notes_nothing(config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch, rank: str) -> None:
    """What a run of before has noted stays, and ranks that are left idle are told all the same."""
    idle = list[str]()
    under_torchrun.setattr(launch, "tell_idle", lambda: idle.append(os.environ["RANK"]))
    under_torchrun.setenv("RANK", rank)
    under_torchrun.setenv("WORLD_SIZE", "2")
    settings, run = load(config, ["parallel.dp=2"]), tmp_path / "run"
    with pytest.raises(ConfigError), start.owned(settings, dry_run=True):
        raise ConfigError("z")
    assert not run.exists()
    run.mkdir()
    (run / FILE).write_text('{"run": "before", "status": 99, "why": ""}')
    with start.owned(settings, dry_run=True):
        pass
    assert (run / FILE).read_text() == '{"run": "before", "status": 99, "why": ""}'
    assert idle == ["0"] * (rank == "0")


def test_the_layout_follows_the_ranks(config: Path, under_torchrun: pytest.MonkeyPatch) -> None:
    settings = load(config, ["parallel.tp=2", "parallel.dp=2", "model.num_layers=1"])
    fitted = start.fitted(settings)
    assert fitted is not None and fitted.num_ranks <= 3
    assert os.environ["WORLD_SIZE"] == str(fitted.num_ranks)
    under_torchrun.setenv("WORLD_SIZE", "4")
    assert start.fitted(settings) == Fit(settings, "")
    under_torchrun.setenv("WORLD_SIZE", "3")
    off = load(config, ["parallel.dp=4", "train.micro_batch_size=1", "restarts.fewer_ranks=false"])
    assert start.fitted(off) == Fit(off, ""), "which is refused, as before"


def test_fewer_ranks_are_noted_in_a_folder_that_is_held(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch
) -> None:
    """Not before: it may be that of another run."""
    run, settings = tmp_path / "run", load(config, ["parallel.tp=2", "parallel.dp=2", "model.num_layers=1"])
    run.mkdir()
    fitted = start.fitted(settings)
    assert fitted is not None and not list(run.iterdir())
    start.note_fewer_ranks(Fit(settings, ""))
    assert not list(run.iterdir())
    start.note_fewer_ranks(fitted)
    assert [(each["event"], each["reason"]) for each in events(run)] == [("fewer ranks", fitted.reason)]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_the_wrong_number_of_ranks_no_folder_stays(
    config: Path, tmp_path: Path, under_torchrun: pytest.MonkeyPatch, rank: str
) -> None:
    """Not for a moment: whichever rank notes the mistake would find it."""
    under_torchrun.setenv("RANK", rank)
    settings = load(config, [f"run.folder={tmp_path / 'wrong'}"])
    with pytest.raises(LayoutError, match="WORLD_SIZE = 3"), start.owned(settings):
        raise AssertionError("not owned")
    assert not (tmp_path / "wrong").exists()


def test_rank_0_tells_of_mistakes_first(config: Path, under_torchrun: pytest.MonkeyPatch) -> None:
    """It alone looks into files; where it has not ended the other ranks by then, they tell what they have found."""
    waited: list[float] = []
    under_torchrun.setattr(time, "sleep", waited.append)
    wrong = ["train.steps=-1", "data.train=/nowhere"]
    with pytest.raises(ConfigError, match="nowhere") as first:
        start.load_for_run(config, wrong)
    assert "train.steps" in str(first.value) and waited == []
    under_torchrun.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"train\.steps") as second:
        start.load_for_run(config, wrong)
    assert "nowhere" not in str(second.value) and waited == [start.TURN_OF_RANK_0]


def command(num_ranks: int, *arguments: object, restarts: int = 0) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*words, f"--max-restarts={restarts}", "-m", "colonnade", *map(str, arguments)]


def torchrun(num_ranks: int, *arguments: object, restarts: int = 0) -> Answer:
    words = command(num_ranks, *arguments, restarts=restarts)
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=200, check=False)
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_a_program_may_join_its_ranks_again_and_again(tmp_path: Path) -> None:
    """As one that measures several checkpoints: torchrun's store has the addresses of the groups before."""
    program = tmp_path / "program.py"
    program.write_text(
        """import torch
from colonnade.launch.join import joined
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.layout import Layout

for number in range(5):
    with joined(Layout(tp=2), "cpu", timeout=60.0) as (mesh, _):
        total = all_reduce(torch.tensor([mesh.rank + number]), mesh.tp)
    assert total.item() == 1 + 2 * number and not torch.distributed.is_initialized()
"""
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=200, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_all_mistakes_are_told_at_once_and_once(config: Path) -> None:
    answer = torchrun(2, "train", config, "parallel.dp=2", "train.steps=-1", "data.train=/nowhere")
    told = [line for line in answer.err.splitlines() if line.startswith(("colonnade: ", "  ")) and "/nowhere" in line]
    assert answer.status == 1 and len(told) == 1 and answer.err.count("colonnade: ") == 1
    assert answer.err.count("train.steps") == 1


@pytest.mark.slow
def test_three_ranks_of_four_train_the_same(config: Path, tmp_path: Path) -> None:
    exact = ["train.precision=fp64", "optim.epsilon=1e-6", "model.num_layers=1", "train.micro_batch_size=1"]
    expected, run = tmp_path / "expected", tmp_path / "other"
    assert forked("train", config, f"run.folder={expected}", *exact).status == 0
    answer = torchrun(3, "train", config, f"run.folder={run}", *exact, "parallel.dp=4", "parallel.zero=0")
    assert answer.status == 0, answer
    assert "Going on with fewer ranks: " in answer.out
    assert_near(run, expected)


@pytest.mark.slow
def test_a_run_that_leaves_is_not_started_again(config: Path, tmp_path: Path) -> None:
    answer = torchrun(1, "train", config, "run.time_limit=0.001", restarts=2)
    assert answer.status == 1 and [each["event"] for each in events(tmp_path / "run")].count("setup") == 1
    assert json.loads((tmp_path / "run" / FILE).read_text())["status"] == 99


@pytest.mark.slow
def test_a_run_that_leaves_ends_on_all_machines(config: Path, tmp_path: Path) -> None:
    """Rank 0 alone is asked, and its agent waits for another that waits for it, where the other rank ends otherwise."""
    run = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    words += ["--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint=localhost:{port}", "-m", "colonnade"]
    words += ["train", str(config), "parallel.dp=2", "train.steps=100000", "optim.decay=constant"]
    words += ["train.evaluate_every=0"]
    agents = [subprocess.Popen(words, env=environment()) for _ in range(2)]
    try:
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 3:
            assert [agent.poll() for agent in agents] == [None, None]
            time.sleep(0.01)
        (run / "leave").touch()
        assert [agent.wait(120.0) for agent in agents] == [1, 1]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(60.0)
    assert noted(run / FILE) == {"run": "job", "status": 99, "why": "it was asked to leave"}
    assert [each["event"] for each in events(run)].count("setup") == 1 and not (run / "leave").exists()


@pytest.mark.slow
def test_a_killed_rank_goes_on_from_memory(config: Path, tmp_path: Path) -> None:
    """Torchrun starts both ranks again, with its store of before. Its agent's folder is gone when it has ended."""
    run, expected = tmp_path / "run", tmp_path / "expected"
    keys = ["parallel.dp=2", "train.steps=60", "checkpoint.every=20", "optim.decay_steps=6", "train.evaluate_every=0"]
    words = command(2, "train", config, *keys, "checkpoint.memory_every=1", restarts=1)
    ranks = subprocess.Popen(words, env=environment())
    try:
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) <= 22:
            assert ranks.poll() is None
            time.sleep(0.01)
        assert len(list(MEMORY.glob(f"{PREFIX}*-{ranks.pid}-*"))) == 1
        _, second = Path(f"/proc/{ranks.pid}/task/{ranks.pid}/children").read_text().split()
        os.kill(int(second), signal.SIGKILL)
        assert ranks.wait(300.0) == 0
    finally:
        ranks.kill()
    (resumed,) = [each for each in events(run) if each["event"] == "resumed"]
    assert resumed["origin"] == "memory" and resumed["step"] > 20
    end = time.monotonic() + 60.0
    while list(MEMORY.glob(f"{PREFIX}*-{ranks.pid}-*")):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert forked("train", config, *keys, f"run.folder={expected}", num_ranks=2).status == 0
    assert_same_end(run, expected)


@pytest.mark.slow
def test_a_lost_disk_is_fetched_while_the_other_rank_waits(config: Path, tmp_path: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "store"
    words = ("train", config, "parallel.dp=2", f"checkpoint.upload_to=file://{store}")
    assert forked(*words, num_ranks=2).status == 0
    run.rename(tmp_path / "expected")
    shutil.rmtree(store / "step_00000006")
    answer = torchrun(2, *words)
    assert answer.status == 0 and "Fetched step_00000004" in answer.out, answer
    assert_same_end(run, tmp_path / "expected")
