"""Where a rank's time goes while a step is profiled: spans within spans, so that every moment is in exactly one place.

    step ├ data ├ F0 ┬ blocks.0 ─── all_reduce tp ── ┬ blocks.1 … ├ B0 … ├ optimizer …

The time of a span that no inner span covers is its own. All own times add up to the outermost span, by construction.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Span:
    """What a rank did from one moment to another."""

    kind: str
    """step, action, unit, wait, or a part of the step by its name."""
    name: str
    start: float
    """[seconds] Of `time.perf_counter`."""
    parent: int
    """Its place among the spans; -1 for the outermost."""
    end: float = 0.0
    axis: str = ""
    """wait: the axis of the operation."""
    number: int = 0
    """wait: of the operation on its axis, equal on all ranks that meet in it; 0 where nobody waits for all."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Clock:
    """Writes spans down while it is open. One thread at a time: another may go on where this one waits for it."""

    def __init__(self, settle: Callable[[], object] = lambda: None) -> None:
        """`settle`: called before the time is read, to have a device finish what it was asked for."""
        self.spans: list[Span] = []
        self._settle = settle
        self._open: list[int] = []

    def begin(self, kind: str, name: str, *, axis: str = "", number: int = 0) -> None:
        """Enter a span; nothing where no step is being timed."""
        if self._open or kind == "step":
            self._settle()
            parent = self._open[-1] if self._open else -1
            self._open.append(len(self.spans))
            self.spans.append(Span(kind, name, time.perf_counter(), parent, axis=axis, number=number))

    def end(self) -> None:
        """Leave the innermost span."""
        if self._open:
            self._settle()
            self.spans[self._open.pop()].end = time.perf_counter()

    @contextmanager
    def within(self, kind: str, name: str) -> Iterator[None]:
        self.begin(kind, name)
        try:
            yield
        finally:
            self.end()


def own_seconds(spans: list[Span]) -> list[float]:
    """Of each span, the time that no inner one covers."""
    own = [span.seconds for span in spans]
    for span in spans:
        if span.parent >= 0:
            own[span.parent] -= span.seconds
    return own
