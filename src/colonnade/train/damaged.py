"""A newest checkpoint that is damaged is set aside, and the run goes on from the newest sound one, of those on the disk
and those in checkpoint.upload_to; said, and an event.

    look        before anything reads it: what its manifest and the sizes of its files show
    restored    while it is read, at a start or by a run that returns to it: what the hashes of its bytes show

One that the disk refuses (`errors.AWAY`) is read again, for as long as a save that fails: a disk or a network that is
away is no damage. Where it has an input/output error after `BAD` seconds too, and all of the checkpoint before it can
be read, sectors of it are bad. A storage of which a part alone is away for longer looks the same, and costs one
checkpoint: a second one is not set aside for that.

Rank 0 alone judges, fetches and renames. Where there is no other checkpoint nothing is touched, and the run is refused.
"""

import errno
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

from colonnade.checkpoint.folders import set_aside_damaged
from colonnade.checkpoint.manifest import Manifest, looked_at, verify
from colonnade.checkpoint.names import checkpoints_in, newest_in
from colonnade.config.schema import Config
from colonnade.errors import AWAY, CheckpointError, ColonnadeError, DamagedError, UnreadableError
from colonnade.launch.agreement import on_all_ranks
from colonnade.launch.process import BACKGROUND
from colonnade.mesh.agreement import broadcast_text, gather_texts
from colonnade.mesh.mesh import Axis
from colonnade.train import recovery
from colonnade.train.corpus import Corpus
from colonnade.train.fetched import fetch_for_damaged
from colonnade.train.metadata import RunMetadata
from colonnade.train.monitor import Monitor
from colonnade.train.run_folder import checkpoints
from colonnade.train.save_retries import SaveRetries
from colonnade.train.state import TrainState

EVENT, REFUSED = "damaged checkpoint", "read failed"
TICK = 5.0  # seconds
BAD = 300.0  # seconds that a disk refuses what is bad sectors: a storage that fails over is mostly back by then
AGAIN, OVER = "again", "over"


def look(config: Config, world: Axis, monitor: Monitor) -> Manifest | None:
    """Set aside newest checkpoints that cannot be whole, and wait for a disk that is away; every rank calls this.
    CheckpointError, on all of them, where that does not help. What rank 0 has read; the others read nothing yet.
    """
    otherwise = _Otherwise(config, world, monitor)
    while True:
        error, seen = _fault(config, world)
        if error is None:
            return seen
        if not otherwise(error):
            raise error


def restored(
    state: TrainState, config: Config, corpus: Corpus, monitor: Monitor, known: Manifest | None = None
) -> tuple[Path, RunMetadata] | None:
    """As `recovery.restore`, from another checkpoint where the newest is damaged."""
    otherwise = _Otherwise(config, state.ownership.mesh.world, monitor)
    while True:
        try:
            return recovery.restore(state, config, corpus, known=known)
        except (DamagedError, UnreadableError) as error:
            if not otherwise(error):
                raise


def _fault(config: Config, world: Axis) -> tuple[CheckpointError | None, Manifest | None]:
    """Why the newest checkpoint cannot be read, on any rank; or what rank 0 sees of damage. The same on all ranks. And
    what this rank has read of it.
    """
    manifest, *mine = _seen(config, world.rank)
    seen = [json.loads(text) for text in gather_texts(json.dumps(mine), world)]
    kind, text = next((each for each in seen if each[0] == "unreadable"), seen[0])
    return {"damaged": DamagedError, "unreadable": UnreadableError}[kind](text) if kind else None, manifest


def _seen(config: Config, rank: int) -> tuple[Manifest | None, str, str]:
    """Without reading its tensors. One rank judges for all: the others see whether the folder is there for them."""
    try:
        newest = newest_in(checkpoints(Path(config.run.folder)))
        return None if newest is None or rank else looked_at(newest), "", ""
    except DamagedError as error:
        return None, "damaged", str(error)
    except OSError as error:
        if error.errno in AWAY:
            said = f"Rank {rank} cannot read the newest checkpoint: {error}. Mend the disk or its mount."
            return None, "unreadable", said
    except CheckpointError:
        pass  # foreign or newer: whoever reads it says so
    return None, "", ""


