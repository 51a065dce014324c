"""A newest checkpoint that is damaged is set aside, and the run goes on from the newest sound one, of those on the disk
and those in checkpoint.upload_to; said, and an event.

    look        before anything reads it: what its manifest and the sizes of its files show
    restored    while it is read, at a start or by a run that returns to it: what the hashes of its bytes show, and
                what the disk refuses (an input/output error), now and once more, while it gives all of the checkpoint
                before it: a disk or a network that is away is no damage

Rank 0 alone looks, fetches and renames. Where there is no other checkpoint nothing is touched, and the run is refused.
"""

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

from colonnade.checkpoint.folders import set_aside_damaged
from colonnade.checkpoint.manifest import newest, verify
from colonnade.checkpoint.names import checkpoints_in
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError, ColonnadeError, DamagedError, UnreadableError
from colonnade.launch.process import BACKGROUND
from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.mesh import Axis
from colonnade.train import recovery
from colonnade.train.corpus import Corpus
from colonnade.train.fetched import fetch_for_damaged
from colonnade.train.metadata import RunMetadata
from colonnade.train.monitor import Monitor
from colonnade.train.run_folder import checkpoints
from colonnade.train.state import TrainState

EVENT = "damaged checkpoint"
TICK = 5.0  # seconds
SOUND = "sound"
"""Said of a checkpoint with which nothing is wrong that stays so."""


def look(config: Config, world: Axis, monitor: Monitor) -> None:
    """Set aside newest checkpoints that cannot be whole; every rank calls this. What stays is for others to refuse."""
    while True:
        found = _damage(config) if world.rank == 0 else ""
        if not gather_texts(found, world)[0] or not _set_aside(config, world, monitor, found):
            return


def restored(state: TrainState, config: Config, corpus: Corpus, monitor: Monitor) -> tuple[Path, RunMetadata] | None:
    """As `recovery.restore`, from another checkpoint where the newest is damaged."""
    world = state.ownership.mesh.world
    while True:
        try:
            return recovery.restore(state, config, corpus)
        except (DamagedError, UnreadableError) as error:
            why = str(error) if isinstance(error, DamagedError) else by_rank_0(lambda: _refused(config), world)
            if why == SOUND or not _set_aside(config, world, monitor, why):
                raise


def _refused(config: Config) -> str:
    """On rank 0: that the disk refuses the newest checkpoint once more, and gives all of the one before; or `SOUND`."""
    *_, before, last = [None, None, *checkpoints_in(checkpoints(Path(config.run.folder))).values()]
    if before is None or last is None or not _falls_back(config):
        return SOUND
    with suppress(ColonnadeError, OSError):
        verify(before)
        try:
            verify(last)
        except OSError as error:
            if error.errno == errno.EIO:
                return f"{last} cannot be read ({error.strerror}), again, and all of {before.name} can."
    return SOUND


def _damage(config: Config) -> str:
    """What is wrong with the newest checkpoint, as far as it is seen without reading it."""
    try:
        newest(checkpoints(Path(config.run.folder)))
    except DamagedError as error:
        return str(error)
    except (CheckpointError, OSError):
        return ""  # foreign, newer, or not to be looked at: whoever reads it says so on all ranks
    return ""


def _set_aside(config: Config, world: Axis, monitor: Monitor, why: str) -> bool:
    """Whether another checkpoint has taken the place of the newest; the same on all ranks."""
    return _falls_back(config) and by_rank_0(lambda: str(_replaced(config, monitor, why)), world) == str(True)


def _falls_back(config: Config) -> bool:
    return config.restarts.limit > 0 and config.restarts.damaged == "fall_back"


def _replaced(config: Config, monitor: Monitor, why: str) -> bool:
    """As `_set_aside`, on rank 0."""
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
    """The text that `work` returns on rank 0, which is not empty; every rank calls this. The others wait however long
    it takes, and hear of rank 0 every `TICK`.
    """
    result: Future[str] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  whatever it is, rank 0 raises it
            result.set_exception(error)

    if world.rank == 0:
        threading.Thread(target=run, daemon=True, name=BACKGROUND).start()
    while True:
        if world.rank == 0:
            wait([result], TICK)
        if told := gather_texts(result.result() if result.done() else "", world)[0]:
            return told
