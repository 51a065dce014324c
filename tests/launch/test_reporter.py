"""What a rank's thread sees of the ranks beside it."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from colonnade.launch import reporter
from colonnade.launch.board import FolderBoard, note_end
from colonnade.launch.explanation import Operation, Report
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


@pytest.mark.parametrize("lost", [4, 5, 7])
def test_whichever_rank_of_this_machine_has_ended_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Before this one or behind it, and no rank of another machine; its own process is no matter to itself."""
    monkeypatch.setattr(
        reporter, "has_ended", lambda process: process in {report(each).process for each in (3, 6, lost)}
    )
    board = FolderBoard(tmp_path)
    mine = Reporter(range(12), 6, board, lambda left, explained: report(6), range(4, 8))
    for rank in range(12):
        board.post(rank, report(rank).to_json())
    for _ in range(2):
        mine._round()
    assert mine.gone == {lost: NO_WORD}


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


def of_rank_0(ranks: Sequence[int], board: FolderBoard, mine: Report) -> Reporter:
    return Reporter(ranks, 0, board, lambda left, explained: replace(mine, left=left, explained=explained), [])


def posted(board: FolderBoard, rank: int = 0) -> Report:
    text = board.read(rank)
    assert text is not None
    return Report.from_json(text)


@pytest.mark.parametrize("left", [IN_ORDER, "raised ValueError: it is broken"])
def test_a_rank_that_leaves_says_why_and_raises_an_alarm_unless_it_is_in_order(tmp_path: Path, left: str) -> None:
    board = FolderBoard(tmp_path)
    mine = of_rank_0([0, 1], board, report(0))
    mine.start()
    mine.stop(left)
    assert (posted(board).left, posted(board).explained, board.is_alarmed()) == (left, False, left != IN_ORDER)


class Timed(FolderBoard):
    """A board beside a clock that only the looks at rank 0 move; `told`: what it has said by each of them, or how the
    board is lost.
    """

    tick = 0.0

    def __init__(self, folder: Path, now: list[float], told: Sequence[Report | Exception | None]) -> None:
        super().__init__(folder)
        self.now, self.told = now, list(told)

    def read(self, rank: int) -> str | None:
        assert rank == 0
        self.now[0] += 20.0
        found = self.told.pop(0)
        if isinstance(found, Exception):
            raise found
        return None if found is None else found.to_json()


@pytest.mark.parametrize(
    ("told", "unread"),
    [
        ([*(replace(report(0), beat=beat) for beat in range(9)), report(0, left=IN_ORDER), None], 1),
        ([report(0), report(0, left="raised ValueError: it is broken"), None], 1),
        ([report(0), report(0, explained=True), None], 1),
        ([None, report(0), report(0, left=IN_ORDER), None], 1),
        ([replace(report(0), beat=7)] * 9, 6),
        ([report(0), RuntimeError("the store is gone"), None], 1),
    ],
    ids=["busy", "raised", "explained", "not there yet", "silent", "lost"],
)
def test_a_rank_that_stays_leaves_when_rank_0_does_or_is_heard_of_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[Report | Exception | None], unread: int
) -> None:
    """However long that takes: rank 0 waits for an upload, say, and reports."""
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    board = Timed(tmp_path, now, told)
    mine = Reporter(range(3), 2, board, lambda left, explained: report(2, left=left), [])
    mine._left, mine._stays, mine._heard = IN_ORDER, True, now[0]
    mine._over.set()
    mine._run()
    assert len(board.told) == unread and len(slept) >= len(told) - unread - 1
    assert posted(FolderBoard(tmp_path), 2).left == IN_ORDER


