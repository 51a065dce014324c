"""What ends a run before its last step, with everything saved, and what has it save in between.

    SIGINT, SIGTERM, SIGHUP            end after the step under way; a second Ctrl-C at once   128 + the signal's number
    run.folder/stop, run.time_limit    the same; rank 0 looks                                  UNFINISHED
    run.folder/leave                   the same; rank 0 removes it                             UNFINISHED
    SIGUSR1                            save after the step under way, and go on

All ranks stop after the same step, and end with one status (`loop.py`).
SIGHUP comes when a terminal or a connection is closed; under nohup, which ignores it, the run goes on.
"""

import signal
import time
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from colonnade.launch.supervisor import UNFINISHED
from colonnade.train.run_folder import LEAVE_FILE, STOP_FILE

STOPPED = "interrupted"
"""The event of a run that somebody, or its time limit, has stopped: it goes on when it is started again."""


class Request(IntEnum):
    """What a run was asked to do after a step. Of what several ranks were asked the largest counts."""

    NOTHING = 0
    SAVE = 1
    STOP = 2


class Interrupt:
    """While the `with` block runs: what was asked for. Behind it, if the run has ended as it should, signals change
    nothing of how the process ends, but for a second Ctrl-C. `folder`: of the run, on the rank that looks for its stop
    file and at the clock; None elsewhere. `time_limit`: [seconds] from `began` (`time.monotonic`); None: from now.
    """

    def __init__(self, folder: Path | None = None, time_limit: float | None = None, began: float | None = None) -> None:
        self.requested = False
        self.exit_code = 0
        self.reason = ""
        self._saving = False
        self._ctrl_c = False
        self._remains = False
        """The file that asks to leave could not be removed."""
        self._file = None if folder is None else folder / STOP_FILE
        self._leave = None if folder is None else folder / LEAVE_FILE
        start = time.monotonic() if began is None else began
        self._limit = None if folder is None or time_limit is None else start + time_limit
        self._before: dict[signal.Signals, Any] = {}

    def newest(self) -> Request:
        """What was asked for since the last call, or to stop."""
        if not self.requested:
            self._look()
        saving, self._saving = self._saving, False
        return Request.STOP if self.requested else Request.SAVE if saving else Request.NOTHING

    def _look(self) -> None:
        if self._file is not None and is_there(self._file):
            self.reason = f" (there is a file {self._file}: remove it to train on)"
        elif self._leave is not None and is_there(self._leave):
            self._remains = not _removed(self._leave)
            self.reason = f" (there was a file {self._leave})"
        elif self._limit is not None and time.monotonic() >= self._limit:
            self.reason = " (run.time_limit)"
        if self.reason:
            self.requested, self.exit_code = True, UNFINISHED

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._request)
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        has_ended = kind is None or issubclass(kind, SystemExit)  # as it should: who asks now is too late
        for number, handler in self._before.items():
            if number == signal.SIGUSR1 or not has_ended:
                signal.signal(number, handler)
        if self._remains and self._leave is not None:
            _removed(self._leave)  # by now the run has saved

    def _request(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._ctrl_c:
                raise KeyboardInterrupt
            self._ctrl_c = True
        if not self.requested:  # who asks while the run saves to end by itself changes nothing of how
            self.requested, self.exit_code = True, 128 + number

    def _save(self, number: int, frame: FrameType | None) -> None:
        self._saving = True


def _removed(file: Path) -> bool:
    """False where the file system is lost for a while."""
    with suppress(OSError):
        file.unlink(missing_ok=True)
        return True
    return False


def is_there(file: Path) -> bool:
    """False also where the file system is lost for a while: the next step looks again."""
    try:
        return file.exists()
    except OSError:
        return False
