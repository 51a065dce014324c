"""Checkpoints to an object storage, beside training: by a thread of rank 0, which sees all files of a run's folder.

    a save is whole ─▶ wake ─▶ the newest checkpoint is not there? put it ─▶ delete what is not kept any more
                        ▲                                          │
                        └── 10 s … 10 minutes later ── said once ◀─┘ failed

One pass at a time brings the storage to what the disk has, so that nothing is to be remembered: of checkpoints that
were saved during an upload the newest comes next, what a killed run has left half is written anew, and what a rollback
has undone goes. A run never waits for it but at its end, and never ends because of it.
"""

import math
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from colonnade.checkpoint.names import MANIFEST, checkpoints_in, folder_name, newest_step
from colonnade.checkpoint.stored import RECORD, Stored, digest
from colonnade.config.saving import CheckpointConfig
from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.launch.process import BACKGROUND
from colonnade.storage import reason
from colonnade.train.best import spared
from colonnade.train.fetched import is_undone
from colonnade.train.monitor import Monitor
from colonnade.train.run_folder import ROLLBACKS, checkpoints
from colonnade.train.run_record import pack

FIRST, LONGEST = 10.0, 600.0  # seconds from a failure to the next try
LAST = 2.0  # seconds between tries while the run waits for its last upload
EVENT, FAILED, AGAIN, UNFINISHED = "uploaded", "upload failed", "upload works again", "upload unfinished"
ELSEWHERE = "whole, and not on the disk"
TAKEN = "upload lost to another"


class _TakenOver(Exception):
    """Another process uploads to the same place."""


def uploads_of(config: Config, monitor: Monitor, *, active: bool) -> "Uploads":
    """The uploads of a run, done by the rank that is `active`."""
    url = config.checkpoint.upload_to
    return Uploads(config, monitor, Stored(url) if active and url is not None else None)


