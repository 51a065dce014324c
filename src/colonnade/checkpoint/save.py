"""Writing a checkpoint: each rank writes its share, then one of them makes it whole.

    agree     once a run: who writes what (agree.py)
    write     each rank writes one file, in the format of `torch.distributed.checkpoint`, hashing as it goes
    finish    rank 0 writes the other files and the manifest, gives the folder its final name, deletes old ones

All of it runs within `torch.distributed.checkpoint.save`, which tells every rank of any rank's failure: either all
return, and the checkpoint is whole and on the disk, or all raise alike, and the folder is as it was.
"""

import errno
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from colonnade.checkpoint.agree import Agreement, Key, agree, key
from colonnade.checkpoint.failure import alone_is_fine, same_on_all_ranks
from colonnade.checkpoint.files import HashingFileSystem, alone
from colonnade.checkpoint.folders import Refused, Spared, publish, raised, remove_leftovers, take_away
from colonnade.checkpoint.manifest import Manifest, SavedTensor, StoredShard, check_sizes, to_json
from colonnade.checkpoint.names import MANIFEST, checkpoints_in, folder_name
from colonnade.checkpoint.plan import Box, Shard
from colonnade.errors import CheckpointError, limit_of
from colonnade.mesh.background import Group

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HASHES = "hashes of this rank's files"  # the name under which they travel to rank 0 among the results
COPY_AHEAD = 10_000_000  # bytes that are on their way from a GPU while others are written


@dataclass(frozen=True)
class Target:
    """Where a run's checkpoints go."""

    folder: Path
    keep: int
    """The newest so many stay, the one that is written included."""
    spared: Spared = lambda steps: ()
    refused: Refused = raised
    """What rank 0 does about an old checkpoint that cannot be deleted; if it fails, the save has failed."""
    before_publishing: Callable[[], object] = lambda: None
    """What rank 0 does when all of a checkpoint is written but its name; if it fails, the save has failed."""
    when_full: Callable[[OSError], CheckpointError] | None = None
    """What to say of a full disk, or of a file that may not grow as large; None: what to say of a run's."""
    is_shared: bool = True
    """Whether all ranks see the same folder. Where each machine has one of its own, what is written keeps its temporary
    name, made by the first rank of each before (`write(first=…)`): whoever brings it together gives it its name."""

    def __post_init__(self) -> None:
        assert self.keep >= 1, f"keep = {self.keep}: the checkpoint that is being written is one"


@dataclass(frozen=True)
class Payload:
    """What a checkpoint is besides its tensors. Only rank 0's counts."""

    step: int
    metadata: Mapping[str, Any]
    """JSON: whatever the run wants to find again."""
    extra_files: Mapping[str, bytes] = field(default_factory=dict)


def save(
    folder: Path,
    step: int,
    shards: Sequence[Shard],
    metadata: Mapping[str, Any],
    *,
    keep: int = 2,
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `folder/step_…` from every rank's shards, delete all but the `keep` newest, and return its path.

    Every rank of the run calls this, with its own shards and the same other arguments (only rank 0's are used). The
    shards of all ranks must cover each tensor; equal boxes of several ranks are written once. `metadata` is JSON.
    CheckpointError if the disk is full: the older checkpoints stay. Source of the storage format:
    `torch.distributed.checkpoint`, whose own `FileSystemReader` can read these folders.
    """
    agreement = agree(shards)
    with alone_is_fine():
        return write(
            Target(folder, keep), Payload(step, metadata, extra_files or {}), agreement, agreement.tensors(shards)
        )


def write(
    target: Target,
    payload: Payload,
    agreement: Agreement,
    tensors: Mapping[Key, Tensor],
    *,
    group: Group | None = None,
    first: Callable[[], object] = lambda: None,
) -> Path:
    """Write `folder/step_…` as agreed: the half of `save` that takes time, which may run in any thread.

    `tensors` are this rank's (`Agreement.tensors`), or copies of them, complete when `first` has returned. Call this
    within `failure.alone_is_fine`.
    """
    copy_ahead = 0 if all(x.is_cpu for x in tensors.values()) else COPY_AHEAD
    return _written(_Writer(target, payload, agreement, copy_ahead), _AsAgreed(agreement, tensors, first), group)


def save_made(
    target: Target,
    payload: Payload,
    kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    make: Callable[[str], Tensor],
) -> Path:
    """Write a checkpoint in one process of tensors that are made when it is their turn, and held no longer.

    `kinds`: shape and dtype of every tensor by its name, in the order in which they are made. `make` returns a tensor
    in memory of its own, which is taken away from it as soon as the next one is asked for.
    """
    shards = [
        Shard(name, shape, (0,) * len(shape), torch.empty(shape, dtype=dtype, device="meta"))
        for name, (shape, dtype) in kinds.items()
    ]
    agreement = agree(shards)
    with alone_is_fine():
        return _written(_Writer(target, payload, agreement, 0), _MadeInTurn(agreement, make), None)


def _written(writer: "_Writer", planner: SavePlanner, group: Group | None) -> Path:
    computes_crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the manifest has SHA-256; the CRC would halve the speed
    try:
        with same_on_all_ranks():
            save_distributed({}, storage_writer=writer, planner=planner, process_group=group)
    except BaseException:
        writer.clean_up()
        raise
    finally:
        torch.serialization.set_crc32_options(computes_crc32)
    return writer.final


class _AsAgreed(SavePlanner):
    """Nothing is planned any more: every rank writes what the agreement says."""

    def __init__(self, agreement: Agreement, tensors: Mapping[Key, Tensor], first: Callable[[], object]) -> None:
        self.agreement, self.tensors, self.first = agreement, tensors, first

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to do: all came with the constructor."""

    def create_local_plan(self) -> SavePlan:
        self.first()  # here its failure is everyone's
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})  # every rank is sent it in the end: the writer has the true one

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return replace(new_plan, items=list(self.agreement.items))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return alone(self.tensors[key(write_item)])


