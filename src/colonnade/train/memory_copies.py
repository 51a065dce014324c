"""Copies of the newest state in memory, from which ranks that are started again go on without reading the disk.

    MemoryCopies.restored    after a restart: the newest of memory and disk; a copy that is damaged is passed over
    MemoryCopies.begin       from here on this start's copies are the run's, and no other start's
    MemoryCopies.save        every checkpoint.memory_every steps: a checkpoint like those on the disk, hashes included,
                             in a folder of each machine's memory (`memory_folder`), which ranks that end leave behind

On several machines (`memory_machines`) each has what its own ranks have written, and what those of the next have. A
copy is whole where all files are somewhere: then what a machine needs and has not is sent to it, and read like any
other checkpoint.

A copy is used only where there is a checkpoint on the disk too, so that what a run begins with is decided as without.
And only if it is of the newest start: memory_copies.json in the run's folder names that, and so does each folder of
copies. A machine that was away while the run went on, or returned to a checkpoint, has nothing to say.
"""

import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch

from colonnade.atomic import write_whole
from colonnade.checkpoint.agree import Agreement, agree
from colonnade.checkpoint.failure import alone_is_fine
from colonnade.checkpoint.folders import publish, remove, remove_leftovers, tidy
from colonnade.checkpoint.load import files_needed
from colonnade.checkpoint.manifest import Manifest, read_manifest
from colonnade.checkpoint.names import MANIFEST, checkpoints_in, folder_name, newest_step
from colonnade.checkpoint.save import Payload, Target, write
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError
from colonnade.launch import launch
from colonnade.mesh.agreement import broadcast_text, gather_texts
from colonnade.mesh.background import Group, background_group
from colonnade.mesh.files import broadcast, exchange
from colonnade.mesh.mesh import Mesh
from colonnade.train import damaged, recovery
from colonnade.train.corpus import Corpus
from colonnade.train.machine import free_memory
from colonnade.train.memory_folder import folder_of_rank
from colonnade.train.memory_machines import (
    Held,
    Machines,
    Whole,
    bytes_of_machines,
    holders,
    machines_of,
    newest_whole,
    to_neighbours,
    to_those_that_lack,
)
from colonnade.train.metadata import RunMetadata
from colonnade.train.monitor import Monitor
from colonnade.train.run_folder import COPIES, checkpoints
from colonnade.train.state import TrainState

AT_ONCE = 2  # copies that are there while one takes the place of the one before
SPARE = 1.2  # of free memory for each byte of them: what else a run needs may grow
START = "start"  # the file of a folder of copies that says of which start they are


class Machine(NamedTuple):
    """Where this rank's machine keeps copies, and who else does where."""

    folder: Path
    machines: Machines
    number: int
    """Of this rank's machine."""
    is_first: bool
    """Whether this rank is the first of its machine."""
    group: Group | None
    """For files between machines."""

    @property
    def is_shared(self) -> bool:
        """Whether all ranks see one folder."""
        return len(self.machines) == 1