class _Otherwise:
    """What is tried where the newest checkpoint cannot be gone on from. All ranks have one, and call it alike."""

    def __init__(self, config: Config, world: Axis, monitor: Monitor) -> None:
        self._config, self._world, self._monitor = config, world, monitor
        self._tries = SaveRetries(config.checkpoint.retry_for)
        self._falls_back = config.restarts.limit > 0 and config.restarts.damaged == "fall_back"
        self._may_be_bad = self._falls_back

    def __call__(self, error: CheckpointError) -> bool:
        """Whether the newest checkpoint is to be read again: it is another one now, or time has passed."""
        why = str(error)
        if isinstance(error, UnreadableError):
            why = by_rank_0(lambda: self._refused(str(error)), self._world)
            if why in (AGAIN, OVER):
                return why == AGAIN
            self._may_be_bad = False
        if not self._falls_back:
            return False
        return by_rank_0(lambda: str(_replaced(self._config, self._monitor, why)), self._world) == str(True)

    def _refused(self, reason: str) -> str:
        """On rank 0: `AGAIN`, after a while; `OVER`; or why it is damaged."""
        tries = self._tries
        if self._may_be_bad and (tries.is_over or tries.failing_for >= BAD) and (bad := _bad(self._config)):
            return bad
        if tries.is_over:
            return OVER
        wait = tries.failed()
        self._monitor.event(REFUSED, reason=reason, tries=tries.failures)
        self._monitor.say(
            f"{reason}\nIt is read again in {wait:g} s. The run ends if it is refused for more than "
            f"checkpoint.retry_for = {tries.limit:g} seconds."
        )
        time.sleep(wait)
        return AGAIN


def _bad(config: Config) -> str:
    """That the disk has an input/output error where the newest checkpoint is, and gives all of the one before; or what
    is damaged of the newest. "" where neither is certain.
    """
    with suppress(ColonnadeError, OSError):
        *_, before, last = [None, None, *checkpoints_in(checkpoints(Path(config.run.folder))).values()]
        if before is None or last is None:
            return ""
        try:
            verify(last)
        except DamagedError as error:
            return str(error)
        except OSError as error:
            if error.errno == errno.EIO:
                verify(before)
                return f"{last} cannot be read ({error.strerror}), again and again, and all of {before.name} can."
    return ""


def _replaced(config: Config, monitor: Monitor, why: str) -> bool:
    """On rank 0: whether another checkpoint has taken the place of the newest."""
    folder = checkpoints(Path(config.run.folder))
    *older, damaged = checkpoints_in(folder).values()
    aside = fetch_for_damaged(damaged, config)
    origin = "disk" if aside is None else "storage"
    if aside is None and older:
        aside = set_aside_damaged(damaged)
    if aside is None:
        return False
    *_, to = checkpoints_in(folder).values()
    reason = why.partition(" Delete ")[0].partition(" There is no older")[0]
    monitor.event(EVENT, checkpoint=damaged.name, now=aside.name, to=to.name, origin=origin, reason=reason)
    fetched = ", fetched from checkpoint.upload_to" if origin == "storage" else ""
    monitor.say(f"{reason} It is {aside} now, and the run goes on from {to.name}{fetched}.")
    return True


def by_rank_0(work: Callable[[], str], world: Axis) -> str:
    """The text that `work` returns on rank 0; every rank calls this. The others wait however long it takes, and hear of
    rank 0 every `TICK`. What is a `mistake` is raised on all.
    """
    result: Future[str] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  whatever it is, it is raised below
            result.set_exception(error)

    if world.rank == 0:
        threading.Thread(target=run, daemon=True, name=BACKGROUND).start()
    while True:
        if world.rank == 0:
            wait([result], TICK)
        if broadcast_text("done" if result.done() else "", world):
            return broadcast_text(on_all_ranks(lambda: "" if world.rank else result.result(), world), world)
