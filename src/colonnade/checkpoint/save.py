"""Writing a checkpoint: each rank writes its share, then one of them makes it whole.

    plan      all ranks tell rank 0 their boxes; each box that several hold is given to one, evenly by bytes
    write     each rank writes one file, in the format of `torch.distributed.checkpoint`, hashing as it goes
    finish    rank 0 writes the other files and the manifest, gives the folder its final name, deletes old ones

All of it runs within `torch.distributed.checkpoint.save`, which tells every rank of any rank's failure: either all
return, and the checkpoint is whole and on the disk, or all raise alike, and the folder is as it was.
"""

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from colonnade.checkpoint.failure import same_on_all_ranks
from colonnade.checkpoint.files import HashingFileSystem
from colonnade.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Piece,
    SavedTensor,
    check_sizes,
    checkpoints_in,
    folder_name,
    to_json,
)
from colonnade.checkpoint.plan import Box, Shard, share_out, tile
from colonnade.errors import CheckpointError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HASHES = "hashes of this rank's files"  # the name under which they travel to rank 0 among the results


def save(
    folder: Path,
    step: int,
    shards: Sequence[Shard],
    facts: Mapping[str, Any],
    *,
    keep: int = 2,
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `folder/step_…` from every rank's shards, delete all but the `keep` newest, and return its path.

    Every rank of the run calls this, with its own shards and the same other arguments (only rank 0's are used). The
    shards of all ranks must cover each tensor; equal boxes of several ranks are written once. `facts` is JSON.
    CheckpointError if the disk is full: the older checkpoints stay. Source of the storage format:
    `torch.distributed.checkpoint`, whose own `FileSystemReader` can read these folders.
    """
    assert keep >= 1, f"keep = {keep}: the checkpoint that is being written is one"
    writer = _Writer(folder, step, facts, keep, extra_files or {})
    computes_crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the manifest has SHA-256; the CRC would halve the speed
    try:
        with same_on_all_ranks():
            save_distributed({}, storage_writer=writer, planner=_Planner(shards))
    except BaseException:
        writer.clean_up()
        raise
    finally:
        torch.serialization.set_crc32_options(computes_crc32)
    return writer.final


class _Planner(SavePlanner):
    """Boxes to write items, and each item to one rank."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = {(shard.name, shard.box): shard for shard in shards}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to do: the shards came with the constructor."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(shard) for shard in self.shards.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        items: dict[tuple[str, Box], WriteItem] = {}
        holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                key = (item.index.fqn, _box(item))
                items.setdefault(key, item)
                holders[key].append(rank)
        owner = share_out({key: _num_bytes(item) for key, item in items.items()}, holders, len(all_plans))
        mine: list[list[WriteItem]] = [[] for _ in all_plans]
        for key, item in items.items():
            mine[owner[key]].append(item)
        return [replace(plan, items=mine[rank]) for rank, plan in enumerate(all_plans)], _metadata(items.values())

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.shards[write_item.index.fqn, _box(write_item)].data.detach().contiguous()


def _write_item(shard: Shard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.data.shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=shard.data.dtype), torch.Size(shard.shape))
    return WriteItem(MetadataIndex(shard.name, shard.offsets), WriteItemType.SHARD, tensor_data=data)


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "all that is written is tensors"
    return item.tensor_data


def _box(item: WriteItem) -> Box:
    chunk = _data(item).chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _num_bytes(item: WriteItem) -> int:
    return _box(item).volume * _data(item).properties.dtype.itemsize


def _metadata(items: Iterable[WriteItem]) -> Metadata:
    of_name: dict[str, list[WriteItem]] = defaultdict(list)
    for item in items:
        of_name[item.index.fqn].append(item)
    tensors: dict[str, Any] = {}
    for name, pieces in of_name.items():
        kinds = {(_data(item).size, _data(item).properties.dtype) for item in pieces}
        assert len(kinds) == 1, f"{name}: shape and dtype must be the same on all ranks, got {kinds}"
        size, dtype = kinds.pop()
        boxes = [_box(item) for item in pieces]
        assert tile(size, boxes), f"{name} {list(size)}: boxes must cover it, each element once: {sorted(boxes)}"
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [_data(i).chunk for i in pieces])
    return Metadata(tensors)


