"""How far a conversion is, and how long it will take: a line every few seconds on standard error."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta

from colonnade.planner.ranks import amount

EVERY_SECONDS = 5.0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts bytes of `total`; `what` is done to them."""

    def __init__(
        self, what: str, total: int, *, clock: Callable[[], float] = time.monotonic, say: Callable[[str], None] = _say
    ) -> None:
        self._what, self._total, self._clock, self._say = what, total, clock, say
        self._done = 0
        self._start = self._last = clock()

    def advance(self, num_bytes: int) -> None:
        """So many bytes more are done."""
        self._done += num_bytes
        now = self._clock()
        if now - self._last < EVERY_SECONDS:
            return
        self._last = now
        rate = self._done / (now - self._start)
        left = timedelta(seconds=round((self._total - self._done) / rate))
        done, total, speed = amount(self._done), amount(self._total), amount(round(rate))
        self._say(f"  {self._what} {done} of {total}, {speed}/s, {left} left")
