"""A newest checkpoint that is damaged is set aside, and the run ends as if it had never been."""

import errno
import math
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.checkpoint import manifest, names
from colonnade.checkpoint.names import checkpoints_in
from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError, DamagedError, DiskError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train import damaged, recovery
from colonnade.train.corpus import open_corpus
from colonnade.train.save_retries import SaveRetries
from colonnade.train.state import TrainState, build_state
from colonnade.train.undo import return_to_newest
from tests.commands import forked
from tests.distributed import run_on_ranks
from tests.runs import Finished, assert_same, events, snapshot
from tests.told import Told


def flip(path: Path) -> None:
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def lose(path: Path) -> None:
    (path / "manifest.json").unlink()


def copy(finished: Finished, tmp_path: Path) -> Path:
    run = tmp_path / "copy"
    shutil.copytree(finished.folder, run)
    return run


@pytest.mark.parametrize(("damage", "num_ranks"), [(flip, 2), (cut, 1), (lose, 1)])
def test_the_run_goes_on_from_the_one_before(
    finished: Finished, config: Path, tmp_path: Path, damage: Callable[[Path], None], num_ranks: int
) -> None:
    run = copy(finished, tmp_path)
    before, newest = list(checkpoints_in(run / "checkpoints").values())[-2:]
    damage(newest)
    keys = [f"parallel.dp={num_ranks}"]
    answer = forked("train", config, f"run.folder={run}", *keys, num_ranks=num_ranks)
    assert answer.status == 0, answer
    assert f"the run goes on from {before.name}" in answer.out and f"Resumed from {before}" in answer.out
    assert (run / "checkpoints" / f"damaged_{newest.name}").is_dir()
    (told,) = [event for event in events(run) if event["event"] == "damaged checkpoint"]
    assert told["checkpoint"] == newest.name and told["to"] == before.name and "Delete" not in told["reason"]
    assert (told["now"], told["origin"]) == (f"damaged_{newest.name}", "disk")
    if num_ranks == 1:
        assert_same(run, finished.folder)


