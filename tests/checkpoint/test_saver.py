"""Saving in the background: what is written is what was there at the call, whatever happens meanwhile."""

import errno
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.checkpoint import files, folders, saver
from colonnade.checkpoint.load import load
from colonnade.checkpoint.manifest import newest, verify
from colonnade.checkpoint.names import checkpoints_in
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import Payload, Target, save
from colonnade.checkpoint.saver import Saved, Saver
from colonnade.checkpoint.snapshot import Snapshot
from colonnade.errors import CheckpointError
from colonnade.mesh.background import background_group
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.layout import Layout as MeshLayout
from colonnade.mesh.mesh import build_mesh
from tests.checkpoint.grids import Layout, model_shards
from tests.checkpoint.saving import Gate, check, failed, multiply, payload, saver_of, weights
from tests.distributed import fork, run_on_ranks

LAYOUTS = [Layout(), Layout(tp=2), Layout(dp=2, zero=True)]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_checkpoint_is_of_the_time_of_the_call(tmp_path: Path, layout: Layout, asynchronous: bool) -> None:
    def train(rank: int, num_ranks: int) -> None:
        shards, told = layout.shards(weights(), rank), list[Saved]()
        with saver_of(tmp_path, shards, told, asynchronous=asynchronous) as writer:
            for step in range(1, 5):
                writer.save(payload(step), lambda: shards)
                multiply(shards, 2.0)
        assert [saved.step for saved in told] == [1, 2, 3, 4]
        assert all(0 < saved.blocked_seconds <= saved.seconds for saved in told)
        assert all((saved.blocked_seconds < saved.seconds) == asynchronous for saved in told)
        check(tmp_path / "step_00000003", layout, rank, 4.0)
        check(tmp_path / "step_00000004", layout, rank, 8.0)

    run_on_ranks(train, layout.num_ranks)
    assert list(checkpoints_in(tmp_path)) == [3, 4]
    assert verify(tmp_path / "step_00000004").metadata == {"value": 4}


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, layout: Layout) -> None:
    """Collectives over shared memory and over gloo, in numbers, between those of the thread."""

    def train(rank: int, num_ranks: int) -> None:
        mesh = build_mesh(MeshLayout(tp=num_ranks), rank)
        shards, told = layout.shards(weights(), rank), list[Saved]()
        with saver_of(tmp_path, shards, told) as writer:
            with Gate().closed() as gate:
                writer.save(payload(1), lambda: shards)
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


def test_a_copy_is_of_what_the_main_thread_has_asked_for_and_its_memory_is_let_go_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU computes later than it is asked: which of it comes before the copy is settled before the copy begins."""
    told, main = list[str](), threading.current_thread()
    for name in ("wait_for_originals", "take", "close"):
        original = getattr(Snapshot, name)

        def note(self: Snapshot, *arguments: Any, name: str = name, original: Any = original) -> None:
            told.append(f"{name} {'in' if threading.current_thread() is main else 'beside'} the main thread")
            original(self, *arguments)

        monkeypatch.setattr(Snapshot, name, note)
    shards = LAYOUTS[0].shards(weights(), 0)
    with saver_of(tmp_path, shards) as writer:
        writer.save(payload(1), lambda: shards)
    first, second, last = told
    assert (first, second) == ("wait_for_originals in the main thread", "take beside the main thread")
    assert last == "close in the main thread"


def test_never_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save waits for the first, and for its own copy, and says so in the time it blocked."""
    take = Snapshot.take

    def slowly(self: Snapshot, tensors: Any) -> None:
        time.sleep(0.3)
        take(self, tensors)

    monkeypatch.setattr(Snapshot, "take", slowly)
    shards, told = LAYOUTS[0].shards(weights(), 0), list[Saved]()
    with saver_of(tmp_path, shards, told) as writer:
        with Gate().closed() as gate:
            writer.save(payload(1), lambda: shards)
            threading.Timer(1.0, gate.opened.set).start()
            writer.save(payload(2), lambda: shards)
            assert gate.opened.is_set() and told[0].step == 1
        writer.wait()
    assert [saved.step for saved in told] == [1, 2]
    assert told[0].blocked_seconds < told[0].seconds and 0.5 < told[1].blocked_seconds < told[1].seconds
    assert told[0].blocked_seconds > 0.2


