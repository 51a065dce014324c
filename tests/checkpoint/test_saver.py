"""Saving in the background: what is written is what was there at the call, whatever happens meanwhile."""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.checkpoint import files, saver
from colonnade.checkpoint.load import load
from colonnade.checkpoint.manifest import checkpoints_in, newest, verify
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import Content, Place, save
from colonnade.checkpoint.saver import Saved, Saver
from colonnade.errors import CheckpointError
from colonnade.mesh.background import background_group
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.layout import Layout as MeshLayout
from colonnade.mesh.mesh import build_mesh
from tests.checkpoint.grids import MODEL, Layout, model_shards, number
from tests.distributed import fork, run_on_ranks

LAYOUTS = [Layout(), Layout(tp=2), Layout(dp=2, zero=True)]


def weights() -> dict[str, torch.Tensor]:
    return {name: number(shape, torch.float64) for name, shape in MODEL.items()}


def saver_of(
    folder: Path,
    shards: list[Shard],
    told: list[Saved] | None = None,
    *,
    asynchronous: bool = True,
    keep: int = 2,
    first: Callable[[], object] = lambda: None,
) -> Saver:
    return Saver(
        Place(folder, keep, before_publishing=first),
        shards,
        asynchronous=asynchronous,
        group=background_group(60.0) if asynchronous else None,
        on_saved=lambda saved: told.append(saved) if told is not None else None,
    )


def content(step: int) -> Content:
    return Content(step, {"value": step})


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


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_checkpoint_is_of_the_time_of_the_call(tmp_path: Path, layout: Layout, asynchronous: bool) -> None:
    def train(rank: int, num_ranks: int) -> None:
        shards, told = layout.shards(weights(), rank), list[Saved]()
        with saver_of(tmp_path, shards, told, asynchronous=asynchronous) as writer:
            for step in range(1, 5):
                writer.save(content(step), lambda: shards)
                multiply(shards, 2.0)
        assert [saved.step for saved in told] == [1, 2, 3, 4]
        assert all(0 < saved.blocked_seconds <= saved.seconds for saved in told)
        assert all((saved.blocked_seconds < saved.seconds) == asynchronous for saved in told)
        check(tmp_path / "step_00000003", layout, rank, 4.0)
        check(tmp_path / "step_00000004", layout, rank, 8.0)

    run_on_ranks(train, layout.num_ranks)
    assert list(checkpoints_in(tmp_path)) == [3, 4]
    assert verify(tmp_path / "step_00000004").facts == {"value": 4}


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, layout: Layout) -> None:
    """Collectives over shared memory and over gloo, in numbers, between those of the thread."""

    def train(rank: int, num_ranks: int) -> None:
        mesh = build_mesh(MeshLayout(tp=num_ranks), rank)
        shards, told = layout.shards(weights(), rank), list[Saved]()
        with saver_of(tmp_path, shards, told) as writer:
            with Gate().closed() as gate:
                writer.save(content(1), lambda: shards)
                for step in range(200):
                    assert all_reduce(torch.tensor(float(step)), mesh.world) == num_ranks * step
                    torch.distributed.all_reduce(torch.zeros(3))
                multiply(shards, 0.0)
                assert writer.is_busy and not writer.has_failed and not told
                assert newest(tmp_path) is None
                torch.distributed.barrier()
                gate.opened.set()
                while all_reduce(torch.tensor(float(writer.is_busy)), mesh.world, "max"):
                    all_reduce(torch.zeros(1000), mesh.world)
                    torch.distributed.all_reduce(torch.zeros(3))
            writer.wait()
            assert not writer.is_busy
        check(tmp_path / "step_00000001", layout, rank, 1.0)

    run_on_ranks(train, layout.num_ranks)


def test_never_two_at_once(tmp_path: Path) -> None:
    """The second save waits for the first, and says so in the time it blocked."""
    shards, told, writing = LAYOUTS[0].shards(weights(), 0), list[Saved](), list[int]()
    with saver_of(tmp_path, shards, told, first=lambda: writing.append(threading.active_count())) as writer:
        before = threading.active_count()
        with Gate().closed() as gate:
            writer.save(content(1), lambda: shards)
            threading.Timer(0.3, gate.opened.set).start()
            writer.save(content(2), lambda: shards)
            assert [saved.step for saved in told] == [1]
        writer.wait()
    assert told[0].blocked_seconds < 0.2 < told[1].blocked_seconds <= told[1].seconds
    assert len(writing) == 2 and threading.active_count() == before


