"""Ctrl-C, SIGTERM and SIGHUP end a run after the step under way, with everything saved; a second Ctrl-C at once.

SIGHUP comes when a terminal or a connection is closed; under nohup, which ignores it, the run goes on.
"""

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """While the `with` block runs: `requested` tells whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.requested = False
        self.exit_code = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self.exit_code = 128 + number
