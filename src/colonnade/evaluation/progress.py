"""How far an evaluation is, and how long it will take: a line every few seconds on standard error."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta

EVERY_SECONDS = 5.0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts `what` (words) of a rank's share; silent unless `shown`. Time left goes by tokens read."""

    def __init__(
        self,
        what: str,
        *,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = _say,
    ) -> None:
        self._what, self._shown, self._clock, self._say = what, shown, clock, say
        self._done = self._total = self._read = self._to_read = 0
        self._start = self._last = clock()

    def begin(self, total: int, tokens: int) -> None:
        """So many are to be done, of so many tokens in all."""
        self._done, self._total, self._read, self._to_read = 0, total, 0, tokens
        self._start = self._last = self._clock()

    def advance(self, count: int, tokens: int) -> None:
        """So many more are done."""
        self._done, self._read = self._done + count, self._read + tokens
        now = self._clock()
        if not self._shown or now - self._last < EVERY_SECONDS:
            return
        self._last = now
        left = (now - self._start) * (self._to_read - self._read) / self._read
        self._say(f"  {self._done:,} of {self._total:,} {self._what}, {timedelta(seconds=round(left))} left")