def fill_disk_of(rank: int, victim: int) -> None:
    """From here on every write of rank `victim` fails."""

    def refuse(self: object, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    if rank == victim:
        files._HashingStream.write = refuse  # type: ignore[method-assign]


def failed(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("seen_by", ["the next save", "a look", "the end", "an exit"])
def test_a_failure_is_seen_by_all_ranks(tmp_path: Path, victim: int, seen_by: str) -> None:
    def train(rank: int, num_ranks: int) -> str:
        layout = Layout(dp=2, zero=True)
        shards = layout.shards(weights(), rank)
        group = background_group(60.0)
        writer = Saver(Place(tmp_path, 3), shards, asynchronous=True, group=group)

        def run() -> None:
            with writer:
                writer.save(content(1), lambda: shards)
                writer.wait()
                fill_disk_of(rank, victim)
                writer.save(content(2), lambda: shards)
                if seen_by == "the next save":
                    writer.save(content(3), lambda: shards)
                elif seen_by == "a look":
                    while not writer.has_failed:
                        time.sleep(0.01)
                    writer.wait()
                elif seen_by == "an exit":
                    raise SystemExit(143)

        said = failed(run)
        torch.distributed.barrier()
        return said

    first, second = run_on_ranks(train, 2)
    assert first == second
    assert first.startswith("The disk is full: ") and "step_00000001, the last whole checkpoint, stays" in first
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    verify(tmp_path / "step_00000001")


def test_a_failure_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = LAYOUTS[0].shards(weights(), 0)
    monkeypatch.setattr(saver, "write", lambda *_: (_ for _ in ()).throw(CheckpointError("full")))
    with saver_of(tmp_path, shards) as writer:
        writer.save(content(1), lambda: shards)
        assert failed(writer.wait) == "full"
        assert not writer.has_failed
        writer.wait()


def test_before_publishing_belongs_to_the_save(tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError(5, "Input/output error")

    def train(rank: int, num_ranks: int) -> str:
        shards = Layout(dp=2, zero=True).shards(weights(), rank)

        def run() -> None:
            with saver_of(tmp_path, shards, first=refuse) as writer:
                writer.save(content(1), lambda: shards)

        return failed(run)

    first, second = run_on_ranks(train, 2)
    assert first == second and first.startswith("Rank 0 could not read or write the checkpoint: [Errno 5]")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [SystemExit(143), ValueError("a bug in the data")])
def test_leaving_waits(tmp_path: Path, error: BaseException) -> None:
    shards, told = LAYOUTS[0].shards(weights(), 0), list[Saved]()
    with pytest.raises(type(error)), saver_of(tmp_path, shards, told) as writer, Gate().closed() as gate:
        writer.save(content(1), lambda: shards)
        threading.Timer(0.2, gate.opened.set).start()
        raise error
    assert [saved.step for saved in told] == [1]
    verify(tmp_path / "step_00000001")


def test_an_error_is_not_hidden_by_that_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = LAYOUTS[0].shards(weights(), 0)
    monkeypatch.setattr(saver, "write", lambda *_: (_ for _ in ()).throw(CheckpointError("full")))
    with pytest.raises(ValueError, match="a bug in the data") as caught, saver_of(tmp_path, shards) as writer:
        writer.save(content(1), lambda: shards)
        raise ValueError("a bug in the data")
    assert caught.value.__notes__ == ["The checkpoint under way failed as well: full"]


def test_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    shards, told = LAYOUTS[0].shards(weights(), 0), list[Saved]()
    with Gate().closed() as gate:
        with pytest.raises(KeyboardInterrupt), saver_of(tmp_path, shards, told) as writer:
            writer.save(content(1), lambda: shards)
            raise KeyboardInterrupt
        assert not told and newest(tmp_path) is None
        gate.opened.set()
        writer.wait()


def test_one_rank_that_fails_waits_for_the_save_of_all(tmp_path: Path) -> None:
    """Its checkpoint is whole in the end, though the other rank is in the midst of a collective."""

    def train(rank: int, num_ranks: int) -> None:
        shards = Layout(dp=2, zero=True).shards(weights(), rank)
        error = ValueError if rank == 0 else RuntimeError  # the other loses its connection
        with pytest.raises(error), saver_of(tmp_path, shards) as writer, Gate().closed() as gate:
            writer.save(content(1), lambda: shards)
            threading.Timer(0.2, gate.opened.set).start()
            if rank == 0:
                raise ValueError("in the data of this rank")
            torch.distributed.barrier()
        verify(tmp_path / "step_00000001")
        torch.distributed.destroy_process_group()

    run_on_ranks(train, 2)


def test_a_rank_that_has_gone_ends_the_others_save(tmp_path: Path) -> None:
    def train(rank: int, num_ranks: int) -> None:
        shards = Layout(dp=2, zero=True).shards(weights(), rank)
        group = background_group(60.0)
        writer = Saver(Place(tmp_path, 2), shards, asynchronous=True, group=group)
        if rank == 1:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
            return
        with pytest.raises(RuntimeError, match=r"Connection closed|Connection reset"), writer:
            writer.save(content(1), lambda: shards)
            torch.distributed.barrier()
        assert newest(tmp_path) is None

    run_on_ranks(train, 2)


def test_a_rank_copies_what_it_writes(tmp_path: Path) -> None:
    """Four copies of a model need a quarter of its memory each, once."""

    def train(rank: int, num_ranks: int) -> int:
        shards = model_shards({f"w{i}": number((300, 200)) for i in range(4)}, 0, 1)
        with saver_of(tmp_path, shards) as writer:
            snapshot = writer._snapshot
            assert snapshot is not None
            places = {x.data_ptr() for x in snapshot.parts.values()}
            for step in (1, 2):
                writer.save(content(step), lambda: shards)
            assert places == {x.data_ptr() for x in snapshot.parts.values()}
            return snapshot._memory.numel()

    sizes = run_on_ranks(train, 4)
    assert sum(sizes) < 1.02 * 4 * 300 * 200 * 4 and max(sizes) < 1.1 * sum(sizes) / 4


def test_the_boxes_of_a_run_stay_the_same(tmp_path: Path) -> None:
    refused = pytest.raises(AssertionError, match="the boxes of a rank stay the same from save to save")
    with saver_of(tmp_path, model_shards(weights(), 0, 1)) as writer, refused:
        writer.save(content(1), lambda: model_shards(weights(), 0, 2))
    assert newest(tmp_path) is None


def test_what_a_killed_run_has_left_is_tidied(tmp_path: Path) -> None:
    shards = model_shards(weights(), 0, 1)
    for step in (1, 2, 3, 4):
        save(tmp_path, step, shards, {}, keep=9)
    for name in (".step_00000005.partial", ".step_00000000.deleted"):
        (tmp_path / name).mkdir()

    def start(rank: int, num_ranks: int) -> None:
        with saver_of(tmp_path, shards, asynchronous=rank < 0):
            assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]

    run_on_ranks(start, 2)
    verify(tmp_path / "step_00000004")


def save_forever(folder: Path) -> None:
    torch.set_num_threads(1)
    x = {f"w{i}": torch.zeros(50_000) for i in range(8)}
    shards = model_shards(x, 0, 1)
    with saver_of(folder, shards) as writer:
        for step in range(1, 1_000_000):
            for shard in shards:
                shard.data.fill_(step)
            writer.save(content(step), lambda: shards)


def test_killed_at_any_moment_the_last_whole_one_stays(tmp_path: Path) -> None:
    seen = 0
    for round_ in range(12):
        child = fork(save_forever, tmp_path)
        time.sleep(0.1 + random.Random(round_).random() * 0.12)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        path = newest(tmp_path)
        if path is None:
            continue
        seen += 1
        contents = verify(path)
        x = torch.zeros(50_000)
        load(path, [Shard("w3", (50_000,), (0,), x)], unread=("w",))
        assert x.eq(contents.facts["value"]).all() and len(checkpoints_in(tmp_path)) <= 3
    assert seen > 6
