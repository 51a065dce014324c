"""How far an evaluation is, and how long it will take: a line every few seconds on standard error."""

import time
from collections.abc import Callable

from colonnade.pace import Pace, say_aside


class Progress:
    """Counts `what` (words) of a rank's share; silent unless `shown`. Time left goes by tokens read."""

    def __init__(
        self,
        what: str,
        *,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = say_aside,
    ) -> None:
        self._what, self._shown, self._clock, self._say = what, shown, clock, say
        self.begin(0, 0)

    def begin(self, total: int, tokens: int) -> None:
        """So many are to be done, of so many tokens in all."""
        self._done, self._total, self._pace = 0, total, Pace(tokens, self._clock)

    def advance(self, count: int, tokens: int) -> None:
        """So many more are done."""
        self._done += count
        told = self._pace.advance(tokens)
        if told is not None and self._shown:
            self._say(f"  {self._done:,} of {self._total:,} {self._what}, {told.left} left")