class MemoryCopies:
    """The copies of one run. Every rank makes one, and calls its methods in the same order."""

    def __init__(self, config: Config, mesh: Mesh, monitor: Monitor) -> None:
        self._every, self._mesh, self._monitor = config.checkpoint.memory_every, mesh, monitor
        self._run = Path(config.run.folder)
        self._fault = launch.last_fault()
        self._resumed_at = 0
        self._agreement: Agreement | None = None
        self._machine = self._found(config) if self._every else None

    def _found(self, config: Config) -> Machine | None:
        folder, why = folder_of_rank(config.restarts)
        refused = next(filter(None, gather_texts(why, self._mesh.world)), "")
        if refused:
            self._monitor.say(f"No copies of the state are kept in memory (checkpoint.memory_every): {refused}.")
        if refused or folder is None:
            return None
        machines = machines_of(folder, self._mesh.world)
        number = next(k for k, ranks in enumerate(machines) if self._mesh.rank in ranks)
        group = None if len(machines) == 1 else background_group(config.train.timeout)
        return Machine(folder, machines, number, self._mesh.rank == machines[number][0], group)

    def _agree(self, *tries: Callable[[], object]) -> None:
        """Every rank calls this: CheckpointError on all of them with what went wrong on one."""
        problem = ""
        try:
            for attempt in tries:
                attempt()
        except (OSError, CheckpointError) as error:
            problem = str(error)
        for rank, told in enumerate(gather_texts(problem, self._mesh.world)):
            if told:
                raise CheckpointError(f"Rank {rank}: {told}")

    def _manifest(self, path: Path, source: int, machine: Machine) -> bytes:
        """That of rank `source`, on all; if it cannot be read nobody waits for it."""
        read: list[bytes] = []
        self._agree(lambda: read.append((path / MANIFEST).read_bytes()) if self._mesh.rank == source else None)
        return broadcast(read[0] if read else b"", source, machine.group)

    # --- after a start ------------------------------------------------------------------------------------------------

    def restored(
        self, state: TrainState, config: Config, corpus: Corpus, known: Manifest | None = None
    ) -> tuple[Path, RunMetadata] | None:
        """As `damaged.restored`, from a copy in memory where that is newer; every rank calls this."""
        if self._machine is not None:
            whole = self._newest(self._machine)
            if whole is not None:
                path = self._machine.folder / folder_name(whole.step)
                try:
                    seen_by, contents = self._brought(self._machine, whole, path, state)
                    return recovery.restore(state, config, corpus, path, seen_by, contents)
                except CheckpointError as error:
                    self._pass_over(path, str(error))
        return damaged.restored(state, config, corpus, self._monitor, known)

    def _newest(self, machine: Machine) -> Whole | None:
        """The newest copy that can be read, of this run, newer than the disk; the same on all ranks."""
        asked = json.dumps(self._on_disk()) if self._mesh.rank == 0 else ""
        saved, start = json.loads(broadcast_text(asked, self._mesh.world))
        mine = {} if not machine.is_first or not saved or not start else self._held(machine.folder, start)
        texts = gather_texts(json.dumps(mine), self._mesh.world)
        held = [
            {int(step): Held(*each) for step, each in json.loads(texts[ranks[0]]).items()} for ranks in machine.machines
        ]
        whole, said = newest_whole(held, saved)
        for reason in said:
            self._tell(reason)
        return whole

    def _on_disk(self) -> tuple[int, str]:
        """The step of the newest checkpoint on the disk, and the start of which copies are the run's."""
        try:
            return newest_step(checkpoints(self._run)), (self._run / COPIES).read_text()
        except FileNotFoundError:
            return 0, ""
        except (OSError, UnicodeDecodeError) as error:  # rank 0 alone reads, and the others wait for what it says
            self._tell(f"Which copies in memory are the run's cannot be read: {error}.")
            return 0, ""

    def _held(self, folder: Path, start: str) -> dict[int, Held]:
        """By step; nothing where the folder's copies are of another start, or cannot be looked at."""
        with suppress(OSError):
            if (folder / START).read_bytes() == start.encode():
                return {step: _held_in(path) for step, path in checkpoints_in(folder).items()}
        return {}

    def _brought(
        self, machine: Machine, whole: Whole, path: Path, state: TrainState
    ) -> tuple[dict[str, list[int]] | None, Manifest | None]:
        """Bring what this machine needs of a copy to it; which ranks then see each file, and its manifest. None where
        all see all.
        """
        if machine.is_shared:
            return None, None
        world, source = self._mesh.world, machine.machines[whole.manifests[0]][0]
        text = self._manifest(path, source, machine)
        lacks_it = machine.is_first and machine.number not in whole.manifests
        self._agree(lambda: write_whole(path / MANIFEST, text) if lacks_it else None)
        contents: list[Manifest] = []
        self._agree(lambda: contents.append(read_manifest(path)))
        mine = gather_texts(json.dumps(sorted(files_needed(contents[0], recovery.shards_of(state, base=True)))), world)
        needed = [{name for rank in ranks for name in json.loads(mine[rank])} for ranks in machine.machines]
        sent = to_those_that_lack(whole, needed, machine.machines)
        self._agree(lambda: _refused(exchange(sent, path, world.rank, machine.group)))
        return holders(whole, sent, machine.machines), contents[0]

    def _pass_over(self, path: Path, problem: str) -> None:
        """Say that a copy cannot be used, and remove it."""
        self._tell(problem.partition(" Delete ")[0].partition(" There is no older")[0], checkpoint=path.name)
        if self._machine is not None and self._machine.is_first:
            remove(path)
        gather_texts("", self._mesh.world)

    def _tell(self, reason: str, **details: str) -> None:
        self._monitor.event("damaged copy in memory", **details, reason=reason)
        self._monitor.say(f"{reason} The run goes on from the disk.")

    # --- while the run goes on ----------------------------------------------------------------------------------------

    def begin(self, state: TrainState) -> None:
        """What is copied from here on are the run's copies; every rank calls this, after `restored`."""
        self._resumed_at = state.step
        if self._machine is None:
            return
        agreement, machine = agree(recovery.shards_of(state)), self._machine
        if not self._take_over(machine):
            return
        own = [int(each) for each in gather_texts(str(agreement.num_bytes), self._mesh.world)]
        wanted = bytes_of_machines(own, machine.machines)[machine.number]
        problem = _too_large(wanted, machine.folder) if machine.is_first else ""
        problem = next(filter(None, gather_texts(problem, self._mesh.world)), "")
        self._agreement = None if problem else agreement
        self._monitor.say(problem)

    def _take_over(self, machine: Machine) -> bool:
        """Name this start in the run's folder, and in those of its copies. Of the earlier ones the newest stays, until
        there is another. False where it cannot be named: that is said, and the run goes on without copies.
        """
        mine = uuid4().hex if self._mesh.rank == 0 else ""
        start = broadcast_text(mine, self._mesh.world)
        before = broadcast_text(self._on_disk()[1] if self._mesh.rank == 0 else "", self._mesh.world)

        def take() -> None:
            if not before or not self._held(machine.folder, before):
                for path in checkpoints_in(machine.folder).values():
                    remove(path)
            tidy(machine.folder, 1, lambda steps: ())
            write_whole(machine.folder / START, start.encode())

        try:
            self._agree(lambda: write_whole(self._run / COPIES, start.encode()) if self._mesh.rank == 0 else None)
            self._agree(lambda: take() if machine.is_first else None)
        except CheckpointError as error:
            self._monitor.say(f"No copies of the state are kept in memory: {error}")
            return False
        return True

    def are_due(self, step: int) -> bool:
        """Whether the state is to be copied after this step."""
        return self._agreement is not None and step % self._every == 0

    def save(self, state: TrainState, payload: Payload) -> None:
        """Copy `state`, whose copies on several ranks are equal. A copy that fails is said, and is the last."""
        assert self._agreement is not None and self._machine is not None, "copies are due"
        machine, tensors = self._machine, self._agreement.tensors(recovery.shards_of(state))
        target = Target(machine.folder, 1, before_publishing=self._monitor.check, is_shared=machine.is_shared)
        partial = machine.folder / f".{folder_name(state.step)}.partial"
        try:
            with alone_is_fine():
                write(target, payload, self._agreement, tensors, first=lambda: self._make(machine, partial))
            if not machine.is_shared:
                self._bring_together(machine, partial, machine.folder / folder_name(state.step))
        except CheckpointError as error:
            self._agreement = None
            if machine.is_first:
                remove_leftovers(machine.folder)
            self._monitor.event("no copies in memory", step=state.step, reason=str(error))
            self._monitor.say(f"No more copies of the state are kept in memory: {error}")

    def _make(self, machine: Machine, partial: Path) -> None:
        """Where machines have folders of their own, rank 0 makes that of its own alone."""
        if machine.is_first and self._mesh.rank != 0:
            remove_leftovers(machine.folder)
            partial.mkdir()

    def _bring_together(self, machine: Machine, partial: Path, final: Path) -> None:
        """Each machine gets what it is to keep of a copy that is written. The one before stays until all have it."""
        rank = self._mesh.rank
        text = self._manifest(partial, 0, machine)
        sizes = {name: file["size"] for name, file in json.loads(text)["files"].items()}
        sent = to_neighbours(sizes, machine.machines)
        self._agree(
            lambda: _refused(exchange(sent, partial, rank, machine.group)),
            lambda: write_whole(partial / MANIFEST, text) if machine.is_first and rank != 0 else None,
            self._monitor.check,
        )
        self._agree(lambda: publish(partial, final, AT_ONCE, lambda steps: ()) if machine.is_first else None)
        self._agree(lambda: tidy(machine.folder, 1, lambda steps: ()) if machine.is_first else None)

    def forget(self) -> None:
        """The run returns to an earlier checkpoint: no copy is its own any more; every rank calls this."""
        if self._machine is None:
            return
        self._agree(lambda: (self._run / COPIES).unlink(missing_ok=True) if self._mesh.rank == 0 else None)
        if not self._take_over(self._machine):
            self._agreement = None

    def say_recovered(self, step: int) -> None:
        """Once, behind the first step after a fault: how long the run was out of work, and what is made twice."""
        if self._fault is None:
            return
        (noticed, before), self._fault = self._fault, None
        lost = max(0, before - self._resumed_at)
        seconds = round(time.monotonic() - noticed, 2)
        self._monitor.event("recovered", step=step, seconds=seconds, steps_lost=lost)


def _held_in(path: Path) -> Held:
    files = {each.name: each.stat().st_size for each in path.iterdir() if each.is_file()}
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return Held("", files, {})
    return Held(manifest.digest, files, {name: file.size for name, file in manifest.files.items()})


def _refused(problem: str) -> None:
    """OSError, if there is one."""
    if problem:
        raise OSError(problem)


def _too_large(num_bytes: int, folder: Path) -> str:
    """One line where copies of so many bytes do not fit into free memory; empty where they do."""
    free, needed = free_memory(torch.device("cpu")), AT_ONCE * num_bytes
    held = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    room = shutil.disk_usage(folder).free if free is None else min(free[0], shutil.disk_usage(folder).free)
    if room + held >= SPARE * needed:
        return ""
    return (
        f"No copies of the state are kept in memory: {AT_ONCE} of {num_bytes / 1e6:,.1f} MB on a machine would need "
        f"{SPARE * needed / 1e6:,.1f} MB, and {(room + held) / 1e6:,.1f} MB are free (checkpoint.memory_every)."
    )