class _Writer(FileSystemWriter):
    """The writer of `torch.distributed.checkpoint`, with a temporary name, hashes, a manifest and clear words."""

    def __init__(
        self, folder: Path, step: int, facts: Mapping[str, Any], keep: int, extra_files: Mapping[str, bytes]
    ) -> None:
        super().__init__(folder / f".{folder_name(step)}.partial", sync_files=True, thread_count=1)
        self.folder, self.step, self.facts, self.keep, self.extra_files = folder, step, facts, keep, extra_files
        self.partial, self.final = folder / f".{folder_name(step)}.partial", folder / folder_name(step)
        self.fs: HashingFileSystem = HashingFileSystem()
        self.is_coordinator = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder is made when all have planned: what was there before is removed first

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        needed = sum(_num_bytes(item) for plan in plans for item in plan.items)
        with self._no_space_said_clearly(needed):
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.folder)
            if shutil.disk_usage(self.folder).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.partial.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            with self._no_space_said_clearly(sum(map(_num_bytes, plan.items))):
                results = super().write_data(plan, planner).value()
        results.append(WriteResult(MetadataIndex(HASHES), 0, storage_data=self.fs.files))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for rank in results for result in rank if result.index.fqn != HASHES]
        for result in (result for rank in results for result in rank if result.index.fqn == HASHES):
            self.fs.files |= result.storage_data
        with self._no_space_said_clearly(sum(map(len, self.extra_files.values()))):
            super().finish(metadata, [written])
            for name, content in self.extra_files.items():
                self._write_file(name, content)
            manifest = Manifest(self.step, dict(self.facts), _tensors(metadata, written), dict(self.fs.files))
            self._write_file(MANIFEST, to_json(manifest).encode())
        self._check_that_all_files_are_here(manifest)
        self._commit()

    def _write_file(self, name: str, content: bytes) -> None:
        with self.fs.create_stream(self.partial / name, "wb") as stream:
            stream.write(content)
            os.fsync(stream.fileno())

    def _check_that_all_files_are_here(self, manifest: Manifest) -> None:
        try:
            check_sizes(self.partial, manifest)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} The ranks have written to different disks, or the disk has lost it. Set run.folder to a "
                f"folder on a file system that all machines share."
            ) from None

    def _commit(self) -> None:
        """From here on the checkpoint is there, whatever happens next; the old ones go only after it."""
        _sync(self.partial)
        if self.final.exists():
            _set_aside(self.final)
        self.partial.rename(self.final)
        _sync(self.folder)
        others = [path for path in checkpoints_in(self.folder).values() if path != self.final]
        for path in others[: max(0, len(others) - self.keep + 1)]:
            _set_aside(path)
        _remove_leftovers(self.folder)

    def clean_up(self) -> None:
        """After a failure, on every rank: none of them writes any more, and rank 0 removes what there is."""
        if self.is_coordinator:
            shutil.rmtree(self.partial, ignore_errors=True)  # what cannot be removed now is removed by the next save

    @contextmanager
    def _no_space_said_clearly(self, needed: int) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            whole = list(checkpoints_in(self.folder).values())
            stays = f"{whole[-1].name}, the last whole checkpoint, stays" if whole else "No checkpoint was there before"
            free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
            raise CheckpointError(
                f"The disk is full: {self.folder} has {free / 1e6:,.1f} MB free, and saving step {self.step} needed "
                f"{needed / 1e6:,.1f} MB more ({error.strerror}). {stays}. Free some space, or set checkpoint.keep = 1 "
                f"(now {self.keep}), and start the run again: it goes on from there."
            ) from None


def _tensors(metadata: Metadata, written: Sequence[WriteResult]) -> dict[str, SavedTensor]:
    where = {result.index: result.storage_data for result in written}

    def piece(name: str, chunk: ChunkStorageMetadata) -> Piece:
        info = where[MetadataIndex(name, chunk.offsets)]
        return Piece(Box(tuple(chunk.offsets), tuple(chunk.sizes)), info.relative_path, info.offset, info.length)

    return {
        name: SavedTensor(tuple(t.size), t.properties.dtype, tuple(piece(name, chunk) for chunk in t.chunks))
        for name, t in metadata.state_dict_metadata.items()
        if isinstance(t, TensorStorageMetadata)
    }


def _set_aside(path: Path) -> None:
    """Take away a checkpoint's name at once: removing it takes time, and half of it must never look whole."""
    aside = path.with_name(f".{path.name}.deleted")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _remove_leftovers(folder: Path) -> None:
    for pattern in (".step_*.partial", ".step_*.deleted"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def _sync(folder: Path) -> None:
    """Make names in a folder last, as fsync does for the bytes of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
