"""Torchrun's agent is found behind whatever is between, and its folder lasts as long as it does."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from colonnade.config.restarts import RestartsConfig
from colonnade.launch import agent
from colonnade.mesh.process import ProcessId, mine, process_id_of
from colonnade.train import memory_folder
from tests.commands import environment

SAY = "from colonnade.launch import agent; found = agent.agent(); print(found and found.pid)"
SHELL = ["sh", "-c", '"$@"; true', "sh"]


@pytest.mark.parametrize("between", [[], SHELL, [*SHELL, *SHELL]], ids=["nothing", "a shell", "two shells"])
def test_it_is_found_by_what_it_starts(between: list[str]) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "job"}
    for more, expected in ((rank, str(os.getpid())), ({}, "None")):
        command = [*between, sys.executable, "-c", SAY]
        done = subprocess.run(command, env={**environment(), **more}, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_the_first_process_of_a_group_is_not_taken_for_it() -> None:
    """That of a script, say, in whose group of processes a shell has started the rank."""
    rank = {**environment(), "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "job"}
    first = subprocess.Popen(["sleep", "100"], process_group=0)
    try:
        command = [*SHELL, sys.executable, "-c", SAY]
        done = subprocess.run(command, env=rank, process_group=first.pid, capture_output=True, text=True, check=True)
    finally:
        first.kill()
        first.wait()
    assert done.stdout.strip() == str(os.getpid())


def test_when_it_has_started_is_told_by_the_clock_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts hundredths of a second since the machine's start."""
    before = time.time()
    started = subprocess.Popen(["sleep", "100"])
    try:
        after, found = time.time(), process_id_of(started.pid)
        monkeypatch.setattr(agent, "agent", lambda: found)
        told = agent.began()
        assert told is not None and before - 0.05 < told < after + 0.05
    finally:
        started.kill()
        started.wait()
    monkeypatch.setattr(agent, "agent", lambda: None)
    assert agent.began() is None


def test_when_it_has_started_is_counted_as_the_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time for which the machine was suspended, which its other clocks leave out; in ticks of its own."""
    clocks = {time.CLOCK_BOOTTIME: 5000.0, time.CLOCK_MONOTONIC: 1400.0}
    known = {name: number for name, number in vars(time).items() if name.startswith("CLOCK_")}
    known |= {"time": lambda: 1e9, "monotonic": lambda: 1400.0, "clock_gettime": clocks.__getitem__}
    monkeypatch.setattr(agent, "time", SimpleNamespace(**known))
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 250}.__getitem__)
    monkeypatch.setattr(agent, "agent", lambda: ProcessId("here", 7, "500000"))
    assert agent.began() == 1e9 - 3000.0


def ended() -> ProcessId:
    process = subprocess.Popen(["sleep", "100"])
    found = process_id_of(process.pid)
    process.kill()
    process.wait()
    return found


def test_folders_of_what_has_ended_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of one that lives, whose guard was killed; and there may be others of such a name."""
    mine_, gone = agent.folder_of(mine(), tmp_path), agent.folder_of(ended(), tmp_path)
    assert agent.folder_of(mine(), tmp_path) == mine_ != gone and oct(mine_.stat().st_mode)[-3:] == "700"
    others = [tmp_path / gone.name.replace(f"-{os.getuid()}-", "-77-"), tmp_path / f"{gone.name}9", tmp_path / "other"]
    others += [tmp_path / f"{agent.PREFIX}{os.getuid()}-0"]
    (mine_ / agent.GUARD).touch()
    for each in others:
        each.mkdir()
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: sorted(glob(folder, pattern)))
    agent.sweep(tmp_path)
    assert not gone.exists() and mine_.exists() and all(each.exists() for each in others)


def test_a_folder_of_another_container_is_swept_once_its_guard_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what was killed whole has left it to the next container of its pod. Numbers of processes say nothing there."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(agent, "_namespace", lambda: "1")
        left, guarded, new = (agent.folder_of(process, tmp_path) for process in (mine(), ended(), ended()))
    for folder in (left, guarded):
        (folder / agent.GUARD).touch()
    with (guarded / agent.GUARD).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        agent.sweep(tmp_path)
        assert {*tmp_path.iterdir()} == {guarded, new}
    agent.sweep(tmp_path)
    assert [*tmp_path.iterdir()] == [new], "its guard has not begun"


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_of_a_machine_sweeps_and_guards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    """When it asks for the folder of its own agent: what a guard that was killed as well has left is gone then."""
    guarded = list[Path]()
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    monkeypatch.setattr(agent, "agent", mine)
    monkeypatch.setattr(agent, "guard", lambda _, folder: guarded.append(folder))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    left = agent.folder_of(ended(), tmp_path)
    (left / "step_00000001").mkdir()
    folder, why = memory_folder.folder_of_rank(RestartsConfig())
    assert folder == agent.folder_of(mine(), tmp_path) and why == ""
    assert left.exists() is (local_rank != 0)
    assert guarded == [folder] * (local_rank == 0)


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = agent.folder_of(mine(), tmp_path)
    path.rmdir()
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        agent.folder_of(mine(), tmp_path)
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    monkeypatch.setattr(agent, "agent", mine)
    monkeypatch.setattr(agent, "guard", lambda *_: pytest.fail("nothing to guard"))
    assert memory_folder.folder_of_rank(RestartsConfig()) == (None, f"{tmp_path} refuses (it belongs to somebody else)")


def test_a_folder_that_another_user_has_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows the process could have made it first, to read or change what lies there."""
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(PermissionError, match="it belongs to somebody else"):
        agent.folder_of(mine(), tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: user)
    assert agent.folder_of(mine(), tmp_path).is_dir()


def test_folders_that_are_one_of_several_of_a_process_are_swept(tmp_path: Path) -> None:
    """As the supervisor of a run names its own."""
    names = [f"{agent.name_of(process)}-x7_z" for process in (ended(), mine())]
    for name in names:
        (tmp_path / name).mkdir()
    agent.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == names[1:]


def test_a_guard_removes_the_folder_when_the_agent_has_ended(tmp_path: Path) -> None:
    """One of them: the others that later starts of the ranks have started have nothing to do."""
    process = subprocess.Popen(["sleep", "100"])
    behind = process_id_of(process.pid)
    folder = agent.folder_of(behind, tmp_path)
    guards = [agent.guard(behind, folder) for _ in range(2)]
    while all(each.poll() is None for each in guards):
        time.sleep(0.05)
    (folder / "step_00000001").mkdir()
    (at_work,) = (each for each in guards if each.poll() is None)
    assert os.getsid(at_work.pid) == at_work.pid, "a signal to all of a terminal or a job does not reach it"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        at_work.send_signal(number)
    time.sleep(2 * agent.POLL)
    assert (folder / "step_00000001").exists() and at_work.poll() is None, "who asks everybody to end is not heard"
    process.kill()
    process.wait()
    assert [each.wait(60.0) for each in guards] == [0, 0] and not folder.exists()