def test_so_does_a_run_that_returns_to_it(finished: Finished, config: Path, tmp_path: Path) -> None:
    """Where copies differ, or weights are nan: in mid-run as at a start."""
    run, told = copy(finished, tmp_path), Told()
    before, newest = list(checkpoints_in(run / "checkpoints").values())[-2:]
    flip(newest)
    state = returned(run, config, told)
    settings = load(config, [f"run.folder={run}"])
    corpus = open_corpus(settings)
    ((kind, details),) = told.events
    assert (kind, details["checkpoint"], details["to"]) == ("damaged checkpoint", newest.name, before.name)
    assert state.step == 4 and told.said[-1] == "to 4" and not newest.exists()
    expected = build_state(settings, Mesh(), corpus.vocab_size, torch.device("cpu"))
    recovery.restore(expected, settings, corpus)
    for ours, theirs in zip(state.buckets, expected.buckets, strict=True):
        assert torch.equal(ours.master, theirs.master), ours.name


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes where a run waits."""
    time = [0.0]

    def sleep(seconds: float) -> None:
        time[0] += seconds

    monkeypatch.setattr(damaged, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(damaged, "SaveRetries", partial(SaveRetries, clock=lambda: time[0]))
    return time


def returned(run: Path, config: Path, told: Told, *more: str) -> TrainState:
    """The state of a run that returns to its newest checkpoint."""
    settings = load(config, [f"run.folder={run}", *more])
    corpus = open_corpus(settings)
    state = build_state(settings, Mesh(), corpus.vocab_size, torch.device("cpu"))
    monitor: Any = SimpleNamespace(event=told.event, say=told.say, go_back=lambda step: told.say(f"to {step}"))
    return_to_newest(state, settings, corpus, monitor)
    return state


def refuse(monkeypatch: pytest.MonkeyPatch, error: int, is_refused: Callable[[Path], bool]) -> None:
    """Have the disk refuse files of these checkpoints."""
    hashed = manifest.hash_file

    def read(path: Path) -> str:
        if is_refused(path.parent):
            raise OSError(error, os.strerror(error))
        return hashed(path)

    monkeypatch.setattr(manifest, "hash_file", read)


@pytest.mark.parametrize(
    ("refused", "error", "until", "step"),
    [
        ((6,), errno.EIO, math.inf, 4),
        ((6,), errno.EIO, 290.0, 6),
        ((4, 6), errno.EIO, 3500.0, 6),
        ((4, 6), errno.EIO, math.inf, None),
        ((6,), errno.ESTALE, 3500.0, 6),
        ((6,), errno.ESTALE, math.inf, None),
    ],
    ids=["bad sectors", "a disk for minutes", "a disk for an hour", "a disk", "a mount for an hour", "a mount"],
)
def test_what_the_disk_refuses_is_read_again_and_is_damaged_where_it_gives_all_of_the_one_before(
    refused: tuple[int, ...],
    error: int,
    until: float,
    step: int | None,
    finished: Finished,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    now: list[float],
) -> None:
    run, told = copy(finished, tmp_path), Told()
    folders = checkpoints_in(run / "checkpoints")
    refuse(monkeypatch, error, lambda path: now[0] < until and path in [folders[each] for each in refused])
    if step is None:
        with pytest.raises(CheckpointError, match=rf"{os.strerror(error)}\. Fix that"):
            returned(run, config, told)
        assert now[0] > 3600.0
    else:
        assert returned(run, config, told).step == step and told.said[-1] == f"to {step}"
    assert "It is read again in 10 s." in told.said[0] and told.of("read failed")[0]["tries"] == 1
    aside = folders[6].with_name(f"damaged_{folders[6].name}")
    assert aside.is_dir() == (step == 4) == bool(told.of("damaged checkpoint"))
    if step == 4:
        assert 300.0 <= now[0] < 600.0 and f"{folders[6]} cannot be read (Input/output error), again" in told.said[-2]
    else:
        assert checkpoints_in(run / "checkpoints") == folders


def test_where_retries_are_not_wanted_it_is_read_once_more(
    finished: Finished, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    run = copy(finished, tmp_path)
    newest = checkpoints_in(run / "checkpoints")[6]
    refuse(monkeypatch, errno.EIO, lambda path: path == newest)
    assert returned(run, config, Told(), "checkpoint.retry_for=0").step == 4 and now == [0.0]


def test_a_storage_that_comes_and_goes_costs_one_checkpoint_at_most(
    finished: Finished, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    """Whichever is the newest is refused."""
    run, told = copy(finished, tmp_path), Told()
    folder = run / "checkpoints"
    oldest = shutil.copytree(folder / "step_00000004", folder / "step_00000002")
    whole = manifest.read_manifest(folder / "step_00000004")
    earlier = replace(whole, step=2, metadata={**whole.metadata, "step": 2})
    (oldest / "manifest.json").write_text(manifest.to_json(earlier))
    refuse(monkeypatch, errno.EIO, lambda path: path == list(checkpoints_in(folder).values())[-1])
    with pytest.raises(CheckpointError, match=r"Input/output error\. Fix that"):
        returned(run, config, told)
    assert now[0] > 3600.0 and list(checkpoints_in(folder)) == [2, 4] and len(told.of("damaged checkpoint")) == 1


def test_a_manifest_that_the_disk_refuses_is_read_again_and_then_damaged(
    finished: Finished, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    run, told = copy(finished, tmp_path), Told()
    newest, read_plain = checkpoints_in(run / "checkpoints")[6], manifest.read_plain

    def read(path: Path, limit: int) -> bytes:
        if path.parent == newest:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_plain(path, limit)

    monkeypatch.setattr(manifest, "read_plain", read)
    damaged.look(load(config, [f"run.folder={run}"]), Mesh().world, told)  # type: ignore[arg-type]
    assert list(checkpoints_in(run / "checkpoints")) == [4] and now[0] >= 300.0
    assert told.of("damaged checkpoint")[0]["checkpoint"] == newest.name


def test_a_folder_that_cannot_be_looked_into_is_waited_for_and_refused_in_one_message(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    told = Told()

    def away(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    for module in (damaged, names):
        monkeypatch.setattr(module, "checkpoints_in", away)
    with pytest.raises(CheckpointError, match=r"Input/output error: .* Mend the disk or its mount\."):
        damaged.look(load(finished.config), Mesh().world, told)  # type: ignore[arg-type]
    assert now[0] > 3600.0 and not told.of("damaged checkpoint")


@pytest.mark.parametrize("key", ["restarts.damaged=refuse", "restarts.limit=0"])
def test_it_is_refused_where_that_is_wanted(finished: Finished, config: Path, tmp_path: Path, key: str) -> None:
    run = copy(finished, tmp_path)
    newest = list(checkpoints_in(run / "checkpoints").values())[-1]
    cut(newest)
    answer = forked("train", config, f"run.folder={run}", key)
    assert answer.status == 2 and "is damaged" in answer.err and newest.is_dir()


def test_a_dry_run_says_so_and_leaves_it(finished: Finished, config: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path)
    newest = list(checkpoints_in(run / "checkpoints").values())[-1]
    cut(newest)
    before = snapshot(run)
    answer = forked("train", config, f"run.folder={run}", "train.steps=8", "--dry-run")
    assert answer.status == 2 and "is damaged" in answer.err, answer
    assert snapshot(run) == before


def test_the_only_one_is_refused_and_stays(finished: Finished, config: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path)
    *others, newest = checkpoints_in(run / "checkpoints").values()
    for other in others:
        shutil.rmtree(other)
    flip(newest)
    answer = forked("train", config, f"run.folder={run}", "train.steps=8")
    assert answer.status == 2 and "There is no older one" in answer.err and newest.is_dir()


def test_of_what_was_read_before_it_proved_to_be_damaged_no_moment_stays(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it lacks those of weights that were frozen, which begin at zero."""
    moments = [{"m": torch.zeros(2), "v": torch.zeros(2)}, {}, {"m": torch.zeros(1)}]
    ownership = SimpleNamespace(mesh=Mesh())
    state: Any = SimpleNamespace(optimizer_state=moments, changes=[], ownership=ownership)
    read: list[list[float]] = []

    def load_found(*_: object, **__: object) -> None:
        read.append([float(moment.abs().max()) for kept in moments for moment in kept.values()])
        for kept in moments:
            for moment in kept.values():
                moment.fill_(math.nan)
        if len(read) == 1:
            raise DamagedError("It is damaged.")

    monkeypatch.setattr(recovery, "load_found", load_found)
    monkeypatch.setattr(recovery, "shards_of", lambda *_, **__: [])
    monkeypatch.setattr(damaged, "_replaced", lambda *_: True)
    corpus: Any = SimpleNamespace(vocab_size=8)
    assert damaged.restored(state, load(config), corpus, Told()) is None  # type: ignore[arg-type]
    assert read == [[0.0] * 3] * 2


