"""Copies of the state in memory: a restart goes on from the newest of memory and disk, to the same bits."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from colonnade.checkpoint.agree import Agreement
from colonnade.checkpoint.names import newest_step
from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError, ColonnadeError
from colonnade.launch import agent, launch
from colonnade.mesh.mesh import Mesh
from colonnade.mesh.process import ProcessId, mine
from colonnade.train import memory_copies, memory_folder, rollbacks, undo
from colonnade.train.divergence import Divergence, in_force
from colonnade.train.memory_copies import START, MemoryCopies
from colonnade.train.memory_folder import folder_for
from colonnade.train.run_folder import COPIES
from tests.commands import environment, forked, here
from tests.drills.faults import ranks_of
from tests.launch.test_agent import ended
from tests.runs import Finished, assert_same_end, events, metrics
from tests.told import Told

KEYS = ("checkpoint.memory_every=1", "checkpoint.every=4", "checkpoint.keep=2")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for a folder of /dev/shm that a supervisor has made."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(launch.MEMORY, str(folder))
    return folder


def killed_after(step: int) -> Callable[[int], None]:
    def first(rank: int) -> None:
        from colonnade.train import loop

        begin = loop.train_step

        def or_end(state: Any, *args: Any, **more: Any) -> Any:
            if state.step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return begin(state, *args, **more)

        loop.__dict__["train_step"] = or_end

    return first


def killed_run(finished: Finished, run: Path, step: int = 5) -> None:
    answer = forked("train", finished.config, f"run.folder={run}", *KEYS, first=killed_after(step))
    assert answer.status == -signal.SIGKILL


def test_it_goes_on_from_memory_to_the_same_bits(finished: Finished, tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    killed_run(finished, run)
    assert newest_step(memory) == 5 and newest_step(run / "checkpoints") == 4
    assert {path.name for path in memory.iterdir()} == {"step_00000005", "start"}, "one copy, and nothing besides"
    answer = forked("train", finished.config, f"run.folder={run}", *KEYS)
    assert answer.status == 0
    assert_same_end(run, finished.folder)
    (resumed,) = [event for event in events(run) if event["event"] == "resumed"]
    assert (resumed["step"], resumed["origin"]) == (5, "memory")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_a_damaged_copy_is_passed_over(finished: Finished, tmp_path: Path, memory: Path, name: str) -> None:
    run = tmp_path / "run"
    killed_run(finished, run)
    file = memory / "step_00000005" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    answer = forked("train", finished.config, f"run.folder={run}", *KEYS)
    assert answer.status == 0 and "The run goes on from the disk." in answer.out
    assert_same_end(run, finished.folder)
    told = [event for event in events(run) if event["event"] in ("damaged copy in memory", "resumed")]
    assert [event.get("origin") for event in told] == [None, "disk"] and told[1]["step"] == 4


def test_a_copy_that_is_passed_over_is_removed(config: Path, memory: Path) -> None:
    """The next start would meet it again, should this one be killed before its first copy."""
    damaged, monitor = memory / "step_00000005", Told()
    damaged.mkdir()
    copies = MemoryCopies(load(config, KEYS), Mesh(), monitor)  # type: ignore[arg-type]
    copies._pass_over(damaged, "It is damaged.")
    assert not damaged.exists() and monitor.said == ["It is damaged. The run goes on from the disk."]
    details = {"checkpoint": "step_00000005", "reason": "It is damaged."}
    assert monitor.events == [("damaged copy in memory", details)]


@pytest.mark.slow
def test_half_a_copy_is_nothing(finished: Finished, tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    killed_run(finished, run)
    (memory / "step_00000005").rename(memory / ".step_00000005.partial")
    assert forked("train", finished.config, f"run.folder={run}", *KEYS).status == 0
    assert_same_end(run, finished.folder)
    assert [event["origin"] for event in events(run) if event["event"] == "resumed"] == ["disk"]
    assert not list(memory.glob(".*"))


@pytest.mark.slow
def test_copies_of_another_start_are_not_looked_at(finished: Finished, tmp_path: Path, memory: Path) -> None:
    """Of a run that is begun anew, say, or of a machine that was away while the run went on."""
    run = tmp_path / "run"
    killed_run(finished, run)
    (memory / START).write_text("another")
    assert forked("train", finished.config, f"run.folder={run}", *KEYS, "train.steps=5").status == 0
    assert [event["origin"] for event in events(run) if event["event"] == "resumed"] == ["disk"]
    assert (memory / START).read_text() == (run / COPIES).read_text() and newest_step(memory) == 0


@pytest.mark.parametrize("content", [b"\xff", None])
def test_what_says_which_copies_count_may_be_damaged(config: Path, tmp_path: Path, content: bytes | None) -> None:
    """No copy counts then. Rank 0 alone reads it: an error would leave the others waiting."""
    file = tmp_path / "run" / COPIES
    file.parent.mkdir()
    (tmp_path / "run" / "checkpoints" / "step_00000004").mkdir(parents=True)
    file.mkdir() if content is None else file.write_bytes(content)
    told: list[str] = []
    monitor = SimpleNamespace(event=lambda *_, **__: None, say=told.append)
    copies = MemoryCopies(load(config), Mesh(), monitor)  # type: ignore[arg-type]
    assert copies._on_disk() == (0, "") and "Which copies in memory are the run's cannot be read" in told[0]


def test_copies_of_a_start_that_is_no_text_count_as_those_of_another(config: Path, memory: Path) -> None:
    """The first rank of a machine reads it, and the others wait for what it has found."""
    (memory / "step_00000005").mkdir()
    (memory / START).write_bytes(b"\xff")
    copies = MemoryCopies(load(config, KEYS), Mesh(), Told())  # type: ignore[arg-type]
    assert copies._held(memory, "this start") == {}


@pytest.mark.slow
def test_a_rollback_by_hand_leaves_no_copy(finished: Finished, tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    killed_run(finished, run)
    assert here("rollback", run, 4).status == 0
    assert forked("train", finished.config, f"run.folder={run}", *KEYS).status == 0
    assert [event["origin"] for event in events(run) if event["event"] == "resumed"] == ["disk"]


def test_a_return_forgets_the_copies_of_what_came_behind_it(config: Path, tmp_path: Path, memory: Path) -> None:
    """Else ranks that are started again before the next copy would go on from the state that the run has left."""
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000010").mkdir(parents=True)
    (memory / "step_00000020").mkdir()
    for file in (run / COPIES, memory / START):
        file.write_text("the start before")
    monitor = SimpleNamespace(event=lambda *_, **__: None, say=lambda text: None)
    MemoryCopies(load(config, KEYS), Mesh(), monitor).forget()  # type: ignore[arg-type]
    assert newest_step(memory) == 0
    assert (memory / START).read_text() == (run / COPIES).read_text() != "the start before"


def diverge(step: int, settings: Config) -> None:
    """Of a run whose state nobody reads but for its changes."""
    monitor: Any = SimpleNamespace(event=lambda *_, **__: None, say=lambda text: None)
    undo.roll_back(
        Divergence(step=step, first=step, reason="is not finite"),
        cast(Any, SimpleNamespace(changes=[])),
        cast(Any, SimpleNamespace(wait_out=lambda state: None)),
        config=settings,
        mesh=Mesh(),
        corpus=cast(Any, None),
        monitor=monitor,
        copies=MemoryCopies(settings, Mesh(), monitor),
    )


def test_behind_a_divergence_no_copy_and_no_later_checkpoint_is_left(
    config: Path, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the state is read anew: a restart in the middle of it goes on from the same checkpoint."""
    run, seen = tmp_path / "run", list[tuple[int, int]]()
    for folder in (memory / "step_00000021", *(run / "checkpoints" / f"step_000000{step}" for step in (10, 20))):
        folder.mkdir(parents=True)
    for file in (run / COPIES, memory / START):
        file.write_text("the start before")
    monkeypatch.setattr(
        undo, "return_to_newest", lambda *_: seen.append((newest_step(memory), newest_step(run / "checkpoints")))
    )
    monkeypatch.setattr(undo, "_weighed", lambda *_: ("", None))  # of checkpoints that are folders alone
    keys = ["checkpoint.memory_every=1", "checkpoint.keep=9", "divergence.then=roll_back", "divergence.healthy_for=5"]
    settings = load(config, keys)
    diverge(22, settings)
    assert seen == [(0, 10)] and [each.to for each in rollbacks.read(run)] == [10]


