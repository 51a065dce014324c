"""Watching over the ranks of a local run: what is shown, who is to blame, what is stopped.

Rank 0's output is the run's output. Of errors one is shown, whole: that of the rank that failed first. What the other
ranks then say (connections lost) is a consequence, and is not shown; that is why rank 0's error stream is held back for
a moment. A crash comes before everything else; a user's mistake (exit status 2) before exceptions; of exceptions the
first raised. Ranks note what they raise in a file (`launch.note_failure`), because the order of exits tells little, and
a busy machine takes its time to end a process: a mistake that is noted ends the run, with its message alone.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from colonnade.launch.board import explanation_file, how_ended, no_room, note_end, note_of_failure, report_file
from colonnade.launch.explanation import together
from colonnade.launch.fork_server import forget
from colonnade.launch.guard import line_of
from colonnade.launch.starter import Process, Starter, send
from colonnade.mesh.process import process_id_of

TICK = 0.1  # seconds between looks at rank 0's error stream
HOLD = 0.7  # seconds that rank 0's error stream is held back, in case it is the consequence of another rank's failure
GRACE = 1.0  # seconds from the first failure in which others may turn out to be the cause
EXPLAIN = 5.0  # seconds in which the others may tell that they waited for a rank that is gone
LATELY = 3.0  # seconds; ranks that watch report more often
STOP = 3.0  # seconds between asking a rank to stop and making it
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)  # never a consequence of another's failure
UNFINISHED = 99
"""Exit status of a run that has stopped before its last step, with everything saved, and is to be started again
(for which Grid Engine queues a job again)."""
CRASH, MISTAKE, EXCEPTION, WAIT = range(4)  # failures, from cause to consequence
USER_MISTAKE = 2  # the exit status of a ColonnadeError
At = tuple[float, Callable[[], "At | None"]]
"""Seconds after the start, and what to do then, which says what is to be done later."""
STUCK = 75  # the exit status of a rank that has waited too long and has explained for whom (sysexits.h: try again)


@dataclass(frozen=True)
class Failure:
    """What a rank notes when it raises."""

    time: float
    """Monotonic, in seconds."""
    mistake: str | None
    """The message, where it is a mistake of the user."""
    said: str = ""
    """The first line of the error, with its kind."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Cause:
    """Why a run has failed."""

    rank: int | None
    """Who is to blame; None where nobody knows."""
    order: int
    """CRASH, MISTAKE, EXCEPTION or WAIT."""
    said: str
    """In words: of one line."""
    noticed: float = 0.0
    """[seconds] When, of `time.monotonic`."""


@dataclass
class _Rank:
    number: int
    process: Process
    output: IO[bytes] | None
    errors: IO[bytes]
    note: Path
    """Written by the rank when it raises."""
    status: int | None = None
    ended: float = 0.0
    shown: int = 0
    """Bytes of `errors` that have been shown."""

    def send(self, number: int) -> None:
        """Send a signal to the rank and to what it has started."""
        send(self.process, number)

    def cause_order(self) -> tuple[int, float]:
        """Failures sort by this from cause to consequence. A mistake that all ranks report is told by rank 0."""
        if self.status is not None and -self.status in CRASHES:
            return CRASH, self.ended
        failure = self.failure()
        if self.status == USER_MISTAKE or (failure is not None and failure.mistake is not None):
            return MISTAKE, self.number
        if self.status == STUCK:
            return WAIT, self.ended
        return EXCEPTION, self.ended if failure is None else failure.time

    def failure(self) -> Failure | None:
        """What the rank has raised, if it has."""
        return Failure(**json.loads(self.note.read_text(encoding="utf-8"))) if self.note.exists() else None

    def text(self, stream: IO[bytes], start: int = 0) -> bytes:
        return os.pread(stream.fileno(), os.fstat(stream.fileno()).st_size - start, start)


@dataclass(frozen=True)
class Ended:
    """How a local run has ended."""

    status: int
    asked: int
    """The first signal that has asked it to; 0: none has."""
    cause: Cause | None
    """Why it has failed, if it has."""
    unheard: Sequence[int] = ()
    """Signals that have come too late for any rank."""


