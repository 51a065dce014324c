"""How far a conversion is, and how long it will take: a line every few seconds on standard error."""

import time
from collections.abc import Callable

from colonnade.config.numbers import amount
from colonnade.pace import Pace, say_aside


class Progress:
    """Counts bytes of `total`; `what` is done to them."""

    def __init__(
        self,
        what: str,
        total: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = say_aside,
    ) -> None:
        self._what, self._total, self._say, self._pace = what, total, say, Pace(total, clock)

    def advance(self, num_bytes: int) -> None:
        """So many bytes more are done."""
        told = self._pace.advance(num_bytes)
        if told is not None:
            done, total, speed = amount(told.done), amount(self._total), amount(round(told.rate))
            self._say(f"  {self._what} {done} of {total}, {speed}/s, {told.left} left")
