"""Reading a checkpoint into any layout: each rank reads the parts of the stored shards that its boxes need.

Every file is checked against the manifest, by one of the ranks: its size before tensors are read, its bytes beside it.
All of it runs within `torch.distributed.checkpoint.load`, so that all ranks return or all raise alike.
"""

import io
import json
import os
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from colonnade.checkpoint.confined import open_plain
from colonnade.checkpoint.failure import alone_is_fine, same_on_all_ranks
from colonnade.checkpoint.files import read_box
from colonnade.checkpoint.manifest import (
    Manifest,
    SavedTensor,
    StoredShard,
    check_hash,
    check_sizes,
    check_unchanged,
    compare_metadata,
    damaged,
    gone,
    read_manifest,
)
from colonnade.checkpoint.plan import Box, Shard, names_in_words, narrow, overlap, relative, share_out
from colonnade.config.compare import as_now
from colonnade.errors import CheckpointError

MOST_LINES = 40  # of a message


def load(
    path: Path,
    shards: Sequence[Shard],
    *,
    model: Mapping[str, Any] | None = None,
    unread: tuple[str, ...] = (),
    check_hashes: bool = True,
    known: Manifest | None = None,
) -> Manifest:
    """Fill every shard's `data` in place from the checkpoint in folder `path`, and return its manifest.

    Every rank of the run calls this with its own shards; layout and dtype may differ from those that wrote. `model`, if
    given, must agree with the checkpoint's metadata["model"]. `unread` has prefixes of tensor names that no rank need
    want. `known`: the manifest, where the caller has read it. CheckpointError, on all ranks alike, if the checkpoint is
    damaged, foreign, newer, of another model, or replaced while it is read; the contents of `data` are undefined then.
    """
    reader = _Reader(lambda: path, check_hashes, known=known, may_be_another=False)
    _load(reader, _Planner(reader, shards, lambda path, contents: check_model(path, contents, model), unread))
    return reader.contents


def load_found(
    find: Callable[[], Path | None],
    shards: Sequence[Shard],
    *,
    model: Mapping[str, Any],
    check: Callable[[Path, Manifest], None],
    unread: tuple[str, ...] = (),
    lacks: Callable[[Manifest], Collection[str]] = lambda contents: (),
    holders: Mapping[str, Sequence[int]] | None = None,
    known: Manifest | None = None,
) -> tuple[Path, Manifest] | None:
    """Load the checkpoint that `find` finds, on every rank; None on all ranks where there is none to go on from.

    As `load`. `find` and `check` may raise CheckpointError, and all ranks do then, before anything is read; so they do
    where they see different checkpoints, or only some see one: a run never goes on from two places. `lacks`: names of
    tensors that the checkpoint may lack; what `data` has of these stays. `holders`: where ranks do not all see the same
    folder, those that see a file, by its name; `files_needed` says which a rank must see. `known`: a manifest that this
    rank has read before, perhaps this one's.
    """

    def check_all(path: Path, contents: Manifest) -> None:
        check_model(path, contents, model)
        check(path, contents)

    reader = _Reader(find, check_hashes=True, holders=holders, known=known)
    _load(reader, _Planner(reader, shards, check_all, unread, lacks))
    return None if reader.path is None else (reader.path, reader.contents)


def files_needed(contents: Manifest, shards: Sequence[Shard]) -> set[str]:
    """The files in which there are parts of these shards."""
    known = [(shard, contents.tensors[shard.name]) for shard in shards if shard.name in contents.tensors]
    return {each.file for shard, saved in known for each in saved.shards if overlap(shard.box, each.box) is not None}


def _load(reader: "_Reader", planner: "_Planner") -> None:
    with alone_is_fine(), same_on_all_ranks():
        load_distributed({}, storage_reader=reader, planner=planner)


class _Sees(NamedTuple):
    """What a rank tells rank 0."""

    path: str
    digest: str
    """Of the manifest; empty where the rank has found no checkpoint."""
    wanted: set[str]
    """Names of tensors."""


class _Planner(LoadPlanner):
    """The boxes that this rank wants, cut along the shards that were stored."""

    def __init__(
        self,
        reader: "_Reader",
        shards: Sequence[Shard],
        check: Callable[[Path, Manifest], None],
        unread: tuple[str, ...],
        lacks: Callable[[Manifest], Collection[str]] = lambda contents: (),
    ) -> None:
        self.reader, self.shards, self.check, self.unread, self.lacks = reader, shards, check, unread, lacks
        self.items: list[ReadItem] = []

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to do: the shards came with the constructor."""

    def create_local_plan(self) -> LoadPlan:
        contents, path = self.reader.contents, self.reader.path
        if path is None:
            return LoadPlan([], planner_data=_Sees("none", "", set()))
        self.check(path, contents)
        left_out = set(self.lacks(contents)) - contents.tensors.keys()
        self.shards = [shard for shard in self.shards if shard.name not in left_out]
        check_tensors(path, contents, self.shards)
        for number, shard in enumerate(self.shards):
            self.items += _read_items(number, shard, contents.tensors[shard.name])
        wanted = {shard.name for shard in self.shards}
        return LoadPlan([], planner_data=_Sees(str(path), contents.digest, wanted))  # the items are its own business

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        _check_that_all_see_the_same([plan.planner_data for plan in global_plan])
        wanted: set[str] = set().union(*(plan.planner_data.wanted for plan in global_plan))
        left = {name for name in self.reader.contents.tensors.keys() - wanted if not name.startswith(self.unread)}
        if left:
            raise CheckpointError(
                f"{self.reader.path} holds {len(left)} tensors that this model does not have: {names_in_words(left)}. "
                f"It was written for another model: use the [model] section of the config.toml beside it."
            )
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return replace(central_plan, items=self.items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None, "set by `_read_items`"
        data = self.shards[read_item.dest_index.index].data.detach()
        return narrow(data, Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)))

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: `resolve_tensor` gave a view."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.storage_index.fqn}: all that is planned is tensors")


def _check_that_all_see_the_same(seen: Sequence["_Sees"]) -> None:
    ranks: dict[tuple[str, str], list[str]] = defaultdict(list)
    for rank, it in enumerate(seen):
        ranks[it.path, it.digest].append(str(rank))
    if len({digest for _, digest in ranks}) > 1:
        lines = [f"ranks {', '.join(them)}: {path} {digest[:12]}".rstrip() for (path, digest), them in ranks.items()]
        raise CheckpointError(
            "The ranks see different checkpoints:\n  "
            + "\n  ".join(lines)
            + "\nGoing on would mix them. Set run.folder "
            "to a folder on a file system that all machines share."
        )


def check_model(path: Path, contents: Manifest, model: Mapping[str, Any] | None) -> None:
    """CheckpointError with every difference between `model` and the checkpoint's metadata["model"]."""
    if model is None:
        return
    saved = contents.metadata.get("model", {})
    known = {key: value for key, value in as_now(saved).items() if key in saved or key in model}
    differences = compare_metadata(known, json.loads(json.dumps(model)))
    if differences:
        raise CheckpointError(
            f"{path} is of another model:\n  "
            + "\n  ".join(differences[:MOST_LINES])
            + "\nSet these keys of [model] as they are in "
            "the checkpoint, or choose another run.folder to start a new run."
        )


