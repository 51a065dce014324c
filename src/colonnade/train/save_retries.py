"""A save that fails is tried again, and ends the run only when saves have failed for too long. So is a checkpoint that
the disk refuses (`damaged.py`).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST, LONGEST = 10.0, 600.0  # seconds from a failure to the next try
LAST = 2.0  # seconds between tries while nothing but the save is left to do


@dataclass
class SaveRetries:
    """Failed saves of a run, since the last that was good. Times are of this rank's clock; rank 0's decide."""

    limit: float
    """[seconds] How long saves may fail, from the first failure on."""
    clock: Callable[[], float] = time.monotonic
    failures: int = 0
    good_at: float = field(init=False)
    failing_since: float | None = None
    next_try: float = math.inf
    is_early: bool = False
    """The last failure was before the try that had been told of: a run with a small checkpoint.every saves often."""

    def __post_init__(self) -> None:
        self.good_at = self.clock()

    def saved(self) -> None:
        """A save was good."""
        self.good_at, self.failing_since, self.failures, self.next_try = self.clock(), None, 0, math.inf

    def failed(self, *, must: bool = False) -> float:
        """A save has failed: seconds until the next try, twice as long each time. One that fails before that puts it
        off no further. `must`: the run waits for it.
        """
        now = self.clock()
        self.failures += 1
        self.failing_since = now if self.failing_since is None else self.failing_since
        self.is_early = now < self.next_try < math.inf
        if self.is_early:
            wait = self.next_try - now
        else:
            wait = min(FIRST + now - self.failing_since, LONGEST, max(self.limit / 4, 0.1))
            self.next_try = now + wait
        return min(wait, LAST) if must else wait

    def in_words(self, step: int, reason: object, wait: float, *, must: bool) -> str:
        """What to say of a save that has failed, and is tried again in `wait` seconds; `must` as in `failed`."""
        goes_on = (
            f"waits for it, and tries again every {wait:.3g} s" if must else f"goes on, and saves again in {wait:.3g} s"
        )
        return (
            f"Saving at step {step} has failed: {reason}\nThe run {goes_on}. It ends if a save fails more than "
            f"checkpoint.retry_for = {self.limit:g} seconds after the first that did. What was saved last, or the "
            f"start, is {self.age:.0f} seconds old."
        )

    @property
    def age(self) -> float:
        """[seconds] Of what was saved last."""
        return self.clock() - self.good_at

    @property
    def failing_for(self) -> float:
        """[seconds] Since the first failure; 0 before it."""
        return 0.0 if self.failing_since is None else self.clock() - self.failing_since

    @property
    def until(self) -> str:
        """When the run ends if what fails goes on to fail, in words."""
        seconds = round(self.failing_for)
        so_far = f", and it has for {seconds}" if seconds else ""
        return f"The run ends if that lasts for more than checkpoint.retry_for = {self.limit:g} seconds{so_far}."

    @property
    def is_over(self) -> bool:
        """Whether a failure now ends the run."""
        return not self.limit or self.failing_for > self.limit

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next try."""
        return self.clock() >= self.next_try
