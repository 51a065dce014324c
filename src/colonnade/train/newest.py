"""Which checkpoint of a run is its newest, and whether it has one at all, or of a step. By names, unless more is said:
who reads a checkpoint says whether it is whole.
"""

import os
from pathlib import Path
from typing import TypeVar

import torch

from colonnade.checkpoint.manifest import Manifest, looked_at
from colonnade.checkpoint.names import MANIFEST, checkpoints_in, newest_in
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.agreement import broadcast_text
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Axis
from colonnade.train.lines import object_in
from colonnade.train.run_folder import checkpoints

SAVED = "saved"
"""The event of a whole checkpoint."""
INITIALIZED = "initialized"
"""The event of a run that begins from weights; its `source` is where they lie."""


Found = TypeVar("Found", Path, Path | None)


def checkpoint_at(path: Path) -> Path | None:
    """The checkpoint that a path is, or the newest of a run's folder, or of a folder of checkpoints."""
    if os.path.lexists(path / MANIFEST):
        return path
    folders = [folder for folder in (checkpoints(path), path) if folder.is_dir()]
    return next((found for folder in folders if (found := newest_in(folder)) is not None), None)


def as_rank_0(found: Found, ranks: Axis) -> Found:
    """The checkpoint that rank 0 has found, where this rank looked for it in the same folder: between the looks of two
    ranks a run that goes on may save another. Where it is not seen here it stays what was found, and whoever reads it
    says that the ranks disagree. Every rank calls this.
    """
    name = broadcast_text("" if found is None else found.name, ranks)
    if found is None or not name:
        return found
    theirs = found.with_name(name)
    return theirs if os.path.lexists(theirs / MANIFEST) else found


def begins(config: Config, world: Axis, known: Manifest | None = None) -> bool:
    """Whether the run has no checkpoint to go on from, as far as any rank sees: then it needs initial weights. The same
    on all ranks; every rank calls this. CheckpointError on all where rank 0, unless that has read it (`known`), sees
    that it cannot be gone on from.
    """

    def has_none() -> bool:
        newest = newest_in(checkpoints(Path(config.run.folder)))
        if newest is not None and world.rank == 0 and known is None:
            looked_at(newest)
        return newest is None

    return bool(all_reduce(torch.tensor(int(on_all_ranks(has_none, world))), world, "max"))


def is_saved(config: Config, step: int, world: Axis) -> bool:
    """Whether the run has a checkpoint of `step`, as rank 0 sees it; every rank calls this."""
    there = world.rank == 0 and step in checkpoints_in(checkpoints(Path(config.run.folder)))
    return bool(all_reduce(torch.tensor(int(there)), world, "max"))


def find(run: Path) -> Path | None:
    """The newest checkpoint of a run's folder; None only if the run has never saved one."""
    path = newest_in(checkpoints(run))
    last_saved = None if path is not None else _last_saved(run / "events.jsonl")
    if last_saved is not None:
        raise CheckpointError(
            f"{checkpoints(run)} has no checkpoint, but this run has saved {last_saved} there: it was removed, or its "
            f"disk is not mounted. Put it back, or delete {run} to start again from step 0."
        )
    return path


def _last_saved(events: Path) -> str | None:
    """The name of the last checkpoint that a run's events tell of."""
    last_saved: str | None = None
    for line in events.read_bytes().splitlines() if events.exists() else ():
        event = object_in(line) or {}
        if event.get("event") == SAVED and "checkpoint" in event:
            last_saved = str(event["checkpoint"])
    return last_saved
