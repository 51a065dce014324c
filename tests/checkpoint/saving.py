"""A saver on a small model, and the means to hold back its copy or its writing."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.checkpoint import files
from colonnade.checkpoint.load import load
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import Payload, Target
from colonnade.checkpoint.saver import Saved, Saver
from colonnade.checkpoint.snapshot import Snapshot
from colonnade.errors import CheckpointError
from colonnade.mesh.background import background_group
from tests.checkpoint.grids import MODEL, Layout, number


def weights() -> dict[str, torch.Tensor]:
    return {name: number(shape, torch.float64) for name, shape in MODEL.items()}


def saver_of(
    folder: Path,
    shards: list[Shard],
    told: list[Saved] | None = None,
    *,
    asynchronous: bool = True,
    keep: int = 2,
    overlap: bool = False,
    first: Callable[[], object] = lambda: None,
) -> Saver:
    return Saver(
        Target(folder, keep, before_publishing=first),
        shards,
        asynchronous=asynchronous,
        group=background_group(60.0) if asynchronous else None,
        overlap=overlap,
        on_saved=lambda saved: told.append(saved) if told is not None else None,
    )


def payload(step: int) -> Payload:
    return Payload(step, {"value": step})


class Gate:
    """Holds back every write to a checkpoint's files in this process until it is opened."""

    def __init__(self) -> None:
        self.opened, self.writers, self.most = threading.Event(), 0, 0

    @contextmanager
    def closed(self) -> Iterator["Gate"]:
        """The gate opens at the end of the block, whatever happens."""
        original = files._HashingStream.write

        def write(stream: Any, data: Any) -> int:
            assert self.opened.wait(30)
            return original(stream, data)

        files._HashingStream.write = write  # type: ignore[method-assign]
        try:
            yield self
        finally:
            self.opened.set()
            files._HashingStream.write = original  # type: ignore[method-assign]


def multiply(shards: list[Shard], factor: float) -> None:
    """As an optimizer does: in place."""
    for shard in shards:
        shard.data.mul_(factor)


def check(path: Path, layout: Layout, rank: int, factor: float) -> None:
    found = layout.shards({name: torch.zeros_like(x) for name, x in weights().items()}, rank)
    load(path, found)
    for have, want in zip(found, layout.shards(weights(), rank), strict=True):
        assert torch.equal(have.data, factor * want.data), have.name


def failed(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


@contextmanager
def slow_copy(begin: threading.Event) -> Iterator[None]:
    """No copy to memory before `begin` is set."""
    original = Snapshot.take

    def take(snapshot: Snapshot, parts: Any) -> None:
        assert begin.wait(30)
        original(snapshot, parts)

    Snapshot.take = take  # type: ignore[method-assign]
    try:
        yield
    finally:
        begin.set()
        Snapshot.take = original  # type: ignore[method-assign]