def test_whoever_stays_stays_longer_than_a_report_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody stays, an end is not held up by a board that does not answer."""
    now, pace, answers = [100.0], [0.01], threading.Event()

    def look_at_the_clock() -> float:
        now[0] += pace[0]
        return now[0]

    class Busy(Timed):
        def read(self, rank: int) -> str | None:
            answers.wait(30.0)
            return super().read(rank)

        def post(self, rank: int, report: str) -> None:
            answers.wait(30.0)

    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=look_at_the_clock, sleep=lambda seconds: None))
    monkeypatch.setattr(reporter, "_GATHER", 0.0)
    hurried = Reporter([0, 1], 1, Busy(tmp_path, now, []), lambda left, explained: report(1, left=left), [])
    hurried.start()
    hurried.stop(IN_ORDER)
    assert hurried._thread.is_alive() and now[0] < 102.0
    pace[0] = 0.0
    answers.set()
    hurried._thread.join()
    told = [*(replace(report(0), beat=beat) for beat in range(9)), report(0, left=IN_ORDER)]
    mine = Reporter([0, 1], 1, Busy(tmp_path, now, told), lambda left, explained: report(1, left=left), [])
    mine.start()
    mine.stop(IN_ORDER, stay=True)
    assert not mine._thread.is_alive()


@pytest.mark.parametrize(("rank", "stay"), [(0, True), (1, False)])
def test_rank_0_stays_for_nobody_and_nobody_stays_who_need_not(tmp_path: Path, rank: int, stay: bool) -> None:
    mine = Reporter([0, 1], rank, Timed(tmp_path, [0.0], []), lambda left, explained: report(rank), [])
    mine.start()
    mine.stop(IN_ORDER, stay=stay)
    assert not mine._thread.is_alive()


def test_a_rank_reports_at_each_step_and_each_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, posts = [100.0], list[int]()
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Counting(FolderBoard):
        def post(self, rank: int, report: str) -> None:
            posts.append(rank)

    state = [report(0)]
    mine = Reporter([0, 1], 0, Counting(tmp_path), lambda left, explained: state[0], [])
    counts = []
    for step, seconds in ((3, 0.0), (3, 0.0), (4, 0.0), (4, 0.9), (4, 0.2), (4, 0.9), (5, 0.0)):
        now[0] += seconds
        state[0] = replace(state[0], step=step)
        mine._round()
        counts.append(len(posts))
    assert counts == [1, 1, 2, 2, 3, 3, 4]


def test_who_stands_still_is_neither_this_rank_nor_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five ranks one stands still, one lives, one has ended without a word, and one has left."""
    told = [report(rank, left=IN_ORDER if rank == 4 else "") for rank in range(5)]

    class Board(FolderBoard):
        tick, reads = 0.0, 0

        def read(self, rank: int) -> str:
            self.reads += 1
            return replace(told[rank], beat=self.reads if rank == 2 else 7).to_json()

    monkeypatch.setattr(reporter, "_SETTLE", 0.0)
    monkeypatch.setattr(reporter, "has_ended", lambda process: process == told[3].process)
    board = Board(tmp_path)
    mine = of_rank_0(range(5), board, replace(told[0], beat=7))
    mine.start()
    picture = mine.gather()
    told_last = posted(FolderBoard(tmp_path))
    mine.stop(IN_ORDER)
    assert (picture.silent, picture.gone, board.is_alarmed()) == ({1}, {3: NO_WORD}, True)
    assert picture.reports.keys() == {0, 1, 2, 3, 4}
    assert told_last.explained, "so that nobody takes this rank's end for one without a word"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("Broken pipe\nException raised from sendBytes\nframe #0"), "Broken pipe"),
        (TimeoutError(), "TimeoutError"),
    ],
    ids=["words", "none"],
)
def test_of_a_lost_board_the_first_line_is_told(error: Exception, told: str, tmp_path: Path) -> None:
    """Or what kind of error it is, where it has no words."""

    class Lost(FolderBoard):
        tick = 0.0

        def post(self, rank: int, report: str) -> None:
            raise error

    mine = of_rank_0([0, 1], Lost(tmp_path), report(0))
    mine.start()
    picture = mine.gather()
    mine.stop(IN_ORDER)
    assert picture.unread == told and picture.reports == {0: report(0)}


def test_no_more_reports_are_read_than_a_rank_has_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "_READ", 3)
    board = FolderBoard(tmp_path)
    for rank in range(1, 9):
        board.post(rank, report(rank).to_json())
    waiting = Operation("all_reduce", "world", "", False, 4, "here.py:1", 1)
    mine = of_rank_0(range(9), board, replace(report(0), waiting=waiting, waiting_ranks=tuple(range(9))))
    assert mine._read_involved().keys() == {0, 1, 2}
