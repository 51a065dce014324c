"""Before anything is written: all ranks agree on who writes which box of which tensor.

    every rank  ── its boxes ──▶  rank 0: equal boxes of several ranks are shared out  ── what to write ──▶  every rank

Of ranks that hold the same boxes, as copies over dp do, one tells them, the others their digest: all that is proved of
the boxes is proved of each rank's. What is told is plain numbers: write items take many times as long to be read.

The boxes of a run stay what they are from save to save, so one agreement is good for all of them. It is reached within
`torch.distributed.checkpoint.save`, with a writer that writes nothing: all ranks return, or all raise alike.
"""

import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from colonnade.mesh.agreement import all_ranks, gather_texts
from colonnade.mesh.background import Group

Key = tuple[str, Box]
"""A tensor's name, and a box of it."""
Kind = tuple[tuple[int, ...], torch.dtype]
"""A tensor's whole shape and its dtype."""
Numbers = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A `Key` as it travels: name, offsets, sizes."""


class _Told(NamedTuple):
    """What a rank tells rank 0."""

    digest: str
    """Of its boxes."""
    boxes: list[tuple[Numbers, Kind]] | None
    """None where another rank tells the same."""


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
    boxes = _boxes(shards)
    digest, ranks = hashlib.sha256(repr(boxes).encode()).hexdigest(), all_ranks(group)
    is_first = gather_texts(digest, ranks).index(digest) == ranks.rank
    planner = _Planner(_Told(digest, boxes if is_first else None), dict(boxes))
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

    def __init__(self, told: _Told, kinds: Mapping[Numbers, Kind]) -> None:
        self.told, self.is_coordinator, self.metadata = told, False, Metadata({})
        self.kinds = {name: kind for (name, _, _), kind in kinds.items()}
        """Of this rank's tensors."""
        self.items: Sequence[WriteItem] = ()

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        return SavePlan([], planner_data=self.told)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, plan in enumerate(all_plans):
            ranks[plan.planner_data.digest].append(rank)
        told = [plan.planner_data for plan in all_plans if plan.planner_data.boxes is not None]
        kinds, sizes, holders = _held_by(told, ranks)
        _check_that_all_is_held(kinds, sizes)
        mine: list[list[Numbers]] = [[] for _ in all_plans]
        for name, box, rank in share_boxes(sizes, holders, len(all_plans)):
            mine[rank].append((name, *box))
        self.metadata = _metadata(kinds, mine)
        return [replace(plan, planner_data=mine[rank]) for rank, plan in enumerate(all_plans)], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.items = [_write_item(name, Box(*box), self.kinds[name]) for name, *box in new_plan.planner_data]
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


def _boxes(shards: Sequence[Shard]) -> list[tuple[Numbers, Kind]]:
    """Each box of a rank once."""
    held = {(s.name, s.box): (tuple(s.shape), s.data.dtype) for s in shards if s.box.volume}
    return [((name, *box), kind) for (name, box), kind in held.items()]


def _held_by(
    told: Iterable[_Told], ranks: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Kind], dict[Key, int], dict[Key, list[int]]]:
    """What kind each tensor is, and of each box how many bytes it has and which ranks hold it."""
    kinds: dict[str, Kind] = {}
    sizes: dict[Key, int] = {}
    holders: dict[Key, list[int]] = defaultdict(list)
    for each in told:
        for (name, *numbers), kind in each.boxes or ():
            known, held = kinds.setdefault(name, kind), (name, Box(*numbers))
            assert kind == known, f"{name}: shape and dtype must be the same on all ranks, got {known} and {kind}"
            sizes[held] = held[1].volume * kind[1].itemsize
            holders[held] += ranks[each.digest]
    return kinds, sizes, holders


def _write_item(name: str, box: Box, kind: Kind) -> WriteItem:
    size, dtype = kind
    chunk = _chunk(*box)
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(size))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _check_that_all_is_held(kinds: Mapping[str, Kind], held: Iterable[Key]) -> None:
    boxes: dict[str, list[Box]] = defaultdict(list)
    for name, box in held:
        boxes[name].append(box)
    for name, (size, _) in kinds.items():
        assert tile(size, boxes[name]), (
            f"{name} {list(size)}: boxes must cover it, each element once: {sorted(boxes[name])}"
        )


def _metadata(kinds: Mapping[str, Kind], written: Iterable[Iterable[Numbers]]) -> Metadata:
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    for name, *box in itertools.chain.from_iterable(written):
        chunks[name].append(_chunk(*box))
    return Metadata(
        {
            name: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks[name])
            for name, (size, dtype) in kinds.items()
        }
    )


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _view_of(shards: Iterable[Shard], box: Box) -> Tensor:
    """`box` of the tensor that the shards are boxes of, as a view of the one that has it whole."""
    for shard in shards:
        if overlap(shard.box, box) == box:
            return narrow(shard.data.detach(), relative(box, shard.box))
    raise AssertionError(f"{box} must lie in a box of this rank")