def test_while_rank_0_works_the_others_hear_of_it_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks no more often: the work has the processor."""
    is_done, waited, sent = threading.Event(), list[float](), list[str]()

    def work() -> str:
        is_done.wait()
        return "found"

    def wait(futures: list[Future[str]], seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            is_done.set()
            futures[0].result()

    def broadcast(text: str, _: object) -> str:
        sent.append(text)
        assert len(sent) <= 4, "rank 0 turns in a circle"
        return text

    monkeypatch.setattr(damaged, "wait", wait)
    monkeypatch.setattr(damaged, "broadcast_text", broadcast)
    assert damaged.by_rank_0(work, Mesh().world) == "found"
    assert waited == [damaged.TICK] * 3 and sent == ["", "", "done", "found"]


def test_what_keeps_it_from_being_set_aside_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the run would wait for ever."""

    def work() -> bool:
        raise PermissionError("the folder may not be written")

    monkeypatch.setattr(damaged, "broadcast_text", lambda text, _: text or pytest.fail("rank 0 waits on"))
    with pytest.raises(PermissionError, match="the folder may not be written"):
        damaged.by_rank_0(work, Mesh().world)


def test_what_the_disk_refuses_of_setting_it_aside_is_raised_on_all_ranks() -> None:
    """As a folder that cannot be renamed on a disk that is read-only: none is left waiting for rank 0."""

    def work() -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "step_00000004")

    def raised(rank: int, num_ranks: int) -> str:
        with pytest.raises(DiskError) as error:
            damaged.by_rank_0(work, build_mesh(Layout(dp=2), rank).world)
        return str(error.value)

    said = "rank 0: step_00000004: Read-only file system. Fix that, and run the command again."
    assert run_on_ranks(raised, 2) == [said] * 2


