"""The thread that posts a rank's reports, looks for an alarm, and reads the other ranks' reports when it must.

It alone touches the board, which may be on a machine that is gone: whoever asks then may stand still.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from colonnade.launch.board import Board
from colonnade.launch.explanation import Picture, Report, involved
from colonnade.mesh.process import ProcessId, has_ended

_POST = 1.0  # seconds between reports within one step
_SETTLE = 1.0  # seconds in which, after an alarm, every rank that lives reports anew
_GATHER = 6.0  # seconds after which reports are done without
_SILENT = 30.0  # seconds without a report of rank 0 after which nobody stays for it
_READ = 64  # reports read at most
IN_ORDER = "left the run in order"
NO_WORD = "ended without a word"


class Reporter:
    """Posts what `describe(left, explained)` says of this rank. `alarmed` and `gone` are what it has seen."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        board: Board,
        describe: Callable[[str, bool], Report],
        neighbours: Collection[int],
    ) -> None:
        """`ranks`: all of the run; `neighbours`: those of this machine, whose death this rank is to notice."""
        self.rank, self.board, self.describe = rank, board, describe
        self._all = list(ranks) if len(ranks) <= _READ else []
        self.alarmed = False
        self.gone: dict[int, str] = {}
        """Ranks whose process has ended without a word, and how."""
        self._neighbours = {other: None for other in neighbours if other != rank}
        self._processes: dict[int, ProcessId] = {}
        self._left, self._explained, self._stays = "", False, False
        self._heard = 0.0
        """When this rank began to leave, or heard of rank 0 since."""
        self._posted: tuple[int | None, float] = (None, 0.0)
        self._picture = Picture({})
        self._over, self._wanted, self._gathered = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reports")

    def start(self) -> None:
        self._thread.start()

    def stop(self, left: str, *, stay: bool = False) -> None:
        """Post a last report that says why this rank leaves. `stay`: return when rank 0 has left too, however long it
        takes, or is heard of no more.
        """
        self._left, self._stays = left, stay and self.rank != 0
        self._heard = time.monotonic()
        self._over.set()
        while self._thread.is_alive() and self._is_heard():
            self._thread.join(self.board.tick)

    def gather(self) -> Picture:
        """Raise the alarm and return all that can be known. Takes a second, or a few where the board is lost."""
        self._wanted.set()
        answered, mine = self._gathered.wait(_GATHER), self.describe("", False)
        known = self._picture
        unread = known.unread or ("" if answered else f"no answer in {_GATHER:g} seconds")
        return replace(known, reports={**known.reports, self.rank: mine}, gone=self.gone, unread=unread)

    def _run(self) -> None:
        pause = 0.0  # the first report is posted at once
        while not self._over.wait(pause):
            self._guarded(self._round)
            if self._wanted.is_set() and not self._gathered.is_set():
                self._guarded(self._gather)
                self._gathered.set()
            pause = self.board.tick
        self._guarded(self._leave)
        if self._stays:
            self._guarded(self._await_rank_0)

    def _guarded(self, use_board: Callable[[], None]) -> None:
        try:
            use_board()
        except (OSError, RuntimeError) as error:  # the board is lost: with whom it was, a rank may be lost too
            self._picture = replace(self._picture, unread=str(error).partition("\n")[0] or type(error).__name__)

    def _round(self) -> None:
        step = self.describe("", False).step
        if self.alarmed or step != self._posted[0] or time.monotonic() > self._posted[1] + _POST:
            self._post()
            self._posted = step, time.monotonic()
        self.gone |= self.board.ended()
        for rank in self._neighbours:
            self._look_after(rank)
        if self.gone and not self.alarmed:
            self.board.raise_alarm()
        self.alarmed = self.board.is_alarmed()

    def _look_after(self, rank: int) -> None:
        """Whether a rank of this machine still lives; if not, whether it had said why."""
        if rank not in self._processes:
            report = self._read(rank)
            if report is not None:
                self._processes[rank] = report.process
        elif rank not in self.gone and has_ended(self._processes[rank]):
            report = self._read(rank)
            if report is None or not (report.left or report.explained):
                self.gone[rank] = NO_WORD

    def _post(self) -> None:
        self.board.post(self.rank, self.describe(self._left, self._explained).to_json())

    def _read(self, rank: int) -> Report | None:
        text = self.board.read(rank)
        return None if text is None else Report.from_json(text)

    def _leave(self) -> None:
        self._post()
        if self._left != IN_ORDER:
            self.board.raise_alarm()

    def _is_heard(self) -> bool:
        return time.monotonic() < self._heard + (_SILENT if self._stays else _GATHER)

    def _await_rank_0(self) -> None:
        beat: int | None = None
        while self._is_heard():
            first = self._read(0)
            if first is not None and (first.left or first.explained):
                return
            if first is not None and first.beat != beat:
                beat, self._heard = first.beat, time.monotonic()
            time.sleep(self.board.tick)

    def _gather(self) -> None:
        self.board.raise_alarm()
        before = self._read_involved()
        end = time.monotonic() + max(_SETTLE, 4 * self.board.tick)
        while time.monotonic() < end and not self._over.wait(self.board.tick):
            self._post()
        reports = self._read_involved()
        ended = [rank for rank, report in _there(reports).items() if has_ended(report.process)]
        # one that has ended may have explained since it was read
        reports |= {rank: self._read(rank) or reports[rank] for rank in ended}
        there = _there(reports)
        self.gone |= {rank: NO_WORD for rank in ended if rank in there} | self.board.ended()
        silent = {rank for rank in there if rank in before and there[rank].beat == before[rank].beat}
        self._picture = Picture(reports, silent=silent - {self.rank, *self.gone})
        self._explained = True
        self._post()

    def _read_involved(self) -> dict[int, Report]:
        """The reports of those whom this rank waits for, of those whom they wait for, and so on; all of a small run."""
        reports = {self.rank: self.describe("", False)}
        asked = [*involved(reports[self.rank]), *self._all]
        for rank in asked:
            if rank in reports or len(reports) >= _READ:
                continue
            report = self._read(rank)
            if report is not None:
                reports[rank] = report
                asked += involved(report)
        return reports


def _there(reports: Mapping[int, Report]) -> dict[int, Report]:
    """Of ranks that have neither left nor explained."""
    return {rank: report for rank, report in reports.items() if not (report.left or report.explained)}
