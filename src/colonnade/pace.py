"""When to tell how far something long is, how fast it goes, and how long it will take."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

EVERY_SECONDS = 5.0


MOST_SECONDS = 86_400 * 999_999_999
"""What `timedelta` holds."""


def time_of(seconds: float) -> timedelta:
    """So many seconds, to the whole; of more than can be told, the most."""
    return timedelta(seconds=round(min(seconds, MOST_SECONDS)))


class Reading(NamedTuple):
    """How it stands."""

    done: int
    rate: float
    """A second, from the beginning on."""
    left: timedelta


class Pace:
    """Counts work of some amount in all, and says every few seconds how it stands."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock, self._done = total, clock, 0
        self._start = self._last = clock()

    def advance(self, amount: int) -> Reading | None:
        """So much more is done. Something to tell, if it is time and anything is done."""
        self._done += amount
        now = self._clock()
        if now - self._last < EVERY_SECONDS or not self._done:
            return None
        self._last = now
        rate = self._done / (now - self._start)
        return Reading(self._done, rate, time_of((self._total - self._done) / rate))


def say_aside(line: str) -> None:
    """A line on standard error, at once: standard output has the result."""
    print(line, file=sys.stderr, flush=True)
