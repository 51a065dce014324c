"""What a rank's thread sees of the ranks beside it."""

from pathlib import Path

import pytest

from colonnade.launch import reporter
from colonnade.launch.board import FolderBoard, note_end
from colonnade.launch.explanation import Report
from colonnade.launch.reporter import IN_ORDER, NO_WORD, Reporter
from colonnade.mesh.process import ProcessId


def report(rank: int, *, left: str = "", explained: bool = False) -> Report:
    process = ProcessId("here", rank + 1, "")
    return Report(rank, "[]", 3, None, (), 0.0, "", {}, {}, (), process, left=left, explained=explained)


@pytest.mark.parametrize(
    ("last", "gone"),
    [
        (report(1), {1: NO_WORD}),
        (report(1, left=IN_ORDER), {}),
        (report(1, left="raised ValueError: it is broken"), {}),
        (report(1, explained=True), {}),
    ],
    ids=["without a word", "in order", "with an error", "explained"],
)
def test_a_rank_of_this_machine_that_has_ended_is_gone_unless_it_said_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: Report, gone: dict[int, str]
) -> None:
    """Only then is the alarm raised: those who wait for it tell the reason that it gave."""
    ended = set[ProcessId]()
    monkeypatch.setattr(reporter, "has_ended", lambda process: process in ended)
    board = FolderBoard(tmp_path)
    mine = Reporter([0, 1], 0, board, lambda left, explained: report(0, left=left, explained=explained), [0, 1])
    board.post(1, report(1).to_json())
    mine._round()
    assert not mine.gone and not board.is_alarmed()
    board.post(1, last.to_json())
    ended.add(last.process)
    for _ in range(2):
        mine._round()
        assert mine.gone == gone and board.is_alarmed() is bool(gone)


def test_how_a_rank_ended_is_as_the_supervisor_saw_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which knows more than that it is not there any more."""
    monkeypatch.setattr(reporter, "has_ended", lambda _: True)
    board = FolderBoard(tmp_path)
    mine = Reporter([0, 1], 0, board, lambda left, explained: report(0, left=left, explained=explained), [0, 1])
    board.post(1, report(1).to_json())
    mine._round()
    note_end(tmp_path, 1, "killed by signal 9 (SIGKILL)")
    for _ in range(2):
        mine._round()
        assert mine.gone == {1: "killed by signal 9 (SIGKILL)"}
