"""What ranks say of themselves before they train: hardware once, failures once, and mistakes of single ranks."""

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.errors import ConfigError, DataError
from colonnade.launch import agreement, join, launch
from colonnade.launch.board import note_of_failure
from colonnade.launch.reporter import IN_ORDER
from colonnade.launch.supervisor import Failure
from colonnade.mesh.agreement import all_ranks, disagreements, gather_texts
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh
from colonnade.mesh.transport import TorchTransport
from tests.distributed import fork, run_on_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("fails", [False, True])
def test_torch_has_as_many_threads_as_before(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that opens a checkpoint goes on with its own."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "ask_for_queues", (lambda: {}["a key"]) if fails else lambda: None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(KeyError), join.joined(Layout(), "cpu", threads=1):
            assert torch.get_num_threads() == 1 and not fails
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def _told(rank: int, num_ranks: int, processors: list[str]) -> list[str]:
    lines: list[str] = []
    agreement.__dict__["print"] = lambda text, **_: lines.extend(text.splitlines())
    agreement.__dict__["hardware"] = lambda device: {"processor": processors[rank], "GPU": "none"}
    agreement.agree_on_program({"x": "1"}, CPU, build_mesh(Layout(dp=num_ranks), rank).world)
    return lines


def test_other_hardware_is_told_by_rank_0_and_stops_nobody() -> None:
    expected = [
        "The ranks have different hardware, whose rounding may differ:",
        "  processor: ranks 0 and 2 have AVX2, rank 1 has AVX512",
    ]
    assert run_on_ranks(_told, 3, ["AVX2", "AVX512", "AVX2"]) == [expected, [], []]
    assert run_on_ranks(_told, 2, ["AVX2", "AVX2"]) == [[], []]


def _made(rank: int, num_ranks: int, mistakes: list[str | None]) -> str:
    def make() -> int:
        if mistakes[rank] is not None:
            raise DataError(mistakes[rank])
        return rank

    try:
        return str(agreement.on_all_ranks(make, build_mesh(Layout(dp=num_ranks), rank).world))
    except (ConfigError, DataError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("mistakes", "said"),
    [
        ([None, None, None], ["0", "1", "2"]),
        (["é", "é", "é"], ["DataError: é"] * 3),
        ([None, "gone", None], ["ConfigError: rank 1: gone"] * 3),
        (["gone", None, "gone"], ["ConfigError: ranks 0 and 2: gone"] * 3),
        (["gone", "cut", "gone"], ["ConfigError: ranks 0 and 2: gone\nrank 1: cut"] * 3),
    ],
)
def test_a_mistake_of_any_rank_is_raised_on_all(mistakes: list[str | None], said: list[str]) -> None:
    assert run_on_ranks(_made, 3, mistakes) == said


def _read(rank: int, num_ranks: int, faults: list[int]) -> str:
    def read() -> int:
        if faults[rank]:
            raise OSError(faults[rank], os.strerror(faults[rank]), "/data")
        return rank

    try:
        return str(agreement.on_all_ranks(read, build_mesh(Layout(dp=num_ranks), rank).world))
    except (ConfigError, OSError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ([0, errno.EACCES], "ConfigError: rank 1: /data: Permission denied. Fix that, and run the command again."),
        ([0, errno.ENOSPC], "DiskError: rank 1: /data: No space left on device. Fix that, and run the command again."),
        ([errno.EACCES] * 2, "PermissionError: [Errno 13] Permission denied: '/data'"),
    ],
)
def test_so_is_what_the_disk_refuses_it(faults: list[int], said: str) -> None:
    assert run_on_ranks(_read, 2, faults) == [said] * 2


def _of_the_world(
    rank: int, num_ranks: int
) -> tuple[int, int, tuple[int, ...], list[str], dict[str, Any], bool, list[str]]:
    axis, group = all_ranks(), torch.distributed.new_group()
    apart = all_ranks(group)
    assert isinstance(apart.transport, TorchTransport)
    said, found = gather_texts(f"I am {rank}", axis), disagreements({"x": "1"}, axis)
    own = apart.transport.group is group
    return axis.rank, axis.size, tuple(axis.ranks), said, found, own, gather_texts(str(rank), apart)


