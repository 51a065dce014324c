"""What a rank under watch does after an alarm, and to those that stand still."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from colonnade.launch import watch
from colonnade.launch.board import Board, FolderBoard, StoreBoard, explanation_file
from colonnade.launch.explanation import Picture, Report
from colonnade.launch.reporter import IN_ORDER
from colonnade.launch.watch import Watch
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Site
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.mesh.process import ProcessId, process_id_of


def test_after_an_alarm_a_rank_that_waits_ends_long_before_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that works goes on: it may have nothing to do with what is lost."""
    mesh, board, ended = paper_mesh(Layout(tp=2), 0), FolderBoard(tmp_path), threading.Event()
    board.tick = 0.01
    watched, ledger, here = Watch(mesh, 600.0, board), mesh.ledger, Site("here.py:1")
    monkeypatch.setattr(watch, "_PATIENT", 0.05)
    monkeypatch.setattr(watched, "_end", ended.set)
    with watched:
        first, second = (ledger.open("all_reduce", "tp", torch.ones(1), here) for _ in range(2))
        assert not ledger.wait(first, lambda: ended.wait(0.2)), "there is no alarm"
        board.raise_alarm()
        assert not ended.wait(0.2), "it waits for nobody"
        assert ledger.wait(second, lambda: ended.wait(30.0))


def test_after_an_alarm_a_rank_waits_on_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom it waits for may be on its way."""
    mesh, board, ended = paper_mesh(Layout(tp=2), 0), FolderBoard(tmp_path), threading.Event()
    board.tick = 0.01
    watched = Watch(mesh, 600.0, board)
    monkeypatch.setattr(watch, "_PATIENT", 600.0)
    monkeypatch.setattr(watched, "_end", ended.set)
    board.raise_alarm()
    with watched:
        entry = mesh.ledger.open("all_reduce", "tp", torch.ones(1), Site("here.py:1"))
        assert not mesh.ledger.wait(entry, lambda: ended.wait(0.4))


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def report_of(process: ProcessId) -> Report:
    return Report(1, "[]", 3, None, (), 0.0, "", {}, {}, (), process)


def test_ranks_of_this_machine_that_stand_still_are_ended_when_all_have_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: "subprocess.Popen[bytes]"
) -> None:
    """Before that another rank could take one for gone that stands still. Nobody is waited for where none does."""
    slept = list[float]()

    def sleep(seconds: float) -> None:
        assert sleeper.poll() is None
        slept.append(seconds)

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=sleep))
    mine = Watch(Mesh(), 5.0, FolderBoard(tmp_path))
    mine._end_silent([])
    assert slept == []
    mine._end_silent([report_of(ProcessId("elsewhere", 1, "7")), report_of(process_id_of(sleeper.pid))])
    assert slept == [watch._LAST] and sleeper.wait(30.0) == -signal.SIGKILL


@pytest.mark.parametrize("supervised", [True, False], ids=["a supervisor", "none"])
def test_a_rank_that_stands_still_is_left_to_the_supervisor_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], supervised: bool
) -> None:
    """It would take a rank that was killed for the cause, and what the others waited for would not be shown."""
    killed = list[ProcessId]()
    monkeypatch.setattr(watch, "kill", killed.append)
    monkeypatch.setattr(watch, "_LAST", 0.0)
    board: Board = FolderBoard(tmp_path) if supervised else StoreBoard(HashStore())
    still = report_of(ProcessId("here", 1, "7"))
    Watch(Mesh(), 5.0, board)._tell(Picture({0: replace(still, rank=0), 1: still}, silent=[1]))
    told = explanation_file(tmp_path, 0).read_text() if supervised else capfd.readouterr().err
    assert told.startswith("rank 0 [] ") and killed == ([] if supervised else [still.process])


@pytest.mark.parametrize(
    "lost", [OSError("No space left on device"), RuntimeError("the store is gone")], ids=["disk", "store"]
)
def test_who_cannot_leave_an_explanation_says_it_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], lost: Exception
) -> None:
    def explain(rank: int, text: str) -> bool:
        raise lost

    killed, board = list[ProcessId](), FolderBoard(tmp_path)
    monkeypatch.setattr(watch, "kill", killed.append)
    monkeypatch.setattr(board, "explain", explain)
    still = report_of(ProcessId("here", 1, "7"))
    Watch(Mesh(), 5.0, board)._tell(Picture({0: replace(still, rank=0), 1: still}, silent=[1]))
    assert capfd.readouterr().err.startswith("rank 0 [] ") and killed == []


@pytest.mark.parametrize(
    ("error", "left", "stays"),
    [
        (None, IN_ORDER, True),
        (SystemExit(99), IN_ORDER, True),
        (ValueError("two is broken\nbadly"), "raised ValueError: two is broken", False),
    ],
    ids=["at its end", "asked to leave", "broken"],
)
def test_who_leaves_in_order_alone_stays_for_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, left: str, stays: bool
) -> None:
    """Whose error is to be seen has it seen now."""
    told = list[tuple[str, bool]]()
    for asked in (True, False):
        watched = Watch(Mesh(), 5.0, FolderBoard(tmp_path), stays=asked)
        monkeypatch.setattr(watched._reporter, "stop", lambda left, *, stay: told.append((left, stay)))
        with suppress(SystemExit, ValueError), watched:
            if error is not None:
                raise error
        watched._reporter._over.set()
        watched._reporter._thread.join()
    assert told == [(left, stays), (left, False)]