class Uploads:
    """The uploads of one run, within a `with` block, on leaving which it waits for the last one. Every rank makes one;
    where there is nothing to do (`stored` is None) all calls do nothing.
    """

    def __init__(self, config: Config, monitor: Monitor, stored: Stored | None) -> None:
        self._run, self._kept = Path(config.run.folder), config.checkpoint
        self._monitor, self._stored = monitor, stored
        self._step: int | None = None
        """Whose files are being read."""
        self._there: dict[int, str] | None = None
        """What the storage has: of each step the digest, or ELSEWHERE; empty where it is not whole. None: look."""
        self._digests = dict[int, tuple[tuple[int, int, int], str]]()
        """Of manifests here: which file it was of."""
        self._still_counts = set[tuple[int, str, bytes]]()
        """What no rollback has undone: steps, as `_there` has them, and the rollbacks that were there then."""
        self._refreshes = True
        """The record beside the newest checkpoint is to be replaced."""
        self._id: str | None = None
        """By which the storage knows this process."""
        self._failures, self._pause = 0, 0.0
        self._asked = self._tried = 0
        self._done: float = 0
        """Numbers of calls of `wake`: the last, the one that the last pass began after, and the last it was good."""
        self._leaving = self._ended = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def follow(self, kept: CheckpointConfig) -> None:
        """Keep what these keys say from now on."""
        self._kept = kept

    def wake(self, *, refresh: bool = False) -> None:
        """The run's folder has changed. `refresh`: not by a save, so that the record has to follow it."""
        with self._changed:
            self._asked += 1
            self._refreshes |= refresh
            self._changed.notify_all()

    def in_use(self) -> Collection[int]:
        """The step that is being uploaded, whose files stay meanwhile."""
        step = self._step
        return () if step is None else (step,)

    def __enter__(self) -> Self:
        if self._stored is not None:
            self._thread = threading.Thread(target=self._work, args=(self._stored,), daemon=True, name=BACKGROUND)
            self._thread.start()
            self.wake()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stored is None:
            return
        if isinstance(error, KeyboardInterrupt):
            self._end()
            return
        self.wake(refresh=True)
        limit = min(self._kept.upload_patience, threading.TIMEOUT_MAX)
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
            good = self._changed.wait_for(self._is_done, timeout=min(limit, 1.0))
        if not good and limit > 1.0:
            self._monitor.say(f"Waiting for the upload to {self._stored.url}, {limit:g} s at most.")
            with self._changed:
                good = self._changed.wait_for(self._is_done, timeout=limit - 1.0)
        self._end()
        if good and self._thread is not None:
            self._thread.join()  # it has nothing left to do
        if not good:
            self._say_unfinished(self._stored)

    def _end(self) -> None:
        """Say nothing any more, and begin nothing."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _is_done(self) -> bool:
        return self._done >= self._asked

    def _say_unfinished(self, stored: Stored) -> None:
        newest = newest_step(checkpoints(self._run))
        self._monitor.event(UNFINISHED, checkpoint=folder_name(newest), url=stored.url)
        self._monitor.say(
            f"The upload of {folder_name(newest)} to {stored.url} has not ended within checkpoint.upload_patience = "
            f"{self._kept.upload_patience:g} s: it is on this machine's disk alone. The same command here uploads it."
        )

    def _work(self, stored: Stored) -> None:
        """The thread."""
        while self._is_wanted():
            number = self._tried
            try:
                self._check_owner(stored)
                while (step := self._next(stored)) is not None:
                    self._check_owner(stored)
                    self._upload(stored, step)
                self._tidy(stored)
                self._refresh(stored)
            except _TakenOver:
                self._leave_to_another(stored)
                return
            except Exception as error:  # noqa: BLE001  each storage's package raises its own kinds
                self._has_failed(stored, error)
            else:
                self._is_good(stored)
                self._is_over(number)

    def _is_over(self, number: float) -> None:
        """All is done that `wake` was called for until then."""
        with self._changed:
            self._done = number
            self._changed.notify_all()

    def _is_wanted(self) -> bool:
        """True when there is something to do, at once or again; False when the run is over."""
        end = time.monotonic() + self._pause
        with self._changed:
            while not self._ended:
                if self._leaving:
                    end = min(end, time.monotonic() + LAST)
                left = end - time.monotonic()
                if self._asked > self._tried or (self._failures and left <= 0):
                    self._tried = self._asked
                    return True
                self._changed.wait(left if self._failures else None)
        return False

    # --- one pass -----------------------------------------------------------------------------------------------------

    def _check_owner(self, stored: Stored) -> None:
        """_TakenOver where another process uploads there now: another machine goes on with the run."""
        if self._id is None:
            self._id = stored.claim()
        elif not stored.is_claimed(self._id):
            raise _TakenOver

    def _next(self, stored: Stored) -> int | None:
        """The step to upload next: the newest, or one that stays however old it is. None where all are there."""
        local = checkpoints_in(checkpoints(self._run))
        if self._there is None:
            self._there = self._look(stored, local)
        there = self._there
        steps = {*local, *(step for step, known in there.items() if known)}
        stay = spared(self._run, self._kept, steps) & local.keys()  # not a best here that is none beside those there
        wanted = [*sorted(local)[-1:], *sorted(stay, reverse=True)]
        return next((step for step in wanted if self._digest(step) not in (there.get(step), None)), None)

    def _look(self, stored: Stored, local: Collection[int]) -> dict[int, str]:
        def of(step: int, sealed: bool) -> str:
            if sealed and step in local:
                return digest(stored.read(step, MANIFEST))
            return ELSEWHERE if sealed else ""

        return {step: of(step, sealed) for step, sealed in stored.steps().items()}

    def _digest(self, step: int) -> str | None:
        """None of a checkpoint that was deleted meanwhile. One that is the same file as before is not read again."""
        manifest = self._folder(step) / MANIFEST
        try:
            found = manifest.stat()
            file = found.st_ino, found.st_size, found.st_mtime_ns
            if self._digests.get(step, (None,))[0] != file:
                self._digests[step] = file, digest(manifest.read_bytes())
        except FileNotFoundError:
            return None
        return self._digests[step][1]

    def _folder(self, step: int) -> Path:
        return checkpoints(self._run) / folder_name(step)

    def _upload(self, stored: Stored, step: int) -> None:
        assert self._there is not None, "`_next` has looked"
        self._step, folder, started = step, self._folder(step), time.perf_counter()
        try:
            manifest = (folder / MANIFEST).read_bytes()
            files = [file for file in sorted(folder.iterdir()) if file.name != MANIFEST]
            num_bytes = sum(file.stat().st_size for file in files) + len(manifest)
            self._there[step] = ""
            stored.put(step, files)
            self._put_record(stored, step)
            if (folder / MANIFEST).read_bytes() != manifest:
                return  # another one of this step has taken its place
            stored.seal(step, manifest)
            self._there[step] = digest(manifest)
        except FileNotFoundError:
            if folder.is_dir():
                raise
            return  # deleted since: the next look finds what there is now
        finally:
            self._step = None
        seconds = round(time.perf_counter() - started, 3)
        self._tell(EVENT, step=step, checkpoint=folder.name, url=stored.url, bytes=num_bytes, seconds=seconds)

    def _put_record(self, stored: Stored, step: int) -> None:
        """Put the record beside a checkpoint; beside the newest, it is as fresh as was asked for."""
        packed = self._run / f".{RECORD}.partial"
        if step == newest_step(checkpoints(self._run)):
            self._refreshes = False
        try:
            pack(self._run, packed)
            stored.put_record(step, packed)
        finally:
            packed.unlink(missing_ok=True)

    def _tidy(self, stored: Stored) -> None:
        """Delete all but the newest `upload_keep`, and what stays however old it is; also what was undone or is half.

        Only when the newest is there, as the disk has it: until then what else there is may be all. The run may have
        returned to another since the last look.
        """
        newest = newest_step(checkpoints(self._run))
        known = self._digest(newest)
        if self._there is None or known is None or known != self._there.get(newest):
            return
        whole = [step for step, known in sorted(self._there.items()) if known and step <= newest]
        steps = [step for step in whole if not self._was_undone(stored, step, self._there[step])]
        keep = self._kept.upload_keep or self._kept.keep
        stay = {*steps[-keep:], *spared(self._run, self._kept, steps)}
        for step in sorted(self._there):
            if step not in stay:
                stored.remove(step)
                del self._there[step]

    def _was_undone(self, stored: Stored, step: int, known: str) -> bool:
        """Whether it is of a course that a rollback has left: also behind a later one that has come as far. The storage
        is asked once, and only of what the disk has not.
        """
        try:
            asked = (step, known, (self._run / ROLLBACKS).read_bytes())
        except FileNotFoundError:
            return False
        if asked in self._still_counts or known == self._digest(step):
            return False
        if is_undone(stored, step, self._run):
            return True
        self._still_counts.add(asked)
        return False

    def _refresh(self, stored: Stored) -> None:
        """Put the record beside the newest checkpoint; one that has not been uploaded yet will bring it along."""
        newest = newest_step(checkpoints(self._run))
        if self._refreshes and self._there is not None and self._there.get(newest):
            try:
                self._put_record(stored, newest)
            except BaseException:
                self._refreshes = True
                raise

    # --- what is said -------------------------------------------------------------------------------------------------

    def _leave_to_another(self, stored: Stored) -> None:
        self._tell(TAKEN, url=stored.url)
        self._say(
            f"Another process has begun to upload to {stored.url}: this one does not any more, and goes on. Where that "
            "is the same run on another machine, end one of them; of two runs, give each its own checkpoint.upload_to."
        )
        self._is_over(math.inf)

    def _has_failed(self, stored: Stored, error: Exception) -> None:
        self._failures += 1
        self._pause = min(FIRST * 2.0 ** min(self._failures - 1, 10), LONGEST)
        self._there = None
        if self._failures > 1:
            return
        why = f"{type(error).__name__}: {reason(error, stored.url)}".partition("\n")[0][:500]
        self._tell(FAILED, url=stored.url, reason=why)
        self._say(
            f"Uploading to {stored.url} has failed: {why}\nThe run goes on, and tries again: in {self._pause:g} s, "
            "then after ever longer pauses, and at each checkpoint. It is said when it works again."
        )

    def _is_good(self, stored: Stored) -> None:
        failures, self._failures, self._pause = self._failures, 0, 0.0
        if failures:
            self._tell(AGAIN, url=stored.url, tries=failures + 1)
            self._say(f"Uploading to {stored.url} works again, at try {failures + 1}.")

    def _tell(self, kind: str, **details: object) -> None:
        if not self._ended:
            with suppress(ConfigError):  # a disk that refuses the event: whoever needs the disk tells it
                self._monitor.event(kind, **details)

    def _say(self, text: str) -> None:
        if not self._ended:
            self._monitor.say(text)
