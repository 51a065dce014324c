"""A save that fails is tried again, and ends the run only when saves have failed for too long."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST, LONGEST = 10.0, 600.0  # seconds from a failure to the next try


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

    def __post_init__(self) -> None:
        self.good_at = self.clock()

    def saved(self) -> None:
        """A save was good."""
        self.good_at, self.failing_since, self.failures, self.next_try = self.clock(), None, 0, math.inf

    def failed(self) -> float:
        """A save has failed: seconds until the next try."""
        self.failures += 1
        self.failing_since = self.clock() if self.failing_since is None else self.failing_since
        wait = min(FIRST * 2.0 ** min(self.failures - 1, 10), LONGEST, max(self.limit / 4, 0.1))
        self.next_try = self.clock() + wait
        return wait

    @property
    def age(self) -> float:
        """[seconds] Of what was saved last."""
        return self.clock() - self.good_at

    @property
    def is_over(self) -> bool:
        """Whether a failure now ends the run."""
        since = self.failing_since
        return not self.limit or (since is not None and self.clock() - since > self.limit)

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next try."""
        return self.clock() >= self.next_try