@dataclass
class Supervisor:
    """The ranks of one local run: `run` once, then `close`; both while `events` get the signals that come."""

    command: list[str]
    num_ranks: int
    folder: Path
    """A temporary one, where ranks note their failures."""
    environment: Callable[[int, int], dict[str, str]]
    """Of a rank, given its number and the pipe that it is to watch."""
    ranks: list[_Rank] = field(default_factory=list)
    events: "SimpleQueue[_Rank | int]" = field(default_factory=SimpleQueue)
    """Ranks that have ended, and signals that have come: all is decided in one thread, outside of signal handlers."""
    keep: tuple[int, ...] = ()
    """Descriptors that every rank inherits."""
    imports: tuple[str, ...] = ()
    """Modules that ranks import, for the process they are forked from."""
    after_a_loss: Callable[[], str] = lambda: ""
    """What to do when a rank was killed or has never come, in words."""
    asked: list[int] = field(default_factory=list)
    """Signals that have been passed on."""
    files: ExitStack = field(default_factory=ExitStack)
    pipe: int = -1
    guard: "subprocess.Popen[bytes] | None" = None
    """Tidies up if this process is killed."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Bytes in rank 0's error stream at a time."""
    reports: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By rank: the time of its last report's file, and when that was first seen (monotonic, in seconds)."""
    stopping: bool = False
    """Ranks that end from now on have been made to."""
    cause: Cause | None = None
    """Why the run has failed, once it has."""
    own: tuple[Path, ...] = ()
    """Further folders that the guard removes."""
    at: At | None = None

    def run(self) -> int:
        """Start the ranks, stay with them until they end, and return the exit status of the run."""
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # inherited: the system then keeps nobody's exit status
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.files.callback(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
        self._start_guard()
        starter = Starter(self.command, self.keep, lambda text: self._show(text.encode()), self.imports)
        while not (starter.is_ready() or self.asked):
            self._wait(TICK / 10)
        if self.asked:
            forget()  # what ranks would have been forked from still imports
            return 128 + self.asked[0]
        self._start_ranks(starter)
        started = time.monotonic()
        while self._running() and not self._failed():
            self._wait(TICK)
            self._look_at_reports()
            if self.at is not None and time.monotonic() > started + self.at[0]:
                self.at = self.at[1]()
            self._show_held(time.monotonic() - HOLD)
        return self._fail() if self._failed() else self._succeed()

    def close(self) -> None:
        """Leave nothing behind: no process, no open file."""
        self.stopping = True
        for rank in self.ranks:
            rank.send(signal.SIGKILL)
            rank.process.wait()
        self.files.close()
        if self.pipe >= 0:
            os.close(self.pipe)
        if self.guard is not None:
            self.guard.kill()
            self.guard.communicate()

    def unheard(self) -> list[int]:
        """Signals that have come since the last look, when no rank was left to hear them."""
        events = [self.events.get() for _ in range(self.events.qsize())]
        return [event for event in events if isinstance(event, int)]

    def _start_guard(self) -> None:
        self.guard = subprocess.Popen(
            [sys.executable, "-m", "colonnade.launch.guard", str(self.folder), *map(str, self.own)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _start_ranks(self, starter: Starter) -> None:
        theirs, self.pipe = os.pipe()
        try:
            for number in range(self.num_ranks):
                self.ranks.append(self._start_rank(starter, number, theirs))
        finally:
            os.close(theirs)

    def _start_rank(self, starter: Starter, number: int, pipe: int) -> _Rank:
        errors = self._open_file()
        output = self._open_file() if number else None
        process = starter.start(f"rank {number}", self.environment(number, pipe), pipe, output, errors)
        self._tell_guard(process.pid)
        rank = _Rank(number, process, output, errors, note_of_failure(self.folder, number))
        threading.Thread(target=self._await, args=(rank,), daemon=True).start()
        return rank

    def _tell_guard(self, pid: int) -> None:
        assert self.guard is not None and self.guard.stdin is not None, "the guard is there before any rank"
        with suppress(BrokenPipeError):  # it was killed: ranks end with their supervisor by themselves
            self.guard.stdin.write(line_of(process_id_of(pid)))
            self.guard.stdin.flush()

    def _open_file(self) -> IO[bytes]:
        return self.files.enter_context(tempfile.TemporaryFile(dir=self.folder))

    def _await(self, rank: _Rank) -> None:
        status = rank.process.wait()
        rank.ended = time.monotonic()
        if not self.stopping and status not in (STUCK, *self._good()):
            note_end(self.folder, rank.number, how_ended(status))  # whoever waits for it need not wait longer
        rank.status = status
        self.events.put(rank)

    def _wait(self, seconds: float) -> None:
        """Return after `seconds`, or when something has happened and has been dealt with."""
        try:
            event = self.events.get(timeout=seconds)
        except Empty:
            return
        if event == signal.SIGTSTP:
            self._suspend()
        elif isinstance(event, int):
            self._pass_on(event)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGINT and number in self.asked:
            number = signal.SIGKILL  # the second Ctrl-C: at once
        if number != signal.SIGUSR1:  # which asks nobody to end
            self.asked.append(number)
        for rank in self._running():
            rank.send(number)

    def _suspend(self) -> None:
        """Ctrl-Z: the ranks stand still as long as this process does."""
        for number, process in ((signal.SIGSTOP, os.getpid()), (signal.SIGCONT, None)):
            for rank in self._running():
                rank.send(number)
            if process is not None:
                os.kill(process, signal.SIGSTOP)

    def _running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.status is None]

    def _failed(self) -> list[_Rank]:
        """Ranks that have ended badly, or have raised and may hang on their way out. Ending as asked is no failure."""
        good, notes = (None, *self._good()), set(os.listdir(self.folder))
        return [rank for rank in self.ranks if rank.status not in good or rank.note.name in notes]

    def _good(self) -> tuple[int, ...]:
        return 0, UNFINISHED, *(128 + number for number in self.asked)

    def _succeed(self) -> int:
        self._show_held(math.inf)
        return max(rank.status or 0 for rank in self.ranks)

    def _fail(self) -> int:
        """Find the rank that failed first, stop the others, show its error."""
        noticed = time.monotonic()
        if not self._mistakes():
            self._wait_all(GRACE)
            self._await_the_raised()
        cause = self._cause()
        if self._is_silent(cause) and not self.asked:
            self._await_explanations()
            cause = self._cause()  # somebody may have said more by now
        by_itself, order = cause.status is not None, cause.cause_order()[0]  # before it is made to end
        self.stopping = True
        self.cause = Cause(self._blamed(cause), order, self._in_words(cause, by_itself), noticed)
        for number in (signal.SIGTERM, signal.SIGKILL) if cause.status != STUCK else (signal.SIGKILL,):
            for rank in self._running():
                rank.send(number)
            self._wait_all(STOP)
        status = cause.status if by_itself and cause.status is not None else 1
        if -status in self.asked:
            return 128 + self.asked[0]  # stopped as asked: no error to show
        if order == MISTAKE:
            self._show_mistake(cause)
            return USER_MISTAKE
        return self._show_cause(cause, status)

    def _cause(self) -> _Rank:
        return min(self._failed(), key=_Rank.cause_order)

    def _blamed(self, cause: _Rank) -> int | None:
        """Who has only waited is a victim: the rank to blame is the one that has neither ended nor explained itself."""
        if cause.cause_order()[0] != WAIT:
            return cause.number
        silent = [rank.number for rank in self._running()]
        return silent[0] if len(silent) == 1 else None

    def _in_words(self, cause: _Rank, by_itself: bool) -> str:
        """Of one line."""
        status, failure = cause.status, cause.failure()
        if failure is not None:
            return f"rank {cause.number} raised {failure.said}"
        if status == STUCK:
            explained = explanation_file(self.folder, cause.number)
            first = explained.read_text(encoding="utf-8").partition("\n")[0] if explained.exists() else ""
            return first or f"rank {cause.number} waited too long"
        if status is None or not by_itself:
            return f"rank {cause.number} was made to end"
        if status < 0:
            return _killed(cause.number, -status)
        lost = "" if cause.text(cause.errors, cause.shown).strip() else no_room(self.folder)
        return f"rank {cause.number} {how_ended(status)}{lost and f', and {lost}'}"

    def _mistakes(self) -> list[_Rank]:
        """Ranks that have noted a mistake of the user."""
        return [rank for rank in self.ranks if (failure := rank.failure()) is not None and failure.mistake is not None]

    def _is_silent(self, rank: _Rank) -> bool:
        """Whether a failed rank has left no error that says why."""
        return rank.status is not None and (rank.status == STUCK or -rank.status in CRASHES)

    def _show_cause(self, cause: _Rank, status: int) -> int:
        """Show what is to be said, and return the exit status of the run."""
        if status != STUCK:
            self._show_error(cause, status)
        if self._is_silent(cause):
            self._show_explanations(self._in_words(cause, True) if status == STUCK else "")
            self._show(_line(self.after_a_loss()))
        return status if status > 0 else 128 - status

    def _show_mistake(self, cause: _Rank) -> None:
        """The rank's error stream, which ends with the message, or will when the rank has come that far."""
        failure, text = cause.failure(), cause.text(cause.errors, cause.shown)
        if not text.strip() and cause.output is not None:
            text = cause.text(cause.output)
        message = b"" if failure is None or failure.mistake is None else f"colonnade: {failure.mistake}\n".encode()
        self._show(text if message in text else text + message)

    def _await_explanations(self) -> None:
        """Ranks that watch their waits find out for themselves that somebody is gone, say so, and end."""
        end = time.monotonic() + EXPLAIN
        self._look_at_reports()  # all may have happened before the first look
        while time.monotonic() < end and any(self._has_reported(rank.number) for rank in self._running()):
            self._wait(TICK)
            self._look_at_reports()

    def _look_at_reports(self) -> None:
        """When ranks were last seen to have reported: by a clock that nobody sets, unlike that of the files."""
        for rank in self._running():
            with suppress(OSError):  # it has not reported yet
                written = report_file(self.folder, rank.number).stat().st_mtime_ns
                if self.reports.get(rank.number, (0, 0.0))[0] != written:
                    self.reports[rank.number] = written, time.monotonic()

    def _has_reported(self, rank: int) -> bool:
        """Whether a rank has said something lately: one that stands still itself will explain nothing."""
        return rank in self.reports and time.monotonic() - self.reports[rank][1] < LATELY

    def _show_explanations(self, otherwise: str) -> None:
        files = {rank.number: explanation_file(self.folder, rank.number) for rank in self.ranks}
        texts = {rank: file.read_text(encoding="utf-8") for rank, file in files.items() if file.exists()}
        self._show(_line(together(texts) if texts else otherwise))

    def _await_the_raised(self) -> None:
        """Ranks that have raised are on their way out: Python with torch takes a second or two to end, and its exit
        status tells a user's mistake from a bug. One that hangs on its way is not waited for.
        """
        end = time.monotonic() + STOP
        while any(rank.status is None for rank in self._failed()) and time.monotonic() < end:
            self._wait(TICK)

    def _wait_all(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._running() and time.monotonic() < end:
            self._wait(TICK)

    def _show_held(self, until: float) -> None:
        """Show what rank 0 had written to its error stream at time `until`, unless a rank has failed since."""
        if self._failed():
            return
        first = self.ranks[0]
        self.sizes.append((time.monotonic(), os.fstat(first.errors.fileno()).st_size))
        while self.sizes and self.sizes[0][0] <= until:
            size = self.sizes.pop(0)[1]
            self._show(first.text(first.errors, first.shown)[: size - first.shown])
            first.shown = size

    def _show_error(self, cause: _Rank, status: int) -> None:
        if status < 0:
            self._show(f"{_killed(cause.number, -status)}\n".encode())
        elif cause.number:
            self._show(f"rank {cause.number} failed with exit status {status}:\n".encode())
        error = cause.text(cause.errors, cause.shown)
        if not error.strip() and cause.output is not None:
            error = cause.text(cause.output)
        lost = "" if status < 0 or error.strip() else no_room(self.folder)  # who is killed says nothing
        self._show(error + _line(lost and f"rank {cause.number}: {lost}"))

    def _show(self, text: bytes) -> None:
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()


def _line(text: str) -> bytes:
    return f"{text}\n".encode() if text else b""


def _killed(rank: int, number: int) -> str:
    why = ", perhaps out of memory" if number == signal.SIGKILL else ""
    return f"rank {rank} was {how_ended(-number)}{why}"