def test_all_ranks_are_reached_before_there_is_a_mesh() -> None:
    """Whatever layout each of them believes in. In a group of its own what they say does not cross other operations."""
    said, apart = ["I am 0", "I am 1", "I am 2"], ["0", "1", "2"]
    assert run_on_ranks(_of_the_world, 3) == [(rank, 3, (0, 1, 2), said, {}, True, apart) for rank in range(3)]


def test_one_process_is_a_world_of_its_own() -> None:
    assert all_ranks() == Axis("world") and disagreements({"x": "1"}, all_ranks()) == {}


# --- joining ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the parts of joining are told, in their order."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(launch, "connect", lambda *given, **more: (found.update(connect=(given, more)), CPU)[1])
    monkeypatch.setattr(join, "agree_on_program", lambda properties, *_: found.update(agree=dict(properties)))
    monkeypatch.setattr(join, "build_mesh", lambda layout, rank, **more: (found.update(mesh=more), Mesh())[1])
    monkeypatch.setattr(launch, "note_failure", lambda error: found.update(failed=error))
    monkeypatch.setattr(launch, "disconnect", lambda: found.update(left=True))
    return found


def test_ranks_prove_that_they_have_one_layout_at_least(told: dict[str, Any]) -> None:
    with join.joined(Layout(tp=2, dp=3), "cpu"):
        assert list(told) == ["connect", "agree", "mesh"], "a wrong layout would make other groups"
    assert told["agree"] == {"layout": str(Layout(tp=2, dp=3))} and told["left"]
    with join.joined(Layout(tp=2), "cpu", properties={"train.seed": "1"}):
        assert told["agree"] == {"train.seed": "1"}


@pytest.mark.parametrize(("timeout", "together"), [(5.0, 600.0), (600.0, 600.0), (7_200.0, 7_200.0)])
def test_ranks_have_ten_minutes_to_come_together_however_short_their_patience(
    told: dict[str, Any], timeout: float, together: float
) -> None:
    """And whatever fails on its own does so after the watch, which can say for whom a rank waits."""
    with join.joined(Layout(tp=2), "auto", threads=3, timeout=timeout, deterministic=True):
        given, more = told["connect"]
        assert given == (2, "auto") and more.pop("timeout") > together
        assert more == {"threads": 3, "deterministic": True} and told["mesh"]["timeout"] > timeout


def test_no_wait_is_longer_than_can_be_counted(told: dict[str, Any]) -> None:
    """As of who writes 1e15 for never."""
    with join.joined(Layout(tp=2), "auto", timeout=1e15):
        assert told["mesh"] == {"timeout": told["connect"][1]["timeout"]} == {"timeout": pytest.approx(1e9)}