class _MadeInTurn(_AsAgreed):
    """Makes each tensor when it is to be written. Its writer keeps all that it has written until the file is whole, so
    the memory of what has been written is given back under it.
    """

    def __init__(self, agreement: Agreement, make: Callable[[str], Tensor]) -> None:
        super().__init__(agreement, {}, lambda: None)
        self.make = make
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
        self._last = self.make(write_item.index.fqn)
        return self._last


class _Writer(FileSystemWriter):
    """The writer of `torch.distributed.checkpoint`, with a temporary name, hashes, a manifest and clear words."""

    def __init__(self, target: Target, payload: Payload, agreement: Agreement, copy_ahead: int) -> None:
        self.target, self.payload, self.agreement, self.folder = target, payload, agreement, target.folder
        name = folder_name(payload.step)
        self.partial, self.final = target.folder / f".{name}.partial", target.folder / name
        super().__init__(self.partial, sync_files=True, thread_count=1, per_thread_copy_ahead=copy_ahead)
        self.fs: HashingFileSystem = HashingFileSystem()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder is made when all have planned: what was there before is removed first

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        needed = self.agreement.total_bytes
        with self._explaining_a_full_disk(needed):
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder, self.target.refused)
            if os.path.lexists(self.partial):
                take_away(self.partial)
            if self.target.is_shared and shutil.disk_usage(self.folder).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.partial.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            with self._explaining_a_full_disk(self.agreement.num_bytes):
                results = super().write_data(plan, planner).value()
        results.append(WriteResult(MetadataIndex(HASHES), 0, storage_data=self.fs.files))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for rank in results for result in rank if result.index.fqn != HASHES]
        for result in (result for rank in results for result in rank if result.index.fqn == HASHES):
            self.fs.files |= result.storage_data
        payload, metadata = self.payload, replace(self.agreement.metadata)
        with self._explaining_a_full_disk(sum(map(len, payload.extra_files.values()))):
            super().finish(metadata, [written])
            for name, data in payload.extra_files.items():
                self._write_file(name, data)
            manifest = Manifest(payload.step, dict(payload.metadata), _tensors(metadata, written), dict(self.fs.files))
            self._write_file(MANIFEST, to_json(manifest).encode())
        if not self.target.is_shared:
            return
        self._check_that_all_files_are_here(manifest)
        self.target.before_publishing()
        publish(self.partial, self.final, self.target.keep, self.target.spared, self.target.refused)

    def _write_file(self, name: str, data: bytes) -> None:
        with self.fs.create_stream(self.partial / name, "wb") as stream:
            stream.write(data)
            os.fsync(stream.fileno())

    def _check_that_all_files_are_here(self, manifest: Manifest) -> None:
        try:
            check_sizes(self.partial, manifest)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} The ranks have written to different disks, or the disk has lost it. Set run.folder to a "
                f"folder on a file system that all machines share."
            ) from None

    def clean_up(self) -> None:
        """After a failure, on every rank: none of them writes any more, and rank 0 removes what there is."""
        if self.agreement.is_coordinator:
            shutil.rmtree(self.partial, ignore_errors=True)  # what cannot be removed now is removed by the next save

    @contextmanager
    def _explaining_a_full_disk(self, needed: int) -> Generator[None, None, None]:
        try:
            yield
        except (OSError, RuntimeError) as raised:  # torch ends its archive after a failed write, and that fails too
            error = _of_the_disk(raised)
            if error is None:
                raise
            if error.errno not in NO_SPACE:
                raise error from None
            if self.target.when_full is not None:
                raise self.target.when_full(error) from None
            whole = list(checkpoints_in(self.folder).values())
            stays = f"{whole[-1].name}, the last whole checkpoint, stays" if whole else "No checkpoint was there before"
            if error.errno == errno.EFBIG:
                raise CheckpointError(
                    f"{self.folder} takes no file as large as saving step {self.payload.step} needs ({error.strerror}"
                    f"{limit_of(error)}). {stays}. Raise the limit on the size of files, or save on another file "
                    "system, and start again."
                ) from None
            there = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
            free = shutil.disk_usage(there).free
            raise CheckpointError(
                f"The disk is full: {self.folder} has {free / 1e6:,.1f} MB free, and saving step {self.payload.step} "
                f"needed {needed / 1e6:,.1f} MB more ({error.strerror}). {stays}. Free some space, or set "
                f"checkpoint.keep = 1 (now {self.target.keep}), and start the run again: it goes on from there."
            ) from None


def _of_the_disk(error: BaseException | None) -> OSError | None:
    """The error of the disk that this one is, or that it was raised in handling of."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _tensors(metadata: Metadata, written: Sequence[WriteResult]) -> dict[str, SavedTensor]:
    where = {result.index: result.storage_data for result in written}

    def stored(name: str, chunk: ChunkStorageMetadata) -> StoredShard:
        info = where[MetadataIndex(name, chunk.offsets)]
        return StoredShard(Box(tuple(chunk.offsets), tuple(chunk.sizes)), info.relative_path, info.offset, info.length)

    return {
        name: SavedTensor(tuple(t.size), t.properties.dtype, tuple(stored(name, chunk) for chunk in t.chunks))
        for name, t in metadata.state_dict_metadata.items()
        if isinstance(t, TensorStorageMetadata)
    }
