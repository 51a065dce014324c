"""Before anything is written: all ranks agree on who writes which box of which tensor.

    every rank  ── its boxes ──▶  rank 0: equal boxes of several ranks are shared out  ── what to write ──▶  every rank

The boxes of a run stay what they are from save to save, so one agreement is good for all of them. It is reached within
`torch.distributed.checkpoint.save`, with a writer that writes nothing: all ranks return, or all raise alike.
"""

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
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
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from colonnade.checkpoint.failure import alone_is_fine, same_on_all_ranks
from colonnade.checkpoint.plan import Box, Shard, narrow, overlap, relative, share_boxes, tile
from colonnade.mesh.background import Group

Key = tuple[str, Box]
"""A tensor's name, and a box of it."""
Kind = tuple[torch.Size, torch.dtype]
"""A tensor's whole shape and its dtype."""


@dataclass(frozen=True)
class Agreement:
    """Who writes what, for as long as the ranks hold these boxes."""

    held: frozenset[tuple[str, Box, torch.dtype]]
    """Of this rank."""
    items: tuple[WriteItem, ...]
    """What this rank writes."""
    is_coordinator: bool
    """True on rank 0, which finishes what all have written."""
    metadata: Metadata
    """Of all that is written; empty on the other ranks."""

    @property
    def num_bytes(self) -> int:
        """Of what this rank writes."""
        return sum(num_bytes(item) for item in self.items)

    @property
    def total_bytes(self) -> int:
        """Of what all ranks write, on rank 0."""
        tensors = self.metadata.state_dict_metadata.values()
        return sum(
            t.size.numel() * t.properties.dtype.itemsize for t in tensors if isinstance(t, TensorStorageMetadata)
        )

    def tensors(self, shards: Sequence[Shard]) -> dict[Key, Tensor]:
        """The numbers that this rank is to write, as views of its shards, which must be those that were agreed on."""
        assert _held(shards) == self.held, "the boxes of a rank stay the same from save to save"
        of_name: dict[str, list[Shard]] = defaultdict(list)
        for shard in shards:
            of_name[shard.name].append(shard)
        return {key(item): _view_of(of_name[item.index.fqn], box_of(item)) for item in self.items}


def agree(
    shards: Sequence[Shard], group: Group | None = None, *, then: Callable[[], object] = lambda: None
) -> Agreement:
    """Every rank of `group` (all, if None) calls this with its own shards, which together must cover each tensor.

    `then` is what rank 0 does when all have agreed; if it fails, all raise alike.
    """
    planner = _Planner(shards)
    with alone_is_fine(), same_on_all_ranks():
        save_distributed({}, storage_writer=_WritesNothing(then), planner=planner, process_group=group)
    return Agreement(_held(shards), tuple(planner.items), planner.is_coordinator, planner.metadata)


def key(item: WriteItem) -> Key:
    """What an item writes."""
    return item.index.fqn, box_of(item)


def box_of(item: WriteItem) -> Box:
    chunk = data_of(item).chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def data_of(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "all that is written is tensors"
    return item.tensor_data


def num_bytes(item: WriteItem) -> int:
    return box_of(item).volume * data_of(item).properties.dtype.itemsize


class _Planner(SavePlanner):
    """Boxes to write items, and each item to one rank."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards, self.is_coordinator, self.metadata = shards, False, Metadata({})
        self.items: Sequence[WriteItem] = ()

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(name, box, kind) for (name, box), kind in _kinds_of_boxes(self.shards).items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        sizes: dict[Key, int] = {}
        holders: dict[Key, list[int]] = defaultdict(list)
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                sizes[key(item)] = num_bytes(item)
                holders[key(item)].append(rank)
        kinds = _kinds(item for plan in all_plans for item in plan.items)
        _check_that_all_is_held(kinds, sizes)
        mine: list[list[WriteItem]] = [[] for _ in all_plans]
        for name, box, rank in share_boxes(sizes, holders, len(all_plans)):
            mine[rank].append(_write_item(name, box, kinds[name]))
        self.metadata = _metadata(kinds, mine)
        return [replace(plan, items=mine[rank]) for rank, plan in enumerate(all_plans)], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.items = new_plan.items
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        raise AssertionError("nothing is written while the ranks agree")


class _WritesNothing(StorageWriter):
    """For reaching an agreement alone."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = then

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.then()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _held(shards: Sequence[Shard]) -> frozenset[tuple[str, Box, torch.dtype]]:
    return frozenset((shard.name, shard.box, shard.data.dtype) for shard in shards if shard.box.volume)


def _kinds_of_boxes(shards: Sequence[Shard]) -> dict[Key, Kind]:
    return {(s.name, s.box): (torch.Size(s.shape), s.data.dtype) for s in shards if s.box.volume}


def _write_item(name: str, box: Box, kind: Kind) -> WriteItem:
    size, dtype = kind
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), size)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _kinds(items: Iterable[WriteItem]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for item in items:
        kind = data_of(item).size, data_of(item).properties.dtype
        known = kinds.setdefault(item.index.fqn, kind)
        assert kind == known, f"{item.index.fqn}: shape and dtype must be the same on all ranks, got {known} and {kind}"
    return kinds


def _check_that_all_is_held(kinds: Mapping[str, Kind], held: Iterable[Key]) -> None:
    boxes: dict[str, list[Box]] = defaultdict(list)
    for name, box in held:
        boxes[name].append(box)
    for name, (size, _) in kinds.items():
        assert tile(size, boxes[name]), (
            f"{name} {list(size)}: boxes must cover it, each element once: {sorted(boxes[name])}"
        )


def _metadata(kinds: Mapping[str, Kind], items: Iterable[Iterable[WriteItem]]) -> Metadata:
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    for item in itertools.chain.from_iterable(items):
        chunks[item.index.fqn].append(data_of(item).chunk)
    return Metadata(
        {
            name: TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks[name])
            for name, (size, dtype) in kinds.items()
        }
    )


def _view_of(shards: Iterable[Shard], box: Box) -> Tensor:
    """`box` of the tensor that the shards are boxes of, as a view of the one that has it whole."""
    for shard in shards:
        if overlap(shard.box, box) == box:
            return narrow(shard.data.detach(), relative(box, shard.box))
    raise AssertionError(f"{box} must lie in a box of this rank")