def check_tensors(path: Path, contents: Manifest, shards: Sequence[Shard]) -> None:
    """CheckpointError if the checkpoint lacks a tensor of which there is a shard, or has it in another shape."""
    missing = {shard.name for shard in shards if shard.name not in contents.tensors}
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors that this model has: {names_in_words(missing)}. It was written for "
            f"another model: use the [model] section of the config.toml beside it."
        )
    shapes = {shard.name: (list(contents.tensors[shard.name].shape), list(shard.shape)) for shard in shards}
    wrong = [f"{name}: {old} in the checkpoint, {new} wanted" for name, (old, new) in shapes.items() if old != new]
    if wrong:
        raise CheckpointError(
            f"{path} has tensors of other shapes:\n  " + "\n  ".join(sorted(wrong)) + "\nIt was written for another "
            "model: use the [model] section of the config.toml beside it."
        )


def _read_items(number: int, shard: Shard, saved: SavedTensor) -> list[ReadItem]:
    items, covered = [], 0
    for index, stored in enumerate(saved.shards):
        common = overlap(shard.box, stored.box)
        if common is not None:
            covered += common.volume
            items.append(_read_item(number, shard, index, stored, common))
    assert covered == shard.box.volume, f"{shard.name}: the shards of a manifest must cover {shard.box}"
    return items


def _read_item(number: int, shard: Shard, index: int, stored: StoredShard, common: Box) -> ReadItem:
    return ReadItem(
        LoadItemType.TENSOR,
        dest_index=MetadataIndex(shard.name, shard.offsets, number),
        dest_offsets=torch.Size(relative(common, shard.box).offsets),
        storage_index=MetadataIndex(shard.name, stored.box.offsets, index),
        storage_offsets=torch.Size(relative(common, stored.box).offsets),
        lengths=torch.Size(common.sizes),
    )


class _Reader(StorageReader):
    """Reads parts of tensors from where the manifest says they lie, and checks hashes beside it."""

    def __init__(
        self,
        find: Callable[[], Path | None],
        check_hashes: bool,
        *,
        holders: Mapping[str, Sequence[int]] | None = None,
        known: Manifest | None = None,
        may_be_another: bool = True,
    ) -> None:
        self.find, self.check_hashes, self.holders = find, check_hashes, holders
        self.known, self.may_be_another = known, may_be_another
        self.path: Path | None = None
        """None where `find` has found nothing; `contents` are empty then."""
        self.contents = Manifest(0, {}, {}, {})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a reader is for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({})  # the manifest has it; read where a failure reaches all ranks

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.path = self.find()
        if self.path is None:
            return
        self.contents = read_manifest(self.path, self.known)
        if self.known is not None and self.contents is not self.known and not self.may_be_another:
            raise gone(self.path)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        sizes = {name: file.size for name, file in self.contents.files.items()}
        holders = self.holders or dict.fromkeys(sizes, range(len(plans)))
        owner = share_out(sizes, holders, len(plans))
        return [replace(plan, storage_data=[n for n in sizes if owner[n] == rank]) for rank, plan in enumerate(plans)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self.path is not None:
            with ThreadPoolExecutor(1) as checker:
                check_sizes(self.path, self.contents, plan.storage_data)
                hashed = plan.storage_data if self.check_hashes else ()
                checks = [checker.submit(check_hash, self.path, self.contents, name) for name in hashed]
                try:
                    self._read(self.path, plan.items, planner)
                finally:
                    for check in checks:
                        check.result()
            check_unchanged(self.path, self.contents)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, path: Path, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for item in items:
                tensor = self.contents.tensors[item.storage_index.fqn]
                assert item.storage_index.index is not None, "set by `_read_items`"
                stored = tensor.shards[item.storage_index.index]
                if stored.file not in files:
                    files[stored.file] = stack.enter_context(open_plain(path / stored.file))
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                target = planner.resolve_tensor(item)
                try:
                    read_box(files[stored.file], stored, tensor.dtype, box, target)
                except (zipfile.BadZipFile, EOFError) as error:
                    name = item.storage_index.fqn
                    what = f"{path / stored.file} is damaged: {name} cannot be read from it ({error})."
                    raise damaged(path, self.contents, what) from None
                planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()