def test_all_ranks_wait_where_one_cannot_look(finished: Finished, now: list[float]) -> None:
    """And what another rank sees of damage is nothing to rank 0, which may see another disk."""
    config, newest = load(finished.config), damaged.newest_in

    def told(rank: int, num_ranks: int, error: Exception, times: int) -> list[str]:
        left = [times if rank else 0]

        def fails(folder: Path) -> Path | None:
            left[0] -= 1
            if left[0] >= 0:
                raise error
            return newest(folder)

        told = Told()
        damaged.__dict__.update(newest_in=fails, TICK=0.01)
        damaged.look(config, build_mesh(Layout(dp=2), rank).world, told)  # type: ignore[arg-type]
        return [line.splitlines()[0] for line in told.said] if rank == 0 else []

    away = OSError(errno.EIO, "Input/output error")
    said = f"Rank 1 cannot read the newest checkpoint: {away}. Mend the disk or its mount."
    assert run_on_ranks(told, 2, away, 2) == [[said] * 2, []]
    assert run_on_ranks(told, 2, DamagedError("mine"), 9) == [[], []]


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "mine"), CheckpointError("of a newer version")])
def test_what_rank_0_alone_cannot_look_at_is_raised_where_all_read_it(
    error: Exception, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another version has written is no damage either."""
    asked = list[Path]()

    def fails(folder: Path) -> Path:
        asked.append(folder)
        raise error

    monkeypatch.setattr(damaged, "newest_in", fails)
    monkeypatch.setattr(damaged, "_replaced", lambda *_: pytest.fail("nothing is known to be damaged"))
    damaged.look(load(finished.config), Mesh().world, SimpleNamespace())  # type: ignore[arg-type]
    assert asked == [finished.folder / "checkpoints"], "once, and no exception on this rank alone"


@pytest.mark.parametrize("is_fetched", [True, False])
def test_what_takes_the_place_of_a_damaged_checkpoint_is_told_with_where_it_came_from(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fetched: bool
) -> None:
    """And not with the advice for a run that cannot go on."""
    run = copy(finished, tmp_path)
    config = load(finished.config, [f"run.folder={run}"])
    newest = list(checkpoints_in(run / "checkpoints").values())[-1]

    def fetch(path: Path, config: Config) -> Path | None:
        if not is_fetched:
            return None
        shutil.copytree(path, aside := path.with_name(f"damaged_{path.name}"))
        return aside

    monkeypatch.setattr(damaged, "fetch_for_damaged", fetch)
    told = Told()
    why = f"{newest} is damaged. There is no older one. Delete it."
    assert damaged._replaced(config, told, why)  # type: ignore[arg-type]
    ((kind, details),) = told.events
    to = newest.name if is_fetched else "step_00000004"
    assert kind == "damaged checkpoint" and details == {
        "checkpoint": newest.name,
        "now": f"damaged_{newest.name}",
        "to": to,
        "origin": "storage" if is_fetched else "disk",
        "reason": f"{newest} is damaged.",
    }
    fetched = ", fetched from checkpoint.upload_to" * is_fetched
    aside = newest.with_name(f"damaged_{newest.name}")
    assert told.said == [f"{newest} is damaged. It is {aside} now, and the run goes on from {to}{fetched}."]
