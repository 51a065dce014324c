"""A run's folder that not all ranks see is refused before the first step, on all of them."""

import errno
import itertools
import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.lock import locked
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train import loop, shared_folder
from tests.distributed import run_on_ranks


def _checked(rank: int, num_ranks: int, configs: list[Config], oldest: float) -> str:
    shared_folder.__dict__.update(OLDEST=oldest, TICK=0.0)
    try:
        shared_folder.check(configs[rank], build_mesh(Layout(dp=num_ranks), rank).world)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("apart", "who"), [([], ""), ([1], "rank 1"), ([2], "rank 2"), ([1, 2], "ranks 1 and 2")])
def test_all_ranks_see_the_folder_that_rank_0_sees_or_all_are_told_who_does_not(
    config: Path, tmp_path: Path, apart: list[int], who: str
) -> None:
    """Rank 1 has none, and rank 2 one of the same name that another run has."""
    settings = [load(config, [f"run.folder={tmp_path / str(rank if rank in apart else 0)}"]) for rank in range(3)]
    with locked(tmp_path / "0", "colonnade train"), locked(tmp_path / "2", "colonnade rollback"):
        told = run_on_ranks(_checked, 3, settings, 0.0)
    if not apart:
        assert told == ["", "", ""]
    for text in told if apart else []:
        assert f"is not one folder: {who} (on {socket.gethostname()}) cannot see there" in text


def test_without_a_holder_there_is_nothing_to_see(config: Path) -> None:
    assert run_on_ranks(_checked, 2, [load(config)] * 2, 0.0) == ["", ""]


def _sees_late(rank: int, num_ranks: int, config: Config, looks: int) -> int:
    """Rank 1 is shown the folder as it was, for some looks, and has a clock that runs ahead."""
    seen, now = [0], itertools.count(0.0, 1000.0 * rank)
    holder_of = shared_folder.holder_of

    def late(folder: Path) -> object:
        seen[0] += 1
        return None if rank == 1 and seen[0] <= looks else holder_of(folder)

    clock = SimpleNamespace(monotonic=now.__next__, sleep=lambda seconds: None)
    shared_folder.__dict__.update(holder_of=late, time=clock)
    shared_folder.check(config, build_mesh(Layout(dp=num_ranks), rank).world)
    return seen[0]


def test_what_a_network_file_system_shows_late_is_looked_for_again(config: Path, tmp_path: Path) -> None:
    """As long as rank 0 says: where each went by its own clock, some would wait for the others."""
    with locked(tmp_path / "run", "colonnade train"):
        assert run_on_ranks(_sees_late, 2, load(config), 5) == [6, 6]


def test_longer_than_nfs_keeps_what_it_has_seen_nobody_waits(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute. Each machine that does not see the folder is named once, beside that of rank 0, which does."""
    now, looks = [100.0], list[str]()

    def gathered(mine: str, _: object) -> list[str]:
        looks.append(mine)
        assert len(looks) < 200
        holder, _, waited = json.loads(mine)
        return [
            json.dumps((each, host, waited)) for each, host in ((holder, "a"), (None, "b"), (None, "c"), (None, "c"))
        ]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(shared_folder, "holder_of", lambda folder: ["colonnade train", "a"])
    monkeypatch.setattr(shared_folder, "gather_texts", gathered)
    monkeypatch.setattr(shared_folder, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with pytest.raises(
        ConfigError, match=r"one folder: ranks 1-3 \(on b, c\) cannot see there what rank 0 \(on a\) has"
    ):
        shared_folder.check(load(config), Mesh().world)
    assert 60 < now[0] - 100 < 120


def test_a_run_looks_whether_its_folder_is_one_before_it_reads_its_data(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def refuse(*_: object) -> None:
        raise ConfigError("it is not one folder")

    monkeypatch.setattr(shared_folder, "check", refuse)
    monkeypatch.setattr(loop, "open_together", lambda *_: pytest.fail("it reads its data"))
    with pytest.raises(ConfigError, match="it is not one folder"):
        loop.main(load(config), lambda *_: pytest.fail("it introduces itself"))


def test_one_rank_is_one_machine(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("nobody is waited for"))
    shared_folder.check(load(config), Mesh().world)


@pytest.mark.parametrize("refuses", [False, True])
def test_the_lock_is_on_the_disk_before_others_look(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """A machine may keep what it has written to itself for half a minute. A file system may have no such call."""
    done, descriptors = list[str](), list[int]()

    def fsync(descriptor: int) -> None:
        descriptors.append(descriptor)
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        if refuses:
            raise OSError(errno.EINVAL, "Invalid argument")

    def gathered(mine: str, _: object) -> list[str]:
        done.append("a look")
        return [mine]

    monkeypatch.setattr(shared_folder.os, "fsync", fsync)
    monkeypatch.setattr(shared_folder, "gather_texts", gathered)
    with locked(tmp_path / "run", "colonnade train"):
        shared_folder.check(load(config), Mesh().world)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptors[0])
    assert done == ["lock", "a look"]
