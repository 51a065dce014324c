"""The copy in memory: made beside training, as large as what the rank writes, of what was there at the call."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.checkpoint.agree import agree
from colonnade.checkpoint.load import load
from colonnade.checkpoint.manifest import newest
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.saver import Saved
from colonnade.checkpoint.snapshot import Snapshot
from colonnade.errors import CheckpointError
from tests.checkpoint.grids import Layout, model_shards, number
from tests.checkpoint.saving import check, failed, multiply, payload, saver_of, slow_copy, weights
from tests.distributed import run_on_ranks
from tests.emulated import Copies


def test_the_copy_is_made_beside_training(tmp_path: Path) -> None:
    """Until what was saved is about to change: that waits, and is told as time that training was blocked."""

    def train(rank: int, num_ranks: int) -> None:
        layout, told, begin = Layout(dp=2, zero=True), list[Saved](), threading.Event()
        shards = layout.shards(weights(), rank)
        with saver_of(tmp_path, shards, told, overlap=True) as writer, slow_copy(begin):
            writer.copied()
            writer.save(payload(1), lambda: shards)
            torch.distributed.barrier()  # forward and backward of the next step
            assert writer.is_busy
            threading.Timer(0.6, begin.set).start()
            writer.copied()
            multiply(shards, 2.0)
            writer.wait()
            assert 0.3 < told[0].blocked_seconds < told[0].seconds
            writer.save(payload(2), lambda: shards)
            while not writer._copied.is_set():  # a step that is longer than the copy
                time.sleep(0.01)
            writer.copied()
            multiply(shards, 2.0)
            writer.save(payload(3), lambda: shards)
        assert told[1].blocked_seconds < 0.3
        for step in (2, 3):
            check(tmp_path / f"step_{step:08}", layout, rank, 2.0 ** (step - 1))

    run_on_ranks(train, 2)


def test_each_copy_begins_on_a_cache_line() -> None:
    """Whatever stands before it: three bytes, say."""
    shards = [
        Shard(name, (3,), (0,), torch.zeros(3, dtype=dtype))
        for name, dtype in (("a", torch.uint8), ("b", torch.float64))
    ]
    copies = Snapshot(agree(shards).items, pinned=False)
    assert {part.data_ptr() % 64 for part in copies.tensors.values()} == {0}


def test_without_overlap_a_save_returns_when_it_is_copied(tmp_path: Path) -> None:
    shards, begin = Layout().shards(weights(), 0), threading.Event()
    with saver_of(tmp_path, shards) as writer, slow_copy(begin):
        threading.Timer(0.2, begin.set).start()
        writer.save(payload(1), lambda: shards)
        assert begin.is_set()
        multiply(shards, 3.0)
    check(tmp_path / "step_00000001", Layout(), 0, 1.0)


def test_a_copy_that_fails_is_everyones_failure(tmp_path: Path) -> None:
    def train(rank: int, num_ranks: int) -> str:
        shards = Layout(dp=2, zero=True).shards(weights(), rank)

        def refuse(snapshot: Snapshot, parts: Any) -> None:
            raise CheckpointError("no memory")

        if rank == 1:
            Snapshot.take = refuse  # type: ignore[method-assign]

        def run() -> None:
            with saver_of(tmp_path, shards, overlap=True) as writer:
                writer.save(payload(1), lambda: shards)
                writer.copied()

        return failed(run)

    assert run_on_ranks(train, 2) == ["no memory"] * 2


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    ],
)
def test_every_kind_of_number_is_copied(tmp_path: Path, dtype: torch.dtype) -> None:
    x = number((7, 5), dtype)
    shards = [Shard("x", (7, 5), (0, 0), x), Shard("t", (5, 7), (0, 0), x.t()), Shard("one", (), (), x[1, 2])]
    with saver_of(tmp_path, shards) as writer:
        writer.save(payload(1), lambda: shards)
    found = [Shard(s.name, s.shape, s.offsets, torch.zeros(s.shape, dtype=dtype)) for s in shards]
    load(tmp_path / "step_00000001", found)
    assert all(torch.equal(have.data, want.data) for have, want in zip(found, shards, strict=True))


def test_pinned_memory_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    large = Shard("w", (30_000_000,), (0,), torch.zeros((), dtype=torch.bfloat16).expand(30_000_000))
    agreement = agree([large])
    said = failed(lambda: Snapshot(agreement.items, pinned=True))
    assert "needs 0.1 GB of pinned memory" in said and "Set checkpoint.asynchronous = false" in said
    assert Snapshot([], pinned=True).tensors == {}, "a rank that writes nothing asks for none"


def test_pinned_memory_is_let_go_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was not pinned is not asked about."""
    pinned, sizes, none = set[int](), list[int](), None

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            pinned.add(address)
            sizes.append(size)
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            pinned.remove(address)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: none)
    items = agree(model_shards(weights(), 0, 1)).items
    for made, held in ((Snapshot(items, pinned=True), 1), (Snapshot(items, pinned=False), 0)):
        assert len(pinned) == held
        made.close()
        made.close()
        assert not pinned
        assert sizes == [made._memory.numel()] * held or not held, "all of it"


def test_a_copy_from_a_gpu_is_whole_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is behind what the main thread has asked for, on a stream of its own, which is waited for. The thread that
    makes it comes to that GPU first: left on the first one, it would take memory there.
    """
    told: list[Any] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return 0

    class Stream:
        device = torch.device("cuda", 3)

        def wait_stream(self, other: str) -> None:
            told.append(f"behind {other}")

        def synchronize(self) -> None:
            told.append("waited for")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        told.append("copies")
        yield
        told.append("asked for")

    for name, stands_in in (("cudart", Runtime), ("Stream", Stream), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, stands_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the main stream")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(f"on {device}"))
    shards = model_shards(weights(), 0, 1)
    agreement = agree(shards)
    originals, copies = agreement.tensors(shards), Snapshot(agreement.items, pinned=True)
    copies.wait_for_originals()
    with Copies() as noted:
        copies.take(originals)
    assert told == ["behind the main stream", "on cuda:3", "copies", "asked for", "waited for"]
    assert noted.in_place == [True] * len(originals), "all are asked for before one is waited for"
    assert all(torch.equal(copies.tensors[name], tensor) for name, tensor in originals.items())


def test_a_rank_copies_what_it_writes(tmp_path: Path) -> None:
    """Four copies of a model need a quarter of its memory each, once."""

    def train(rank: int, num_ranks: int) -> int:
        shards = model_shards({f"w{i}": number((300, 200)) for i in range(4)}, 0, 1)
        with saver_of(tmp_path, shards) as writer:
            snapshot = writer._snapshot
            assert snapshot is not None
            places = {x.data_ptr() for x in snapshot.tensors.values()}
            for step in (1, 2):
                writer.save(payload(step), lambda: shards)
            assert places == {x.data_ptr() for x in snapshot.tensors.values()}
            return snapshot._memory.numel()

    sizes = run_on_ranks(train, 4)
    assert sum(sizes) < 1.02 * 4 * 300 * 200 * 4 and max(sizes) < 1.1 * sum(sizes) / 4


def test_the_boxes_of_a_run_stay_the_same(tmp_path: Path) -> None:
    refused = pytest.raises(AssertionError, match="the boxes of a rank stay the same from save to save")
    with saver_of(tmp_path, model_shards(weights(), 0, 1)) as writer, refused:
        writer.save(payload(1), lambda: model_shards(weights(), 0, 2))
    assert newest(tmp_path) is None
