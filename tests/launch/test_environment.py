"""What a process learns of its place from its environment."""

import os
import socket
import sys
from pathlib import Path

import pytest

from colonnade.errors import ConfigError, LayoutError
from colonnade.launch import launch
from colonnade.launch.devices import THREADS_A_CORE
from tests.commands import here
from tests.runs import Finished

HERE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", launch.FOLDER, launch.PIPE, "MASTER_ADDR")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """That of a user who has launched nothing yet."""
    for name in (*HERE, launch.STARTED):
        monkeypatch.setenv(name, "")  # so that what the test puts there goes with it
        monkeypatch.delenv(name)
    return monkeypatch


def put(environment: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        environment.setenv(name, str(value))


def test_one_process_alone(environment: pytest.MonkeyPatch) -> None:
    assert not launch.is_rank() and not launch.has_supervisor() and launch.speaks_first()
    assert (launch.rank_and_size(), launch.local_rank(), launch.num_local_ranks()) == ((0, 1), 0, 1)
    assert launch.neighbours() == range(1) and launch.board() is None


@pytest.mark.parametrize("rank", [0, 5])
def test_a_rank_of_torchrun(environment: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 0 introduces the run: nobody has before."""
    put(environment, RANK=rank, WORLD_SIZE=8, LOCAL_RANK=rank % 4, LOCAL_WORLD_SIZE=4)
    assert launch.is_rank() and not launch.has_supervisor() and launch.speaks_first() == (rank == 0)
    assert launch.neighbours() == range(rank // 4 * 4, rank // 4 * 4 + 4), "those of its machine"


@pytest.mark.parametrize("rank", [0, 4, 5])
def test_of_the_ranks_of_a_machine_those_count_that_are_at_work(environment: pytest.MonkeyPatch, rank: int) -> None:
    """All 4 of the first, 2 of the second, whichever of them asks."""
    told = list[tuple[object, int]]()
    environment.setattr(launch, "store_of_start", lambda *given: given)
    environment.setattr(launch.idle, "tell", lambda store, num_idle: told.append((store, num_idle)))
    put(environment, RANK=rank, WORLD_SIZE=8, LOCAL_RANK=rank % 4, LOCAL_WORLD_SIZE=4)
    launch.tell_idle()
    assert launch.use_first(6)
    assert launch.rank_and_size() == (rank, 6) and launch.neighbours() == (range(4) if rank < 4 else range(4, 6))
    launch.tell_idle()
    assert told == [((rank, 6, launch.idle.PATIENCE), 2)], "those that are told of the end, and no longer tried"


def test_a_run_that_has_ended_asks_no_store_that_is_gone(
    environment: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its machine, and with the idle ranks. Where there are none, nobody asks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        put(environment, RANK=0, WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=free.getsockname()[1])
    environment.setattr(launch.idle, "PATIENCE", 0.5)
    launch.tell_idle()
    assert "failed to connect" not in capfd.readouterr().err
    put(environment, **{launch.STARTED: 3})
    launch.tell_idle()
    assert "failed to connect" in capfd.readouterr().err


def test_a_rank_of_our_own_launcher(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher has spoken already."""
    given = launch._environment((0, 1, 2), tmp_path, False, 1, 9)
    assert (given["RANK"], given["WORLD_SIZE"], given["LOCAL_RANK"], given["LOCAL_WORLD_SIZE"]) == ("1", "3", "1", "3")
    for rank in (0, 1):
        for name in set(given := launch._environment((0, 1, 2), tmp_path, False, rank, 9)) & {
            *HERE,
            launch.FOLDER,
            launch.PIPE,
        }:
            environment.setenv(name, given[name])
        assert launch.is_rank() and launch.has_supervisor() and not launch.speaks_first()
        assert launch.rank_and_size() == (rank, 3) and launch.neighbours() == range(3)


@pytest.mark.parametrize(
    ("seen", "named"), [(None, "3,1"), ("", "3,1"), ("4,5,6,7", "7,5"), ("a,GPU-b,c,d", "d,GPU-b")]
)
def test_ranks_on_some_gpus_see_these_alone(
    environment: pytest.MonkeyPatch, tmp_path: Path, seen: str | None, named: str
) -> None:
    """By the names that the environment has for them; where nobody chooses, all that are seen."""
    environment.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    put(environment, **({} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}))
    for rank, place in enumerate(("3", "1")):
        given = launch._environment((3, 1), tmp_path, True, rank, 9)
        assert (given["CUDA_VISIBLE_DEVICES"], given[launch.PLACE], given["LOCAL_RANK"]) == (named, place, str(rank))
        assert launch._environment((3, 1), tmp_path, False, rank, 9).get("CUDA_VISIBLE_DEVICES") == seen


@pytest.mark.parametrize("loopback", ["lo", "lo0"])
@pytest.mark.parametrize("own", ["", "tun0"])
def test_ranks_of_one_machine_talk_over_its_loopback_unless_told_otherwise(
    environment: pytest.MonkeyPatch, tmp_path: Path, own: str, loopback: str
) -> None:
    """Which has another name on a Mac."""
    environment.setattr(launch.socket, "if_nameindex", lambda: [(1, "eth0"), (2, loopback)])
    environment.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if own:
        environment.setenv("GLOO_SOCKET_IFNAME", own)
    assert launch._environment((0,), tmp_path, False, 0, 9)["GLOO_SOCKET_IFNAME"] == (own or loopback)
    environment.setattr(launch.socket, "if_nameindex", lambda: [(1, "eth0")])
    assert launch._environment((0,), tmp_path, False, 0, 9).get("GLOO_SOCKET_IFNAME", "") == own


@pytest.mark.parametrize(
    ("name", "value"), [("LOCAL_RANK", "x"), ("LOCAL_RANK", "-1"), ("LOCAL_WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "")]
)
def test_an_environment_that_names_no_place_on_a_machine(
    environment: pytest.MonkeyPatch, name: str, value: str
) -> None:
    put(environment, RANK=0, WORLD_SIZE=1, **{name: value})
    with pytest.raises(LayoutError, match=f"^{name} = '{value}' in the environment is no whole number of "):
        launch.neighbours()


def test_what_a_supervisor_tells_its_ranks(tmp_path: Path) -> None:
    """What it was started with, when it began, and the fault before this start."""
    asks = "from colonnade.launch import launch; print(launch.file_of_start(), launch.began(), launch.last_fault())"
    told = tmp_path / "told"
    command = ["bash", "-c", f"exec {sys.executable} -c '{asks}' > {told}"]
    assert launch.run_on(range(1), command).status == 0
    assert told.read_text() == "None None None\n"
    assert launch.run_on(range(1), command, file="ö = 1", began=12.5, fault=(20.25, 7)).status == 0
    assert told.read_text() == "ö = 1 12.5 (20.25, 7)\n"
    assert (launch.file_of_start(), launch.began()) == (None, None)


def test_where_caches_lie(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("HOME", str(tmp_path))
    environment.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert launch.cache_folder() == tmp_path / "elsewhere" / "colonnade"
    environment.setenv("XDG_CACHE_HOME", "")
    environment.setattr(launch.sys, "platform", "linux")
    assert launch.cache_folder() == tmp_path / ".cache" / "colonnade"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    environment.setattr(Path, "home", homeless)
    assert launch.cache_folder() is None
    environment.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert launch.cache_folder() == tmp_path / "elsewhere" / "colonnade"


@pytest.mark.parametrize(
    ("told", "ranks", "threads"),
    [(None, 2, 3), (None, 9, 1), ("", 1, 6), ("1", 2, 1), ("4", 2, 4), ("2,1", 1, 2), ("0", 1, 6), ("many", 1, 6)],
)
def test_threads_are_those_of_openmp_or_a_share_of_the_cores(
    environment: pytest.MonkeyPatch, told: str | None, ranks: int, threads: int
) -> None:
    environment.setattr(launch, "num_cores", lambda: 6)
    environment.delenv(launch.OPENMP, raising=False)
    put(environment, **({} if told is None else {launch.OPENMP: told}))
    assert launch.num_threads(ranks) == threads


def test_threads_that_a_machine_does_not_start_are_refused(
    environment: pytest.MonkeyPatch, finished: Finished, tmp_path: Path
) -> None:
    environment.setattr(os, "cpu_count", lambda: 3)
    most = 3 * THREADS_A_CORE
    put(environment, OMP_NUM_THREADS=most)
    assert launch.checked_threads(0) == most == launch.checked_threads(most) and launch.checked_threads(1) == 1
    put(environment, OMP_NUM_THREADS=most + 1)
    with pytest.raises(
        ConfigError, match=rf"^{most + 1} CPU threads of a rank \(OMP_NUM_THREADS\) are more than 64 for"
    ):
        launch.checked_threads(0)
    for command in (
        ("generate", finished.folder, "--prompt", "tos", "--threads", 100000),
        ("train", finished.config, "train.threads=100000", f"run.folder={tmp_path}"),
    ):
        answer = here(*command)
        assert answer.status == 2 and "100,000 CPU threads of a rank (train.threads or --threads)" in answer.err, answer


@pytest.mark.parametrize(("told", "ranks", "threads"), [("1", 2, 3), ("2", 2, 2), ("1", 1, 1)])
def test_the_one_thread_that_torchrun_sets_is_nobodys_choice(
    environment: pytest.MonkeyPatch, told: str, ranks: int, threads: int
) -> None:
    environment.setattr(launch, "num_cores", lambda: 6)
    put(environment, RANK=0, WORLD_SIZE=ranks, TORCHELASTIC_RUN_ID="none", **{launch.OPENMP: told})
    assert launch.num_threads(ranks) == threads
