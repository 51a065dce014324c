"""Numbers to other programs, beside training: one small interface, and a thread that a run never waits for.

    step ─▶ put ─▶ queue of bounded length ─▶ thread ─▶ TensorBoard, Weights & Biases, MLflow, Prometheus

metrics.jsonl has every number, whatever happens here. Where a tracker is slow or cannot be reached, the queue fills and
what does not fit is counted and said. A tracker that fails is told, once until it has worked again, tried again with
each number, and never ends a run.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from colonnade.config.numbers import counted
from colonnade.errors import without_credentials

LONGEST = 10_000
"""Entries that wait for a tracker."""
PAUSE = 5.0
"""[seconds] Between two tries to open a tracker that could not be reached."""
QUIET = 3600.0
"""[seconds] From a failure that is told to the next one that is: a tracker may fail and work in turn."""
Numbers = Mapping[str, float | int]
Entries = queue.Queue[Callable[[], None] | None]


class Tracker(Protocol):
    """Where numbers go. One thread makes all calls, in this order: open, then numbers and events, close."""

    name: str

    def open(self, first: int) -> None:
        """Begin to write; `first`: the step that comes. What was written of it and of later ones is superseded, where a
        program can take it back: in TensorBoard.
        """
        ...

    def numbers(self, step: int, values: Numbers) -> None: ...

    def event(self, step: int, kind: str, words: str) -> None: ...

    def close(self) -> None: ...


class Feed:
    """One tracker's queue and thread. Nothing here waits but `close`, and that not for long."""

    def __init__(self, tracker: Tracker, say: Callable[[str], None], *, longest: int = LONGEST) -> None:
        self.dropped = 0
        """Entries that did not fit into the queue, that the tracker did not take, or that were left when it closed."""
        self._said_dropped = 0
        self._tracker, self._say = tracker, say
        self._longest = longest
        self._queue: Entries = queue.Queue(longest)
        self._stop = threading.Event()
        self._is_open, self._try_after = False, 0.0
        self._told, self._told_at, self._dropped_before = False, -math.inf, 0
        """Whether it was told that it fails, when that was told last, and what was dropped by then."""
        self._thread: threading.Thread | None = None
        self._last: threading.Thread | None = None
        """The last that was begun, which may not have ended yet."""

    def begin(self, first: int) -> None:
        """Have a thread open the tracker and write what is put, from step `first` on; one that still stands in a call
        of the tracker's ends before.
        """
        self._queue, self._stop = queue.Queue(self._longest), threading.Event()
        self._thread = threading.Thread(
            target=self._write,
            args=(first, self._queue, self._stop, self._last),
            daemon=True,
            name=f"tracking by {self._tracker.name}",
        )
        self._last = self._thread
        self._thread.start()

    def numbers(self, step: int, values: Numbers) -> None:
        self._put(lambda: self._tracker.numbers(step, values))

    def event(self, step: int, kind: str, words: str) -> None:
        self._put(lambda: self._tracker.event(step, kind, words))

    def close(self, patience: float) -> None:
        """Return when all is written, or after `patience` seconds; says what was lost since it was said last."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        patience, num_marks = min(patience, threading.TIMEOUT_MAX), 1
        end = time.monotonic() + patience
        try:
            self._queue.put(None, timeout=patience)
        except queue.Full:
            self._stop.set()
            num_marks = 0
        thread.join(max(0.0, min(end - time.monotonic(), patience)))
        self._stop.set()
        self.dropped += max(0, self._queue.qsize() - num_marks)
        if self.dropped > self._said_dropped or thread.is_alive():
            self._said_dropped = self.dropped
            self._say(
                f"{self._tracker.name} has not got {self.dropped:,} entries, or not said that it has the last. "
                "metrics.jsonl and events.jsonl have them all."
            )

    def _put(self, entry: Callable[[], None]) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self.dropped += 1

    def _write(self, first: int, entries: Entries, stop: threading.Event, before: threading.Thread | None) -> None:
        """The thread."""
        if before is not None:
            before.join()
        self._try_after = 0.0
        while not stop.is_set() and (entry := entries.get()) is not None:
            self._try(entry, first)
        if self._is_open:
            self._guarded(self._tracker.close)
            self._is_open = False

    def _try(self, entry: Callable[[], None], first: int) -> None:
        if not self._is_open and time.monotonic() >= self._try_after:
            self._is_open = self._guarded(lambda: self._tracker.open(first))
            self._try_after = time.monotonic() + PAUSE
        if self._is_open and self._guarded(entry):
            self._tell_works()
        else:
            self.dropped += 1

    def _guarded(self, call: Callable[[], None]) -> bool:
        """Whether a call of the tracker's has gone well. What it raises is told, once until it works again: training
        goes on.
        """
        try:
            call()
        except Exception as error:  # noqa: BLE001  any program's any error
            self._tell_fails(error)
            return False
        return True

    def _tell_fails(self, error: Exception) -> None:
        now = time.monotonic()
        if not self._told and now - self._told_at >= QUIET:
            self._told, self._told_at, self._dropped_before = True, now, self.dropped
            text = without_credentials(str(error)).partition("\n")[0][:200]
            self._say(f"{self._tracker.name}: {type(error).__name__}: {text}. The run goes on, and tries again.")

    def _tell_works(self) -> None:
        if self._told:
            lost = counted(self.dropped - self._dropped_before, "entry", "entries")
            self._say(f"{self._tracker.name} works again, without {lost}, which metrics.jsonl and events.jsonl have.")
        self._told = False
