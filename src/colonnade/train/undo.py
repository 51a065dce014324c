"""A run that has diverged returns to a healthy checkpoint by itself, or ends with the reason why it does not."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from colonnade.checkpoint.folders import discard_after
from colonnade.checkpoint.manifest import verify
from colonnade.checkpoint.names import checkpoints_in, folder_name
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError, DiskError
from colonnade.mesh.agreement import broadcast_text, gather_texts
from colonnade.mesh.mesh import Mesh
from colonnade.train import recovery, rollbacks
from colonnade.train.change import Change, as_it_began
from colonnade.train.change_requests import read_decided
from colonnade.train.corpus import Corpus
from colonnade.train.damaged import by_rank_0, restored
from colonnade.train.divergence import NO_ROLLBACK, ROLLED_BACK, Divergence, decide, stopped
from colonnade.train.memory_copies import MemoryCopies
from colonnade.train.metadata import metadata_of
from colonnade.train.monitor import Monitor
from colonnade.train.not_removed import by_monitor
from colonnade.train.rollback import Rollback, read, write
from colonnade.train.run_folder import checkpoints
from colonnade.train.state import TrainState


def roll_back(
    found: Divergence,
    state: TrainState,
    saving: recovery.Checkpoints,
    *,
    config: Config,
    mesh: Mesh,
    corpus: Corpus,
    monitor: Monitor,
    copies: MemoryCopies,
) -> None:
    """Put `state` back to where it was healthy, or raise ColonnadeError; every rank calls this with the same `found`.

    What comes first is what a restart needs to finish the rest.
    """
    run, then = Path(config.run.folder), config.divergence.then
    monitor.event("diverged", step=found.step, first_sign=found.first, reason=found.reason, then=then)
    try:
        saving.wait_out(state)
        rollback = _decided(found, run, config, mesh, corpus, state.changes)
    except ColonnadeError as error:
        if then == "roll_back" and not isinstance(error, DiskError):
            monitor.event(NO_ROLLBACK, step=found.step, reason=str(error))
        raise
    copies.forget()
    if mesh.rank == 0:
        write(run, [*read(run), rollback])
        discard_after(checkpoints(run), rollback.to, by_monitor(monitor))
    gather_texts("", mesh.world)  # the others look for the newest checkpoint only now
    return_to_newest(state, config, corpus, monitor)
    monitor.event(ROLLED_BACK, **rollback.model_dump())
    monitor.say(
        f"Step {found.step} {found.reason}: the run has diverged. It returns to {folder_name(rollback.to)}, to "
        f"{rollback}."
    )


def return_to_newest(state: TrainState, config: Config, corpus: Corpus, monitor: Monitor) -> None:
    """Put `state` to where the newest sound checkpoint is, which must be there; every rank calls this."""
    state.ownership.settle()
    restored(state, config, corpus, monitor)
    monitor.go_back(state.step)


def _decided(
    found: Divergence, run: Path, config: Config, mesh: Mesh, corpus: Corpus, changes: Sequence[Change]
) -> Rollback:
    """The same on all ranks: of the checkpoints that rank 0 sees, and with the name that it gives. ColonnadeError where
    the run does not return. `changes`: made so far.
    """
    past = rollbacks.read_together(run, mesh.world)
    seen = json.dumps([uuid4().hex, *checkpoints_in(checkpoints(run))]) if mesh.rank == 0 else ""
    name, *saved = json.loads(broadcast_text(seen, mesh.world))
    decided = decide(found, saved, past, config.divergence, folder=config.run.folder, changes=changes)
    decided = decided.model_copy(update={"id": name})
    weighed = by_rank_0(lambda: json.dumps(_weighed(decided, past, config, corpus)), mesh.world)
    reason, measured = json.loads(weighed)
    if reason:
        raise stopped(found, f"It does not return to {folder_name(decided.to)}: {reason}")
    return decided.model_copy(update=measured)


def _weighed(
    rollback: Rollback, past: Sequence[Rollback], config: Config, corpus: Corpus
) -> tuple[str, dict[str, Any]]:
    """Why the run cannot go on behind a rollback: its checkpoint is damaged, of which every byte is read, or the data
    would end before the run; "" where nothing is against it. And what is measured of the batches that it passes over.
    DiskError where that cannot be told for a while. `config`, `corpus`: in force on the course that is left.
    """
    run = Path(config.run.folder)
    try:
        checkpoint = checkpoints_in(checkpoints(run))[rollback.to]
        metadata = metadata_of(checkpoint, verify(checkpoint))
        rollback = rollbacks.measured(rollback, corpus.curriculum, metadata, past, past)
        began = as_it_began(config, read_decided(run).changes)
        rollbacks.check_left(began, corpus, metadata, [*past, rollback])
    except DiskError:
        raise
    except ColonnadeError as error:
        return str(error), {}
    return "", rollback.model_dump(include={"passed", "batches"})
