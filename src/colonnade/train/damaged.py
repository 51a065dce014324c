"""A newest checkpoint that is damaged is set aside, and the run goes on from the one before it; said, and an event.

    look        before anything reads it: what its manifest and the sizes of its files show
    restored    while it is read: what the hashes of its bytes show

Rank 0 alone looks and renames. Where there is no older checkpoint nothing is touched, and the run is refused.
"""

from pathlib import Path

from colonnade.checkpoint.folders import set_aside_damaged
from colonnade.checkpoint.manifest import newest
from colonnade.checkpoint.names import checkpoints_in
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError, DamagedError
from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.mesh import Axis
from colonnade.train import recovery
from colonnade.train.corpus import Corpus
from colonnade.train.metadata import RunMetadata
from colonnade.train.monitor import Monitor
from colonnade.train.run_folder import checkpoints
from colonnade.train.state import TrainState

EVENT = "damaged checkpoint"


def look(config: Config, world: Axis, monitor: Monitor) -> None:
    """Set aside newest checkpoints that cannot be whole; every rank calls this. What stays is for others to refuse."""
    while True:
        found = _damage(config) if world.rank == 0 else ""
        if not gather_texts(found, world)[0] or not _set_aside(config, world, monitor, found):
            return


def restored(state: TrainState, config: Config, corpus: Corpus, monitor: Monitor) -> tuple[Path, RunMetadata] | None:
    """As `recovery.restore`, from an older checkpoint where the newest is damaged."""
    world = state.ownership.mesh.world
    while True:
        try:
            return recovery.restore(state, config, corpus)
        except DamagedError as error:
            if not _set_aside(config, world, monitor, str(error)):
                raise


def _damage(config: Config) -> str:
    """What is wrong with the newest checkpoint, as far as it is seen without reading it."""
    try:
        newest(checkpoints(Path(config.run.folder)))
    except DamagedError as error:
        return str(error)
    except CheckpointError:
        return ""  # foreign, or newer: whoever reads it refuses it
    return ""


def _set_aside(config: Config, world: Axis, monitor: Monitor, why: str) -> bool:
    """Whether the newest checkpoint was set aside for an older one; the same on all ranks."""
    policy = config.restarts
    done = ""
    if world.rank == 0 and policy.limit and policy.damaged == "fall_back":
        found = list(checkpoints_in(checkpoints(Path(config.run.folder))).values())
        if len(found) > 1:
            aside = set_aside_damaged(found[-1])
            reason = why.partition(" Delete ")[0]
            monitor.event(EVENT, checkpoint=found[-1].name, now=aside.name, to=found[-2].name, reason=reason)
            monitor.say(f"{reason} It is {aside} now, and the run goes on from {found[-2].name}.")
            done = aside.name
    return bool(gather_texts(done, world)[0])