def fill_disk_of(rank: int, victim: int) -> None:
    """From here on every write of rank `victim` fails."""

    def refuse(self: object, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    if rank == victim:
        files._HashingStream.write = refuse  # type: ignore[method-assign]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("seen_by", ["the next save", "a look", "the end", "an exit"])
def test_a_failure_is_seen_by_all_ranks(tmp_path: Path, victim: int, seen_by: str) -> None:
    def train(rank: int, num_ranks: int) -> str:
        layout = Layout(dp=2, zero=True)
        shards = layout.shards(weights(), rank)
        group = background_group(60.0)
        writer = Saver(Target(tmp_path, 3), shards, asynchronous=True, group=group)

        def run() -> None:
            with writer:
                writer.save(payload(1), lambda: shards)
                writer.wait()
                fill_disk_of(rank, victim)
                writer.save(payload(2), lambda: shards)
                if seen_by == "the next save":
                    writer.save(payload(3), lambda: shards)
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


def fail(*args: object, **kwargs: object) -> Path:
    raise CheckpointError("full")


def test_a_failure_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = LAYOUTS[0].shards(weights(), 0)
    monkeypatch.setattr(saver, "write", fail)
    with saver_of(tmp_path, shards) as writer:
        writer.save(payload(1), lambda: shards)
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
                writer.save(payload(1), lambda: shards)

        return failed(run)

    first, second = run_on_ranks(train, 2)
    assert first == second and first.startswith("Rank 0 could not read or write the checkpoint: [Errno 5]")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [SystemExit(143), ValueError("a bug in the data")])
def test_leaving_waits(tmp_path: Path, error: BaseException) -> None:
    shards, told = LAYOUTS[0].shards(weights(), 0), list[Saved]()
    with pytest.raises(type(error)), saver_of(tmp_path, shards, told) as writer, Gate().closed() as gate:
        writer.save(payload(1), lambda: shards)
        threading.Timer(0.2, gate.opened.set).start()
        raise error
    assert [saved.step for saved in told] == [1]
    verify(tmp_path / "step_00000001")


def test_an_error_is_not_hidden_by_that_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = LAYOUTS[0].shards(weights(), 0)
    monkeypatch.setattr(saver, "write", fail)
    with pytest.raises(ValueError, match="a bug in the data") as caught, saver_of(tmp_path, shards) as writer:
        writer.save(payload(1), lambda: shards)
        raise ValueError("a bug in the data")
    assert caught.value.__notes__ == ["The checkpoint under way failed as well: full"]


def test_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    shards, told = LAYOUTS[0].shards(weights(), 0), list[Saved]()
    with Gate().closed() as gate:
        with pytest.raises(KeyboardInterrupt), saver_of(tmp_path, shards, told) as writer:
            writer.save(payload(1), lambda: shards)
            raise KeyboardInterrupt
        assert writer.is_busy and not told and newest(tmp_path) is None
        gate.opened.set()
        writer.wait()


def test_waiting_leaves_no_thread(tmp_path: Path) -> None:
    """Tensors that a thread frees while the interpreter ends abort the process: `wait` waits for that too."""
    shards, freed = LAYOUTS[0].shards(weights(), 0), list[str]()

    class Slow(Payload):
        def __del__(self) -> None:
            time.sleep(0.5)
            freed.append(threading.current_thread().name)

    before = set(threading.enumerate())
    with saver_of(tmp_path, shards) as writer:
        writer.save(Slow(1, {"value": 1}), lambda: shards)
        writer.wait()
        assert freed == ["checkpoint"]
        assert "checkpoint" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_one_rank_that_fails_waits_for_the_save_of_all(tmp_path: Path) -> None:
    """Its checkpoint is whole in the end, though the other rank is in the midst of a collective."""

    def train(rank: int, num_ranks: int) -> None:
        shards = Layout(dp=2, zero=True).shards(weights(), rank)
        error = ValueError if rank == 0 else RuntimeError  # the other loses its connection
        with pytest.raises(error), saver_of(tmp_path, shards) as writer, Gate().closed() as gate:
            writer.save(payload(1), lambda: shards)
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
        writer = Saver(Target(tmp_path, 2), shards, asynchronous=True, group=group)
        if rank == 1:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
            return
        with pytest.raises(RuntimeError, match=r"Connection closed|Connection reset"), writer:
            writer.save(payload(1), lambda: shards)
            torch.distributed.barrier()
        assert newest(tmp_path) is None

    run_on_ranks(train, 2)


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


