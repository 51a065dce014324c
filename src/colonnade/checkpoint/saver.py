"""Saving through a run: at once, or in the background while training goes on.

    main thread    train ─┬ wait for the last one ┬ next step's forward, backward ┬ copied? ┬ update … train
    background            └───────────────────────┴ copy to memory ─ write, sync, publish ──┴────────────────
                            blocked                                                 blocked

Never two at once. The thread talks to those of the other ranks over a group of its own, so its operations never come
between training's. Its failure is everyone's, as in any save, and is raised where the run next waits for it: at the
next save, at the end, or when `has_failed` tells (compare it between ranks: their clocks differ).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from colonnade.checkpoint.agree import Key, agree
from colonnade.checkpoint.failure import alone_is_fine
from colonnade.checkpoint.folders import tidy
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import Payload, Target, write
from colonnade.checkpoint.snapshot import Snapshot
from colonnade.launch.process import BACKGROUND
from colonnade.mesh.background import Group


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole."""

    path: Path
    step: int
    blocked_seconds: float
    """How long training stood still for it: waiting for the one before, and for the copy."""
    seconds: float
    """From the call until it was whole."""


class Saver:
    """Writes a run's checkpoints within its `with` block; on leaving that it waits for the one under way.

    Every rank makes one with the shards that it will hold at each save, and calls its methods in the same order. Making
    it tidies what a killed run has left. `group` is None for saving at once, and a group that nobody else uses
    (`mesh.background`) for `asynchronous` saving; that needs memory for a copy of what the rank writes. `overlap`: the
    caller calls `copied` before it changes what it has saved; otherwise `save` does that.
    `on_saved` is called when a checkpoint is whole, on every rank, by the thread that has written it.
    """

    def __init__(
        self,
        target: Target,
        shards: Sequence[Shard],
        *,
        asynchronous: bool,
        group: Group | None,
        overlap: bool = False,
        on_saved: Callable[[Saved], object] = lambda saved: None,
    ) -> None:
        self._target, self._group, self._overlap, self._on_saved = target, group, overlap, on_saved
        tidied = partial(tidy, target.folder, target.keep, target.spared, target.refused)
        self._agreement = agree(shards, group, then=tidied)
        pinned = any(shard.data.is_cuda for shard in shards)
        self._snapshot = Snapshot(self._agreement.items, pinned=pinned) if asynchronous else None
        self._under_way: Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._blocked = 0.0
        """Seconds, for the save under way."""
        self._waiting_since: float | None = None
        """When `copied` began to wait."""
        self._stack = ExitStack()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._under_way is not None and not self._under_way.done()

    @property
    def has_failed(self) -> bool:
        """Whether the last checkpoint has failed, and `wait` would raise."""
        return self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None

    def save(self, payload: Payload, shards: Callable[[], Sequence[Shard]]) -> None:
        """Write a checkpoint of what `shards()` returns now; if asynchronous, return when that may be changed.

        First waits for the save under way, and raises its failure. CheckpointError as `checkpoint.save.save`.
        """
        started = time.perf_counter()
        self.wait()
        tensors = self._agreement.tensors(shards())
        if self._snapshot is None:
            path = write(self._target, payload, self._agreement, tensors, group=self._group)
            seconds = time.perf_counter() - started
            self._on_saved(Saved(path, payload.step, seconds, seconds))
            return
        self._snapshot.wait_for_originals()
        self._copied.clear()
        self._blocked = time.perf_counter() - started
        self._under_way, self._thread = _in_background(
            partial(self._copy_and_write, payload, self._snapshot, tensors, started)
        )
        if not self._overlap:
            self.copied()

    def copied(self) -> None:
        """Return when what was saved last may be changed."""
        self._waiting_since = time.perf_counter()
        self._copied.wait()
        self._waiting_since = None

    def wait(self) -> None:
        """Return when nothing is being written; raise what made the last save fail, once."""
        under_way, self._under_way = self._under_way, None
        if self._thread is not None:
            self._thread.join()  # also what it still frees: tensors cannot be freed while the interpreter ends
            self._thread = None
        if under_way is not None:
            under_way.result()

    def __enter__(self) -> Self:
        self._stack.enter_context(alone_is_fine())  # for the thread, which must not touch filters of warnings
        if self._snapshot is not None:
            self._stack.callback(self._snapshot.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            return  # asked a second time to end at once: what is half written is never read
        with self._stack:
            try:
                self.wait()
            except Exception as failure:
                if error is None or isinstance(error, SystemExit):
                    raise
                error.add_note(f"The checkpoint under way failed as well: {failure}")

    def _copy_and_write(
        self, payload: Payload, snapshot: Snapshot, tensors: Mapping[Key, Tensor], started: float
    ) -> None:
        def copy() -> None:
            snapshot.take(tensors)
            if self._waiting_since is not None:
                self._blocked += time.perf_counter() - self._waiting_since
            self._copied.set()

        try:
            path = write(self._target, payload, self._agreement, snapshot.tensors, group=self._group, first=copy)
        finally:
            self._copied.set()  # a failure before the copy: nobody is to wait for it
        self._on_saved(Saved(path, payload.step, self._blocked, time.perf_counter() - started))


def _in_background(work: Callable[[], None]) -> tuple[Future[None], threading.Thread]:
    """Start `work` in a thread that dies with the process: whoever needs its end waits for it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001  whatever it is, the waiting thread raises it
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True, name=BACKGROUND)
    thread.start()
    return future, thread
