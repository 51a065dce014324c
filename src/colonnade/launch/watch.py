"""Watches over one rank's waits: a rank that waits too long says for whom, and ends; so does one whose peer is gone.

    the program            begins and ends operations ── ledger
    this thread            looks at the ledger, decides that it is enough, explains, ends the process
    `Reporter`'s thread    posts this rank's report and looks for an alarm ── board ── the other ranks

It is enough when a wait is longer than the limit; when there is an alarm (a rank has died, or has had enough) and this
rank waits; or when an operation fails because a connection is lost. Then the alarm is raised, so that all ranks that
wait report at the same time; their reports are read, put into words (`explanation.explain`) and shown, and the process
ends with status STUCK.

Time in which this process itself is suspended does not count as waiting.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from itertools import count, islice
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from colonnade.launch.board import Board
from colonnade.launch.explanation import Operation, Picture, Report, explain
from colonnade.launch.reporter import IN_ORDER, Reporter
from colonnade.launch.supervisor import STUCK
from colonnade.mesh.ledger import Entry, Ledger
from colonnade.mesh.mesh import Mesh
from colonnade.mesh.process import kill, mine

RECENT = 6  # operations that a rank tells
_PATIENT = 0.5  # seconds that a rank waits on after an alarm: the others may have been on their way
_BREAK = 2.0  # seconds; a longer time between two looks means that this process was suspended
_STAND = 20.0  # seconds that the program stands still after a loss, while the watch explains it
_LAST = 2.0  # seconds in which all ranks that explain have looked who stands still
_LOST = ("connection", "timed out", "timeout", "broken pipe", "closed by peer", "socket")  # in errors of gloo and TCP


class Watch:
    """Watches in the background while the `with` block runs."""

    def __init__(
        self,
        mesh: Mesh,
        timeout: float,
        board: Board,
        neighbours: Collection[int] = (),
        *,
        device: torch.device | None = None,
        stays: bool = False,
    ) -> None:
        """`timeout`: seconds. `neighbours`: the ranks of this machine, whose death this rank is to notice. `device`:
        what the program computes on; None: the CPU. `stays`: one that leaves in order stays until rank 0 leaves too.
        """
        self.mesh, self.timeout, self.board, self.device = mesh, timeout, board, device
        self._stays = stays
        self._timer = WaitTimer(mesh.ledger)
        self._waiting: tuple[Entry | None, float] = (None, 0.0)
        self._process, self._beats = mine(), count(1)
        self._over = threading.Event()
        self._error = ""
        self._reporter = Reporter(mesh.world.ranks, mesh.rank, board, self._describe, neighbours)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watch")

    def __enter__(self) -> Self:
        self._before, self.mesh.ledger.on_failure = self.mesh.ledger.on_failure, self._fail
        self._reporter.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.mesh.ledger.on_failure = self._before
        self._over.set()
        self._thread.join()
        in_order = error is None or isinstance(error, SystemExit)
        left = IN_ORDER if in_order else f"raised {type(error).__name__}: {_first_line(error)}"
        self._reporter.stop(left, stay=in_order and self._stays)

    def _fail(self, error: Exception) -> None:
        """In the program's thread: if a rank is lost, stand still until the watch has ended the process."""
        text = str(error).lower()
        if isinstance(error, OSError | dist.DistError) or any(word in text for word in _LOST):
            self._error = _first_line(error) or type(error).__name__
            time.sleep(_STAND)

    def _watch(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins on GPU 0, and would take memory there
        before = time.monotonic()
        while not self._over.wait(self.board.tick):
            now = time.monotonic()
            self._waiting = entry, waited = self._timer.tick(min(now - before, _BREAK))
            before = now
            alarmed = self._reporter.alarmed and entry is not None and waited > _PATIENT
            if waited > self.timeout or alarmed or self._error:
                self._end()

    def _end(self) -> None:
        """Explain, and leave."""
        try:
            self._tell(replace(self._reporter.gather(), limit=self.timeout))
            sys.stdout.flush()
        finally:
            os._exit(STUCK)  # whatever keeps it from telling why

    def _tell(self, picture: Picture) -> None:
        text, told = explain(self.mesh.rank, picture), None
        with suppress(OSError, RuntimeError):  # the disk is full, or the board lost
            told = self.board.explain(self.mesh.rank, text)
        if not told:  # standard error, past Python's stream, of which the program may hold the lock
            os.write(2, f"{text}\n".encode(errors="replace"))
        if told is False:
            self._end_silent([picture.reports[rank] for rank in picture.silent])

    def _end_silent(self, reports: Collection[Report]) -> None:
        """End ranks of this machine that stand still: a launcher would ask them first, and wait for an answer."""
        if reports:
            time.sleep(_LAST)
        for report in reports:
            kill(report.process)

    def _describe(self, left: str, explained: bool) -> Report:
        """This rank's report."""
        mesh, ledger = self.mesh, self.mesh.ledger
        entry, waited = self._waiting
        recent = list(islice(reversed(ledger.entries), RECENT))[::-1]
        return Report(
            rank=mesh.rank,
            coordinates=mesh.coordinates,
            step=ledger.step,
            waiting=None if entry is None else _operation(entry, mesh),
            waiting_ranks=() if entry is None else mesh.axes[entry.axis].ranks,
            waited=waited,
            error=self._error,
            numbers=dict(ledger.numbers),
            step_numbers=ledger.step_numbers,
            recent=tuple(_operation(each, mesh) for each in recent),
            process=self._process,
            beat=next(self._beats),
            left=left,
            explained=explained,
        )


class WaitTimer:
    """How long a rank has waited."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._since: tuple[object, float] = (None, 0.0)
        """What is waited for, and how long so far."""
        self._opened = 0

    def tick(self, seconds: float) -> tuple[Entry | None, float]:
        """What the rank waits in and for how long, if it has lived for `seconds` since the last tick."""
        waiting = self.ledger.waiting  # one object for one wait: the same at the next tick if the wait goes on
        entry = self._on_device() if waiting is None else waiting[0]
        wait: object = entry if waiting is None else waiting
        same = entry is not None and wait is self._since[0]
        self._since = wait, self._since[1] + seconds if same else 0.0
        return entry, self._since[1]

    def _on_device(self) -> Entry | None:
        """On CUDA: what the device stands at, unless the program has begun something since the last tick."""
        flying, opened = self.ledger.flying, sum(self.ledger.numbers.values())
        while flying and flying[0].is_over:
            flying.popleft()
        still, self._opened = opened == self._opened, opened
        return flying[0].entry if flying and still and flying[0].ready.query() else None


def _operation(entry: Entry, mesh: Mesh) -> Operation:
    return Operation(
        operation=entry.operation,
        axis=entry.axis,
        layer=entry.layer,
        backward=entry.backward,
        bytes=entry.bytes,
        site=entry.site,
        number=entry.number,
        peer=None if entry.peer is None else mesh.axes[entry.axis].ranks[entry.peer],
        seconds=entry.seconds,
    )


def _first_line(error: BaseException | None) -> str:
    """The first sentence of an error, without the file of C++ that it begins with."""
    line = next(iter(str(error).splitlines()), "")
    return re.sub(r"^\[/[^]]*\] ", "", line).partition(". ")[0]
