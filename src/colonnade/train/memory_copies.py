"""Copies of the newest state in memory, from which ranks that are started again go on without reading the disk.

    MemoryCopies.save    every checkpoint.memory_every steps: a checkpoint like those on the disk, hashes included, in a
                         folder of the machine's memory (`memory_folder`), which ranks that end leave behind
    restored             after a restart: the newest of memory and disk; a copy that is damaged is passed over

A copy is used only where there is a checkpoint on the disk too, so that what a run begins with is decided as without.
"""

import time
from pathlib import Path

import torch

from colonnade.checkpoint.agree import Agreement, agree
from colonnade.checkpoint.failure import alone_is_fine
from colonnade.checkpoint.folders import remove, tidy
from colonnade.checkpoint.manifest import newest
from colonnade.checkpoint.names import checkpoints_in, newest_step
from colonnade.checkpoint.save import Payload, Target, write
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError
from colonnade.launch import launch
from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.mesh import Mesh
from colonnade.train import damaged, recovery
from colonnade.train.corpus import Corpus
from colonnade.train.machine import free_memory
from colonnade.train.metadata import RunMetadata
from colonnade.train.monitor import Monitor
from colonnade.train.run_folder import checkpoints
from colonnade.train.state import TrainState

AT_ONCE = 2  # copies that are there while one takes the place of the one before
SPARE = 1.2  # of free memory for each byte of them: what else a run needs may grow


class MemoryCopies:
    """The copies of one run. Every rank makes one, after `restored`, and calls its methods in the same order."""

    def __init__(self, state: TrainState, config: Config, mesh: Mesh, monitor: Monitor) -> None:
        self._every, self._mesh, self._monitor = config.checkpoint.memory_every, mesh, monitor
        self._folder = launch.memory_folder()
        self._fault = launch.last_fault()
        self._resumed_at = state.step
        self._agreement: Agreement | None = None
        if self._every and self._folder is not None:
            self._prepare(state, self._folder)
        elif self._every:
            monitor.say(
                f"checkpoint.memory_every = {self._every}: copies in memory are kept by the supervisor of `colonnade "
                "train` on one machine (with restarts.limit above 0), which this run has not: there are none."
            )

    def _prepare(self, state: TrainState, folder: Path) -> None:
        agreement = agree(recovery.shards_of(state), then=lambda: tidy(folder, 1, lambda steps: ()))
        problem = _too_large(agreement.total_bytes, folder) if self._mesh.rank == 0 else ""
        if not gather_texts(problem, self._mesh.world)[0]:
            self._agreement = agreement
        self._monitor.say(problem)

    def are_due(self, step: int) -> bool:
        """Whether the state is to be copied after this step."""
        return self._agreement is not None and step % self._every == 0

    def save(self, state: TrainState, payload: Payload) -> None:
        """Copy `state`, whose copies on several ranks are equal. A copy that fails is said, and is the last."""
        assert self._agreement is not None and self._folder is not None, "copies are due"
        target = Target(self._folder, 1, before_publishing=self._monitor.check)
        tensors = self._agreement.tensors(recovery.shards_of(state))
        try:
            with alone_is_fine():
                write(target, payload, self._agreement, tensors)
        except CheckpointError as error:
            self._agreement = None
            self._monitor.event("no copies in memory", step=state.step, reason=str(error))
            self._monitor.say(f"No more copies of the state are kept in memory: {error}")

    def say_recovered(self, step: int) -> None:
        """Once, behind the first step after a fault: how long the run was out of work, and what is made twice."""
        if self._fault is None:
            return
        (noticed, before), self._fault = self._fault, None
        lost = max(0, before - self._resumed_at)
        seconds = round(time.monotonic() - noticed, 2)
        self._monitor.event("recovered", step=step, seconds=seconds, steps_lost=lost)


def _too_large(num_bytes: int, folder: Path) -> str:
    """One line where copies of so many bytes do not fit into free memory; empty where they do."""
    free, needed = free_memory(torch.device("cpu")), AT_ONCE * num_bytes
    if free is None or free[0] >= SPARE * needed:
        return ""
    return (
        f"No copies of the state are kept in memory: {AT_ONCE} of {num_bytes / 1e6:,.1f} MB would need "
        f"{SPARE * needed / 1e6:,.1f} MB, and {free[0] / 1e6:,.1f} MB are free (checkpoint.memory_every)."
    )


def restored(state: TrainState, config: Config, corpus: Corpus, monitor: Monitor) -> tuple[Path, RunMetadata] | None:
    """As `damaged.restored`, from a copy in memory where that is newer; every rank calls this."""
    world = state.ownership.mesh.world
    found = gather_texts(_newer_copy(config, monitor) if world.rank == 0 else "", world)[0]
    if found:
        try:
            return recovery.restore(state, config, corpus, Path(found))
        except CheckpointError as error:
            if world.rank == 0:
                _pass_over(Path(found), error, monitor)
            gather_texts("", world)
    return damaged.restored(state, config, corpus, monitor)


def _newer_copy(config: Config, monitor: Monitor) -> str:
    """A whole copy in memory that is newer than the newest checkpoint on the disk; empty where there is none."""
    folder, saved = launch.memory_folder(), newest_step(checkpoints(Path(config.run.folder)))
    if folder is None or not saved or newest_step(folder) <= saved:
        return ""
    try:
        return str(newest(folder) or "")
    except CheckpointError as error:
        for path in checkpoints_in(folder).values():
            _pass_over(path, error, monitor)
        return ""


def _pass_over(path: Path, error: CheckpointError, monitor: Monitor) -> None:
    """Say that a copy cannot be used, and remove it."""
    reason = str(error).partition(" Delete ")[0].partition(" There is no older")[0]
    monitor.event("damaged copy in memory", checkpoint=path.name, reason=reason)
    monitor.say(f"{reason} The run goes on from the disk.")
    remove(path)