def test_a_run_that_diverges_again_knows_how_often_it_has_returned(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And which batches it has passed over: they do not come again."""
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000010").mkdir(parents=True)
    monkeypatch.setattr(undo, "return_to_newest", lambda *_: None)
    monkeypatch.setattr(undo, "_weighed", lambda *_: ("", None))  # of a checkpoint that is a folder alone
    settings = load(
        config, ["checkpoint.keep=9", "divergence.then=roll_back", "divergence.healthy_for=5", "divergence.tries=2"]
    )
    for step in (22, 24):
        diverge(step, settings)
    known = rollbacks.read(run)
    assert [(each.to, each.skip) for each in known] == [(10, 22 - 10), (10, 24 - 10)] and in_force(known) == known
    with pytest.raises(ColonnadeError, match="It has returned 2 times already"):
        diverge(26, settings)
    assert rollbacks.read(run) == known


def test_a_return_forgets_copies_though_nothing_says_which_count(config: Path, tmp_path: Path, memory: Path) -> None:
    """As behind a disk that was full when the run began: none were named, and the run went on."""
    run = tmp_path / "run"
    run.mkdir()
    monitor = SimpleNamespace(event=lambda *_, **__: None, say=lambda text: None)
    MemoryCopies(load(config, KEYS), Mesh(), monitor).forget()  # type: ignore[arg-type]
    assert (memory / START).read_text() == (run / COPIES).read_text()


@pytest.mark.parametrize("named", ["start of the run", "another start", None])
def test_of_an_earlier_start_the_copies_stay_until_there_are_others_if_they_are_the_runs(
    config: Path, tmp_path: Path, memory: Path, named: str | None
) -> None:
    """Those of a start that the run has not gone on from would take memory for nothing."""
    run, copy, older = tmp_path / "run", memory / "step_00000005", memory / "step_00000004"
    for folder in (run, copy, older):
        folder.mkdir()
    (memory / START).write_text("start of the run")
    if named is not None:
        (run / COPIES).write_text(named)
    copies = MemoryCopies(load(config, KEYS), Mesh(), Told())  # type: ignore[arg-type]
    assert copies._machine is not None and copies._take_over(copies._machine)
    assert copy.exists() == (named == "start of the run") and not older.exists()
    assert (memory / START).read_text() == (run / COPIES).read_text() != named


def test_what_all_ranks_of_a_machine_keep_there_must_fit(
    config: Path, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what a neighbour's ranks have written: that of one rank would always fit."""
    (tmp_path / "run").mkdir()
    copies = MemoryCopies(load(config, KEYS), Mesh(), Told())  # type: ignore[arg-type]
    monkeypatch.setattr(memory_copies, "agree", lambda shards: SimpleNamespace(num_bytes=5))
    monkeypatch.setattr(memory_copies.recovery, "shards_of", lambda state: [])
    monkeypatch.setattr(memory_copies, "bytes_of_machines", lambda own, machines: [0, sum(own) + 100])
    assert copies._machine is not None
    copies._machine = copies._machine._replace(number=1)  # the second of two
    asked: list[int] = []
    for problem in ("", "too large"):
        monkeypatch.setattr(memory_copies, "_too_large", lambda size, folder, p=problem: asked.append(size) or p)
        copies.begin(cast(Any, SimpleNamespace(step=0)))
        assert copies.are_due(1) == (not problem)
    assert asked == [105, 105]


def test_a_run_returns_to_a_checkpoint_though_its_memory_is_full(config: Path, tmp_path: Path, memory: Path) -> None:
    """It goes on without copies, as a run does that finds the memory full when it begins."""
    (tmp_path / "run").mkdir()
    (memory / START).mkdir()  # what cannot be written
    said = list[str]()
    monitor = SimpleNamespace(event=lambda *_, **__: None, say=said.append)
    copies = MemoryCopies(load(config, KEYS), Mesh(), monitor)  # type: ignore[arg-type]
    copies._agreement = cast(Agreement, object())
    assert copies.are_due(1)
    copies.forget()
    assert not copies.are_due(1), "a copy that nothing names would be of no use"
    assert len(said) == 1 and said[0].startswith("No copies of the state are kept in memory: Rank 0: ")


@pytest.mark.slow
def test_a_copy_knows_what_was_changed_before_it(finished: Finished, tmp_path: Path, memory: Path) -> None:
    """And which batches were passed over: the run goes on from memory as the one that was never killed."""
    run, expected = tmp_path / "run", tmp_path / "expected"
    shutil.copytree(finished.folder, run)
    assert here("rollback", run, 4, "--skip", 1).status == 0
    assert here("change", run, "train.global_batch_size=8", "optim.learning_rate=3e-3", "--at", 4).status == 0
    shutil.copytree(run, expected)
    assert forked("train", finished.config, f"run.folder={expected}").status == 0
    command = ("train", finished.config, f"run.folder={run}", "checkpoint.memory_every=1")
    assert forked(*command, first=killed_after(5)).status == -signal.SIGKILL
    assert newest_step(memory) == 5 and newest_step(run / "checkpoints") == 4
    assert forked(*command).status == 0
    assert [event["origin"] for event in events(run) if event["event"] == "resumed"][-1] == "memory"
    assert_same_end(run, expected)


def test_what_does_not_fit_is_said_and_left(
    finished: Finished, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_copies, "free_memory", lambda device: (1_000, 2_000))
    answer = forked("train", finished.config, f"run.folder={tmp_path / 'run'}", *KEYS)
    assert answer.status == 0 and "0.0 MB are free (checkpoint.memory_every)." in answer.out
    assert newest_step(memory) == 0


def test_copies_that_are_there_make_room_for_those_that_follow_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_copies, "free_memory", lambda device: (1_500_000, 10_000_000))
    assert "would need 2.4 MB, and 1.5 MB are free" in memory_copies._too_large(1_000_000, tmp_path)
    (tmp_path / "step_00000002").mkdir()
    (tmp_path / "step_00000002" / "a.distcp").write_bytes(bytes(1_000_000))
    assert memory_copies._too_large(1_000_000, tmp_path) == ""