def test_what_cannot_be_deleted_is_told_when_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends no run, and keeps nothing else from being deleted."""
    left, refused = [tmp_path / f".step_0000000{step}.partial" for step in (1, 2)], list[tuple[Path, str]]()
    for path in left:
        path.mkdir(parents=True)
    remove = folders.remove

    def refuse(path: Path) -> None:
        if path == left[0]:
            raise PermissionError(errno.EACCES, "no", str(path))
        remove(path)

    monkeypatch.setattr(folders, "remove", refuse)
    target = Target(tmp_path, 1, refused=lambda path, error: refused.append((path, str(error.strerror))))
    Saver(target, model_shards(weights(), 0, 1), asynchronous=False, group=None)
    assert refused == [(left[0], "no")] and list(tmp_path.iterdir()) == left[:1]


def test_what_is_spared_stays_when_a_run_begins(tmp_path: Path) -> None:
    shards = model_shards(weights(), 0, 1)
    for step in (1, 2, 3):
        save(tmp_path, step, shards, {}, keep=9)
    Saver(Target(tmp_path, 1, spared=lambda steps: [min(steps)]), shards, asynchronous=False, group=None)
    assert list(checkpoints_in(tmp_path)) == [1, 3]


class OnGPU(torch.Tensor):
    """One that says that it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(("on_gpu", "pinned"), [((), False), (("a",), True), (("a", "b"), True)], ids=str)
def test_the_copy_is_pinned_where_anything_is_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: tuple[str, ...], pinned: bool
) -> None:
    """With the optimizer's state in CPU memory some of it is: from there it is copied on a stream of its own."""
    asked = list[bool]()
    monkeypatch.setattr(saver, "Snapshot", lambda items, *, pinned: asked.append(pinned))
    x = torch.zeros(3)
    shards = [Shard(name, (3,), (0,), x.as_subclass(OnGPU) if name in on_gpu else x) for name in ("b", "a")]
    Saver(Target(tmp_path, 1), shards, asynchronous=True, group=None)
    assert asked == [pinned]


def save_forever(folder: Path, first: int) -> None:
    torch.set_num_threads(1)
    x = {f"w{i}": torch.zeros(50_000) for i in range(8)}
    shards = model_shards(x, 0, 1)
    with saver_of(folder, shards) as writer:
        for step in range(first, first + 1_000_000):
            for shard in shards:
                shard.data.fill_(step)
            writer.save(payload(step), lambda: shards)


@pytest.mark.slow
def test_killed_at_any_moment_the_last_whole_one_stays(tmp_path: Path) -> None:
    """Each round goes on in the folder that the killed one has left."""
    for round_ in range(12):
        first = 1 + 1000 * round_
        child = fork(save_forever, tmp_path, first)
        while max(checkpoints_in(tmp_path), default=0) < first:
            time.sleep(0.002)
        time.sleep(random.Random(round_).random() * 0.05)
        child.kill()
        child.join()
        path = newest(tmp_path)
        assert path is not None
        contents = verify(path)
        assert contents.step >= first and len(checkpoints_in(tmp_path)) <= 3
        x = torch.zeros(50_000)
        load(path, [Shard("w3", (50_000,), (0,), x)], unread=("w",))
        assert x.eq(contents.metadata["value"]).all()


@pytest.mark.parametrize(
    "raised", [OSError("lost"), KeyboardInterrupt(), SystemExit(3)], ids=lambda each: type(each).__name__
)
def test_whatever_ends_a_thread_that_saves_reaches_who_waits_for_it(raised: BaseException) -> None:
    """Else it would wait for ever."""

    def work() -> None:
        raise raised

    future, thread = saver._in_background(work)
    thread.join(30)
    assert future.done() and future.exception() is raised