@pytest.mark.parametrize("supervised", [True, False])
def test_the_watch_is_told_what_the_rank_computes_on_and_whether_it_is_to_stay(
    told: dict[str, Any], monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    """A supervisor knows which ends are good."""
    monkeypatch.setattr(launch, "board", lambda: "a board")
    monkeypatch.setattr(launch, "has_supervisor", lambda: supervised)
    monkeypatch.setattr(launch, "neighbours", lambda: range(4, 8))
    monkeypatch.setattr(join, "Watch", lambda mesh, *given, **more: nullcontext(told.update(watch=(given, more))))
    with join.joined(Layout(tp=2), "cpu", timeout=7.0):
        given, more = told["watch"]
        assert given == (7.0, "a board", range(4, 8)) and more == {"device": CPU, "stays": not supervised}


def _leaves(rank: int, folder: Path, status: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    try:
        with join.joined(Layout(dp=2), "cpu", 1):
            if rank == 0:
                board = launch.board()
                while board is None or IN_ORDER not in (board.read(1) or ""):
                    time.sleep(0.01)
                time.sleep(1.5)  # in which a rank that does not stay is gone
                (folder / "gone").write_text(str((folder / "left").exists()))
            if status:
                raise SystemExit(status)
    finally:
        (folder / "left").touch()


@pytest.mark.parametrize("status", [0, 99])
def test_ranks_that_no_supervisor_watches_over_leave_in_order_with_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Torchrun takes the first that ends with 99 for a failure, and kills rank 0, which still uploads."""
    for name in (launch.FOLDER, launch.PIPE, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    ranks = [fork(_leaves, rank, tmp_path, status) for rank in range(2)]
    for each in ranks:
        each.join(60.0)
        each.kill()
    assert [each.exitcode for each in ranks] == [status] * 2
    assert (tmp_path / "gone").read_text() == "False" and (tmp_path / "left").exists()


def test_who_fails_says_so_before_the_others_lose_it(told: dict[str, Any]) -> None:
    with pytest.raises(ZeroDivisionError) as caught, join.joined(Layout(), "cpu"):
        raise ZeroDivisionError
    assert told["failed"] is caught.value and list(told)[-2:] == ["failed", "left"]


def _beside_ranks_of_its_own(rank: int, num_ranks: int) -> float:
    if rank == 0:
        with join.joined(Layout(), "cpu", 1) as (mesh, _):
            assert mesh.layout == Layout()
    total = torch.ones(())
    torch.distributed.all_reduce(total)
    return total.item()


def test_one_rank_of_a_program_that_nobody_launched_may_join_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a training of the program's own, which opens a checkpoint: the others know nothing of it."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run_on_ranks(_beside_ranks_of_its_own, 2, time_limit=20.0) == [2.0, 2.0]


# --- what a rank notes when it fails ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, value in {launch.FOLDER: str(tmp_path), "RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    yield tmp_path


def note(folder: Path) -> dict[str, Any] | None:
    path = note_of_failure(folder, 3)
    return json.loads(path.read_text()) if path.exists() else None


def test_the_first_failure_is_the_one_that_counts(folder: Path) -> None:
    """What is raised on the way out is a consequence."""
    for quiet in (None, KeyboardInterrupt(), SystemExit(2)):
        launch.note_failure(quiet)
    assert note(folder) is None
    launch.note_failure(DataError("the file is empty"))
    first = note(folder)
    assert first is not None and first["mistake"] == "the file is empty" and first["time"] > 0
    launch.note_failure(RuntimeError("connection lost"))
    assert note(folder) == first and [path.name for path in folder.iterdir()] == ["rank3.failed"]


def test_a_bug_is_noted_without_words(folder: Path) -> None:
    launch.note_failure(ZeroDivisionError("ours"))
    found = note(folder)
    assert found is not None and found["mistake"] is None and found["said"] == "ZeroDivisionError: ours"
    assert Failure(**found).to_json() == note_of_failure(folder, 3).read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n \nCUDA error: an illegal access\nCompile with", "CUDA error: an illegal access"),
        ("x" * 999, "x" * 300),
        ("", ""),
    ],
)
def test_an_error_is_noted_by_its_first_line(folder: Path, text: str, said: str) -> None:
    launch.note_failure(RuntimeError(text))
    found = note(folder)
    assert found is not None and found["said"] == f"RuntimeError: {said}"


def test_what_a_disk_may_get_over_is_noted_as_a_disk_error_whoever_raised_it(folder: Path) -> None:
    launch.note_failure(OSError(errno.EIO, "Input/output error", "/data"))
    found = note(folder)
    assert found is not None and found["said"] == "DiskError: [Errno 5] Input/output error: '/data'"


def test_an_error_stays_itself_where_it_cannot_be_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.FOLDER, str(folder / "gone"))
    launch.note_failure(DataError("x"))
    assert list(folder.iterdir()) == []


def test_nobody_is_told_where_nobody_asks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.FOLDER)
    launch.note_failure(DataError("x"))
    assert list(folder.iterdir()) == []