def test_a_copy_that_fails_is_the_last(
    finished: Finished, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **more: Any) -> Any:
        raise CheckpointError("The disk is full: …")

    monkeypatch.setattr(memory_copies, "write", full)
    run = tmp_path / "run"
    answer = forked("train", finished.config, f"run.folder={run}", *KEYS)
    assert answer.status == 0 and answer.out.count("No more copies") == 1
    assert [event["step"] for event in events(run) if event["event"] == "no copies in memory"] == [1]


def test_without_a_supervisor_there_are_none(finished: Finished, tmp_path: Path) -> None:
    answer = forked("train", finished.config, f"run.folder={tmp_path / 'run'}", *KEYS, "train.steps=1")
    assert answer.status == 0 and "restarts.one_rank = true) or torchrun, and this run has neither." in answer.out


def test_a_run_without_copies_has_no_folder_in_memory(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one whose machine refuses it, which is said."""
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    before = set(tmp_path.iterdir())
    with folder_for(load(config)) as folder:
        assert folder is None and set(tmp_path.iterdir()) == before
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path / "nowhere")
    with folder_for(load(config, ["checkpoint.memory_every=1"])) as folder:
        assert folder is None
    assert f"{tmp_path / 'nowhere'} refuses (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "said"), [(3, 0), (0, 1)])
def test_where_memory_refuses_a_supervisor_says_so_and_its_ranks_name_no_other_reason(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limit: int,
    said: int,
) -> None:
    """One that starts nothing again makes none, and its ranks say why."""
    settings, told = load(config, ["checkpoint.memory_every=1", f"restarts.limit={limit}"]), Told()
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path / "nowhere")
    monkeypatch.setattr(launch, "has_supervisor", lambda: True)
    if limit:
        with folder_for(settings) as folder:
            assert folder is None
    MemoryCopies(settings, Mesh(), told)  # type: ignore[arg-type]
    assert [*map(len, (told.said, capsys.readouterr().err.splitlines()))] == [said, 1 - said]
    assert all("this run has neither" in each for each in told.said)


def test_memory_is_guarded_also_while_no_rank_runs(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that removes it if this one is killed, and that ends with it."""
    guards, polled, start = list["subprocess.Popen[bytes]"](), list[int | None](), agent.guard

    def guard(process: ProcessId, folder: Path) -> "subprocess.Popen[bytes]":
        assert process == mine() and folder.parent == tmp_path
        guards.append(start(process, folder))
        return guards[-1]

    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    monkeypatch.setattr(agent, "guard", guard)
    with folder_for(load(config, ["checkpoint.memory_every=1"])) as folder:
        assert len(guards) == 1 and guards[0].poll() is None
        assert folder is not None
        (folder / "step_00000001").mkdir()
        remove = tempfile.TemporaryDirectory.cleanup

        def removed(made: "tempfile.TemporaryDirectory[str]") -> None:
            polled.append(guards[0].poll())
            remove(made)

        monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", removed)
    assert set(polled) == {None}, "nor while it is removed"
    assert guards[0].returncode is not None and not folder.exists()


def test_copies_are_kept_in_memory_also_where_no_guard_can_be_started(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(process: ProcessId, folder: Path) -> "subprocess.Popen[bytes]":
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    monkeypatch.setattr(agent, "guard", refused)
    with folder_for(load(config, ["checkpoint.memory_every=1"])) as folder:
        assert folder is not None and folder.is_dir()
    assert not folder.exists()


def test_memory_is_given_back(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    with folder_for(load(config, ["checkpoint.memory_every=1"])) as folder:
        assert folder is not None and folder.parent == tmp_path and oct(folder.stat().st_mode)[-3:] == "700"
        (folder / "step_00000001").mkdir()
    assert not folder.exists()
    with folder_for(load(config, [])) as folder:
        assert folder is None
    left, alive = (tmp_path / f"{agent.name_of(each)}-of_1" for each in (ended(), mine()))
    for each in (left, alive):
        each.mkdir()
    with folder_for(load(config, ["checkpoint.memory_every=1"])) as folder:
        assert not left.exists() and alive.exists(), "of a supervisor that was killed with its guard, and of another"
        assert folder is not None and folder.name.startswith(f"{agent.name_of(mine())}-")
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path / "nowhere")
    with folder_for(load(config, ["checkpoint.memory_every=1"])) as folder:
        assert folder is None


@pytest.mark.parametrize(("before", "lost"), [(7, 3), (4, 0), (0, 0)])
def test_behind_the_first_step_after_a_fault_it_is_told_once_what_was_lost(
    config: Path, monkeypatch: pytest.MonkeyPatch, before: int, lost: int
) -> None:
    """Steps behind the one that the run goes on from, and the time from the fault on; without a fault nothing."""
    monkeypatch.setattr(memory_copies.time, "monotonic", lambda: 112.5)
    monkeypatch.setenv(launch.FAULT, f"100.0 {before}")
    told, settings = Told(), load(config)
    copies = MemoryCopies(settings, Mesh(), told)  # type: ignore[arg-type]
    copies.begin(SimpleNamespace(step=4))  # type: ignore[arg-type]
    copies.say_recovered(5), copies.say_recovered(6)
    assert told.events == [("recovered", {"step": 5, "seconds": 12.5, "steps_lost": lost})]
    monkeypatch.delenv(launch.FAULT)
    MemoryCopies(settings, Mesh(), told).say_recovered(5)  # type: ignore[arg-type]
    assert len(told.events) == 1


@pytest.mark.slow
def test_a_supervised_run_that_is_killed_says_what_it_lost(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = [f"run.folder={run}", *KEYS, "train.steps=60", "checkpoint.every=20", "parallel.dp=2", "parallel.zero=1"]
    expected = tmp_path / "expected"
    command = [sys.executable, "-m", "colonnade", "train", str(finished.config), *keys]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not ((run / "metrics.jsonl").exists() and len(metrics(run)) > 22):
        time.sleep(0.01)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    assert process.wait(120) == 0
    assert not list(memory_folder.MEMORY.glob("colonnade-memory-*/step_00000060"))
    told = {event["event"]: event for event in events(run)}
    assert told["resumed"]["origin"] == "memory" and told["resumed"]["step"] > 20
    assert told["recovered"]["steps_lost"] <= 1 and told["recovered"]["seconds"] > 0
    assert forked("train", finished.config, *keys, f"run.folder={expected}", num_ranks=2).status == 0
    assert_same_end(run, expected)


def test_copies_need_room_in_the_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a system in memory has a limit of its own; of an unknown memory it alone counts."""
    monkeypatch.setattr(memory_copies.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_500_000))
    for free in ((9_000_000, 9_000_000), None):
        monkeypatch.setattr(memory_copies, "free_memory", lambda device, free=free: free)
        assert "and 1.5 MB are free" in memory_copies._too_large(1_000_000, tmp_path)
        assert memory_copies._too_large(600_000, tmp_path) == ""


def test_a_copy_is_used_beside_a_checkpoint_on_the_disk_alone(config: Path, tmp_path: Path, memory: Path) -> None:
    """With none there the run begins as it would without copies. One that cannot be read is no copy."""
    checkpoint, copy = tmp_path / "run" / "checkpoints" / "step_00000004", memory / "step_00000005"
    for folder in (checkpoint, copy):
        folder.mkdir(parents=True)
    for file in (tmp_path / "run" / COPIES, memory / START):
        file.write_text("the start before")
    copies, told = MemoryCopies(load(config, KEYS), Mesh(), Told()), list[object]()  # type: ignore[arg-type]
    machine = copies._machine
    assert machine is not None
    assert copies._held(memory, "the start before") == {5: memory_copies.Held("", {}, {})}
    assert copies._held(memory / "nowhere", "the start before") == {} == copies._held(memory, "another")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            memory_copies, "newest_whole", lambda held, saved: (told.append((*held[0], saved)), (None, []))[1]
        )
        assert copies._newest(machine) is copies._newest(machine._replace(is_first=False)) is None
        checkpoint.rmdir()
        assert copies._newest(machine) is None
    assert told == [(5, 4), (4,), (0,)], (
        "a machine's first rank tells of its copies, which are to be newer than the disk"
    )


@pytest.mark.parametrize("copy", ["sound", "damaged", "none"])
def test_what_was_read_of_a_copy_and_of_the_disk_is_handed_to_who_reads_on(
    copy: str, config: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their manifests, which may be long, and which ranks see which files; and the disk is read where a copy is not."""
    copies, read = MemoryCopies(load(config, KEYS), Mesh(), Told()), list[object]()  # type: ignore[arg-type]

    def restore(*given: object) -> str:
        read.append(given)
        if copy == "damaged":
            raise CheckpointError("It is damaged.")
        return "from memory"

    def restored(*given: object) -> str:
        read.append(given)
        return "from the disk"

    monkeypatch.setattr(memory_copies.recovery, "restore", restore)
    monkeypatch.setattr(memory_copies.damaged, "restored", restored)
    monkeypatch.setattr(copies, "_newest", lambda machine: None if copy == "none" else SimpleNamespace(step=5))
    monkeypatch.setattr(copies, "_brought", lambda *_: ("holders", "its manifest"))
    given: Any = ("state", "config", "corpus")
    of_copy = (*given, memory / "step_00000005", "holders", "its manifest")
    of_disk = (*given, copies._monitor, "the disk's manifest")
    found: Any = copies.restored(*given, "the disk's manifest")  # type: ignore[arg-type]
    assert (found, read) == {
        "sound": ("from memory", [of_copy]),
        "damaged": ("from the disk", [of_copy, of_disk]),
        "none": ("from the disk", [of_disk]),
    }[copy]


def test_what_is_said_of_a_copy_does_not_tell_to_delete_it(config: Path, memory: Path) -> None:
    """The run does so itself, and goes on from the disk, which may have an older one."""
    copies, monitor = (MemoryCopies(load(config, KEYS), Mesh(), told := Told()), told)  # type: ignore[arg-type]
    for more in (" Delete x to go on from step 3.", " There is no older one."):
        copies._pass_over(memory / "step_00000005", f"a.distcp is damaged.{more}")
    assert monitor.said == ["a.distcp is damaged. The run goes on from the disk."] * 2


def test_of_a_copy_that_failed_nothing_is_left(config: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the memory that was too little."""

    def full(*_: object, **more: object) -> None:
        (memory / ".step_00000003.partial").mkdir()
        raise CheckpointError("The disk is full")

    monkeypatch.setattr(memory_copies, "write", full)
    monkeypatch.setattr(memory_copies.recovery, "shards_of", lambda state: [])
    monitor: Any = SimpleNamespace(event=lambda *_, **__: None, say=lambda _: None, check=lambda: None)
    copies = MemoryCopies(load(config, [*KEYS, "checkpoint.memory_every=3"]), Mesh(), monitor)
    copies._agreement = cast(Agreement, SimpleNamespace(tensors=lambda shards: {}))
    assert [step for step in range(1, 8) if copies.are_due(step)] == [3, 6]
    copies.save(cast(Any, SimpleNamespace(step=3)), cast(Any, None))
    assert not list(memory.iterdir()) and not copies.are_due(6)
