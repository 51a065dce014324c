"""Ranks that wait in vain say for whom, and end; ranks that do not are left alone."""

import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colonnade.launch import reporter
from colonnade.launch.board import Board, FolderBoard, StoreBoard, explanation_file, report_file
from colonnade.launch.explanation import Operation, Report, explain
from colonnade.launch.reporter import Reporter
from colonnade.launch.supervisor import STUCK
from colonnade.launch.watch import WaitTimer, Watch
from colonnade.mesh import shared_memory
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Flight, Ledger, Site
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.mesh.point_to_point import receive_
from colonnade.mesh.process import ProcessId
from tests.distributed import fork

LAYOUT = Layout(tp=2, dp=2)
LIMIT = 1.5  # seconds
BOARDS = [("folder", "shared memory"), ("store", "gloo")]
BOARDS_ONE_SLOW = [BOARDS[0], pytest.param(*BOARDS[1], marks=pytest.mark.slow)]
Program = Callable[[Mesh], None]


class Run:
    """Forked ranks under watch, in a folder that keeps what they say."""

    def __init__(self, folder: Path, program: Program, layout: Layout, board: str, carrier: str, limit: float) -> None:
        self.folder, self.board = folder, board
        self.ranks: list[BaseProcess] = [
            fork(_rank, folder, rank, program, layout, board, carrier, limit) for rank in range(layout.num_ranks)
        ]

    def kill(self, rank: int, number: int) -> None:
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def await_word(self, rank: int) -> None:
        """Until the rank has written its word (`say`)."""
        end = time.monotonic() + 30
        while not (self.folder / f"word{rank}").exists():
            assert time.monotonic() < end, "the rank did not come so far"
            time.sleep(0.01)

    def end(self, *ranks: int, seconds: float = 20.0) -> list[int | None]:
        """The exit status of these ranks, all of which end in time."""
        end = time.monotonic() + seconds
        for rank in ranks:
            self.ranks[rank].join(max(0.0, end - time.monotonic()))
        return [self.ranks[rank].exitcode for rank in ranks]

    def said(self, rank: int) -> str:
        file = explanation_file(self.folder, rank) if self.board == "folder" else self.folder / f"errors{rank}"
        return file.read_text() if file.exists() else ""

    def errors(self, rank: int) -> str:
        return (self.folder / f"errors{rank}").read_text()


@contextmanager
def started(
    program: Program,
    layout: Layout = LAYOUT,
    board: str = "folder",
    carrier: str = "shared memory",
    limit: float = LIMIT,
) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), program, layout, board, carrier, limit)
        try:
            yield run
        finally:
            for rank in run.ranks:
                rank.kill()
                rank.join()


def say(mesh: Mesh) -> None:
    Path(f"word{mesh.rank}").touch()


def _rank(folder: Path, rank: int, program: Program, layout: Layout, board: str, carrier: str, limit: float) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    os.dup2(os.open(f"errors{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if carrier == "gloo":
        shared_memory.is_possible = lambda: False
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size = layout.num_ranks
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    mesh = build_mesh(layout, rank)
    pinned: Board = FolderBoard(folder)
    if board == "store":
        pinned = StoreBoard(dist.FileStore(str(folder / "store"), size))  # type: ignore[attr-defined]
    with Watch(mesh, limit, pinned, range(size)):
        program(mesh)
    os._exit(0)  # without the exit handlers of the process that was forked


def steps_until(last: int, what: Callable[[], None], who: int) -> Program:
    """Ten-millisecond steps of a collective over tp and one over dp; in step `last` rank `who` does something else."""

    def program(mesh: Mesh) -> None:
        for step in range(1, 2000):
            mesh.ledger.begin_step(step)
            mesh.ledger.unit = "blocks.7"
            all_reduce(torch.ones(3), mesh.tp)
            if step == last and mesh.rank == who:
                say(mesh)
                what()
            all_reduce(torch.ones(3), mesh.dp)
            time.sleep(0.01)

    return program


def raise_signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def assert_explained(run: Run, reason: str) -> None:
    """In step 30 rank 2 does not come to dp, where rank 0 waits for it; 3 does, and waits for 2 over tp in step 31."""
    assert run.end(0, 1, 3) == [STUCK] * 3
    assert run.said(0).startswith("rank 0 [pp0 dp0 tp0] waits in all_reduce over dp for blocks.7 (step 30, ")
    assert f"; rank 2 [pp0 dp1 tp0] {reason}" in run.said(0).splitlines()[0]
    assert "rank 2 [pp0 dp1 tp0] " + reason in run.said(1)  # 1 waits for 0 or 3, and they for 2
    for rank in (0, 1, 3):
        assert f"The last operations of rank {rank} [pp0 dp{rank // 2} tp{rank % 2}], newest last:" in run.said(rank)
        assert run.said(rank).count("all_reduce over dp for blocks.7: 12 bytes, ") >= 2
        assert "Traceback" not in run.errors(rank)


@pytest.mark.parametrize(("board", "carrier"), BOARDS)
def test_a_killed_rank_ends_all_at_once(board: str, carrier: str) -> None:
    with started(steps_until(30, raise_signal(signal.SIGKILL), 2), board=board, carrier=carrier, limit=600) as run:
        assert_explained(run, "left step 30 (ended without a word)")


@pytest.mark.slow
@pytest.mark.parametrize(("board", "carrier"), BOARDS_ONE_SLOW)
def test_a_rank_that_stands_still_ends_all_after_the_limit(board: str, carrier: str) -> None:
    with started(steps_until(30, raise_signal(signal.SIGSTOP), 2), board=board, carrier=carrier) as run:
        assert_explained(run, "stands still in step 30")
        assert "The limit is train.timeout = 1.5 seconds." in run.said(0)
        if board == "store":  # no supervisor: nobody else would end it soon
            assert run.end(2) == [-signal.SIGKILL]


@pytest.mark.slow
@pytest.mark.parametrize(("board", "carrier"), BOARDS_ONE_SLOW)
def test_a_rank_that_raises_is_quoted(board: str, carrier: str) -> None:
    def fail() -> None:
        raise ValueError("two is broken\nbadly")

    with started(steps_until(30, fail, 2), board=board, carrier=carrier, limit=600) as run:
        assert_explained(run, "left step 30 (raised ValueError: two is broken)")
        assert run.end(2) == [1] and "ValueError: two is broken" in run.errors(2)


@pytest.mark.slow
def test_a_rank_that_is_busy_is_named_after_the_limit() -> None:
    with started(steps_until(30, lambda: time.sleep(60), 2)) as run:
        assert_explained(run, "is busy in step 30, after all_reduce over tp for blocks.7")


def test_ranks_that_wait_for_each_other() -> None:
    def program(mesh: Mesh) -> None:
        mesh.ledger.unit = "blocks.3"
        receive_(torch.ones(3), mesh.pp, 1 - mesh.pp.rank).wait()

    with started(program, Layout(pp=2)) as run:
        assert run.end(0, 1) == [STUCK] * 2
        first, second, circle, *_ = run.said(0).splitlines()
        assert first.startswith("rank 0 [pp0 dp0 tp0] waits in receive over pp from rank 1 for blocks.3 (")
        assert second.startswith("rank 1 [pp1 dp0 tp0] waits in receive over pp from rank 0 for blocks.3 (")
        assert circle == "They wait for each other: their programs disagree about what comes next."


def test_a_run_without_trouble_is_left_alone() -> None:
    def program(mesh: Mesh) -> None:
        for _ in range(4):
            time.sleep(0.3 * mesh.rank)  # waits that are longer than the limit in all, and shorter one by one
            all_reduce(torch.ones(3), mesh.tp)
        time.sleep(0.5 * mesh.rank)  # and one rank leaves long before the other

    with started(program, Layout(tp=2), limit=0.8) as run:
        assert run.end(0, 1) == [0, 0]
        assert run.said(0) == run.said(1) == run.errors(0) == run.errors(1) == ""


def test_time_in_which_the_whole_run_is_suspended_does_not_count() -> None:
    def program(mesh: Mesh) -> None:
        say(mesh)
        time.sleep(2.0 * mesh.rank)
        all_reduce(torch.ones(3), mesh.tp)

    with started(program, Layout(tp=2), limit=3.0) as run:
        run.await_word(0), run.await_word(1)
        time.sleep(0.5)  # rank 0 waits by now, and is seen to
        for number, pause in ((signal.SIGSTOP, 4.0), (signal.SIGCONT, 0.0)):
            for rank in (0, 1):
                run.kill(rank, number)
            time.sleep(pause)
        assert run.end(0, 1) == [0, 0]


def test_other_errors_are_errors() -> None:
    """What is wrong with the program, not with a connection, is raised at once."""

    def program(mesh: Mesh) -> None:
        with pytest.raises(RuntimeError, match="must have the same"):
            mesh.ledger.wait(mesh.ledger.entries[-1] if mesh.ledger.entries else None, _wrong)  # type: ignore[arg-type]
        assert mesh.ledger.waiting is None

    def _wrong() -> None:
        raise RuntimeError("tensors must have the same number of elements")

    with started(program, Layout(tp=2)) as run:
        begin = time.monotonic()
        assert run.end(0, 1) == [0, 0] and time.monotonic() - begin < 10


def test_a_lost_connection_is_explained_with_what_the_transport_said() -> None:
    def program(mesh: Mesh) -> None:
        def lost() -> None:
            raise RuntimeError("[/deep/pair.cc:547] Connection closed by peer [10.0.0.2]:1234. Good luck")

        with suppress(RuntimeError):
            mesh.ledger.wait(mesh.ledger.open("all_reduce", "tp", torch.ones(1), Site("here.py:1")), lost)
        os._exit(7)

    with started(program, Layout(tp=2)) as run:
        assert run.end(0, 1) == [STUCK] * 2
        assert "Connection closed by peer [10.0.0.2]:1234); all that take part have come" in run.said(0)


class LostBoard:
    """A board that is gone: refused, or never answering."""

    tick = 0.05

    def __init__(self, answer: Callable[[], None]) -> None:
        self.answer = answer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: False if name == "explain" else self.answer()


def refuse() -> None:
    raise RuntimeError("Broken pipe")


@pytest.mark.parametrize(
    ("answer", "why"),
    [(refuse, "Broken pipe"), (lambda: threading.Event().wait(), "no answer in 0.5 seconds")],
    ids=["refused", "hanging"],
)
def test_a_lost_board_does_not_keep_a_rank(answer: Callable[[], None], why: str) -> None:
    def alone(folder: str) -> None:
        torch.set_num_threads(1)
        os.dup2(os.open(f"{folder}/errors", os.O_CREAT | os.O_WRONLY), 2)
        reporter._GATHER = 0.5
        mesh = paper_mesh(Layout(tp=2), 0)
        with Watch(mesh, 0.3, LostBoard(answer), (0, 1)):  # type: ignore[arg-type]
            entry = mesh.ledger.open("all_reduce", "tp", torch.ones(1), Site("here.py:1"))
            mesh.ledger.wait(entry, lambda: time.sleep(60))

    with tempfile.TemporaryDirectory() as folder:
        process = fork(alone, folder)
        process.join(15)
        process.kill()
        said = Path(folder, "errors").read_text()
        assert process.exitcode == STUCK
        assert "rank 0 [pp0 dp0 tp0] waits in all_reduce over tp (" in said and "; rank 1 has not come\n" in said
        assert f"The other ranks' reports cannot be read ({why}): this is what is known." in said
        assert "\nThe limit is train.timeout = 0.3 seconds.\n" in said


def test_a_rank_that_cannot_write_what_it_waits_for_leaves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full."""
    ended = list[int]()
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(reporter, "_GATHER", 0.0)
    Watch(paper_mesh(Layout(tp=2), 0), 0.3, FolderBoard(tmp_path / "gone"))._end()
    assert ended == [STUCK]


class Work:
    """An operation on a device that a test decides about."""

    done = False
    ready = True

    def query(self) -> bool:
        return self.ready

    def is_completed(self) -> bool:
        return self.done

    @property
    def over(self) -> "Over":
        return Over(self)


@dataclass
class Over:
    """The event at the end of a work."""

    work: Work

    def query(self) -> bool:
        return self.work.done


def flights(ledger: Ledger, count: int) -> list[Work]:
    works = [Work() for _ in range(count)]
    for work in works:
        entry = ledger.open("all_reduce", "tp", torch.ones(1), Site("here.py:1"))
        ledger.flying.append(Flight(entry, work, work.over))
    return works


def test_on_a_device_the_oldest_operation_that_could_be_done_and_is_not_is_waited_for() -> None:
    ledger = Ledger()
    timer = WaitTimer(ledger)
    first, second = flights(ledger, 2)
    assert timer.tick(1.0) == (None, 0.0)  # just begun
    assert [timer.tick(1.0)[1] for _ in range(3)] == [0.0, 1.0, 2.0]
    flights(ledger, 1)
    assert timer.tick(1.0) == (None, 0.0)  # the program goes on, so nothing hangs yet
    first.done = True
    second.ready = False  # the device is still computing what goes into it
    assert timer.tick(1.0) == (None, 0.0) and len(ledger.flying) == 2
    second.ready = True
    entry, waited = timer.tick(1.0)
    assert entry is not None and (entry.number, waited) == (2, 0.0)
    assert timer.tick(1.0)[1] == 1.0


def test_what_the_program_has_not_waited_for_counts_until_the_device_has_done_it() -> None:
    """As the gather that ends a step, while the program waits for a save."""
    ledger, gather = Ledger(), Work()
    timer = WaitTimer(ledger)
    entry = ledger.open("all_gather", "dp", torch.ones(1), Site("here.py:1"))
    ledger.flying.append(Flight(entry, gather, work=weakref.ref(gather)))
    assert [timer.tick(1.0) for _ in range(3)] == [(None, 0.0), (entry, 0.0), (entry, 1.0)]
    gather.done = True
    assert timer.tick(1.0) == (None, 0.0) and not ledger.flying
    flights(ledger, 1)
    timer.tick(1.0), timer.tick(1.0)
    assert timer.tick(1.0) == (ledger.entries[-1], 1.0), "and what hangs behind it is told by its own name"


def test_a_wait_is_counted_from_its_own_beginning() -> None:
    ledger = Ledger()
    timer = WaitTimer(ledger)
    entry = ledger.open("all_reduce", "tp", torch.ones(1), Site("here.py:1"))
    seen = []
    for _ in range(2):
        ledger.wait(entry, lambda: seen.extend(timer.tick(1.0) for _ in range(3)))
    assert seen == [(entry, seconds) for seconds in (0.0, 1.0, 2.0)] * 2 and timer.tick(1.0) == (None, 0.0)


def test_failures_are_no_ones_business_after_the_watch(tmp_path: Path) -> None:
    mesh = paper_mesh(Layout(tp=2), 0)
    before = mesh.ledger.on_failure
    with Watch(mesh, 5.0, FolderBoard(tmp_path)):
        assert mesh.ledger.on_failure is not before
    assert mesh.ledger.on_failure is before
    assert Report.from_json(report_file(tmp_path, 0).read_text()).left == reporter.IN_ORDER


@pytest.mark.parametrize("device", [torch.device("cuda", 3), torch.device("cpu")], ids=str)
def test_the_watch_looks_at_the_gpu_of_its_own_rank(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins on the first one, where each question would take memory."""
    told = list[tuple[str, torch.device]]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda to: told.append((threading.current_thread().name, to)))
    with Watch(paper_mesh(Layout(tp=2), 0), 5.0, FolderBoard(tmp_path), device=device):
        pass
    assert told == ([("watch", device)] if device.type == "cuda" else [])


def test_the_peer_of_a_transfer_is_told_by_its_rank(tmp_path: Path) -> None:
    """The ledger has its number on the axis."""
    mesh = paper_mesh(Layout(tp=2, pp=3), 3)
    mesh.ledger.open("receive", "pp", torch.ones(1), Site("here.py:1"), peer=2)
    (told,) = Watch(mesh, 5.0, FolderBoard(tmp_path))._describe("", False).recent
    assert told.peer == 5


def test_a_report_tells_the_last_operations_newest_last_and_how_many_came_before_the_step(tmp_path: Path) -> None:
    mesh = paper_mesh(Layout(tp=2), 0)
    for step in (1, 2, 3):
        mesh.ledger.begin_step(step)
        for _ in range(3):
            all_reduce(torch.ones(1), mesh.tp)
    told = Watch(mesh, 5.0, FolderBoard(tmp_path))._describe("", False)
    assert [each.number for each in told.recent] == [4, 5, 6, 7, 8, 9]
    assert (told.step, told.numbers, told.step_numbers) == (3, {"tp": 9}, {"tp": 6})


def test_a_wait_for_stages_that_share_a_weight_names_them(tmp_path: Path) -> None:
    """A stage may share one weight with its left neighbour and another with its right one."""
    mesh = paper_mesh(Layout(tp=2, pp=3), 2)
    for stages in ([0, 1], [1, 2]):
        all_reduce(torch.ones(1), mesh.holders(stages))
    watch = Watch(mesh, 5.0, FolderBoard(tmp_path))
    watch._waiting = mesh.ledger.entries[-1], 1.0
    told = watch._describe("", False)
    assert told.waiting is not None and told.waiting_ranks == (2, 4)
    assert told.numbers == {"holders 0,1": 1, "holders 1,2": 1}


def test_after_an_alarm_a_rank_reports_at_every_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that lives could seem to stand still, in the second in which the others read."""

    class Counting(FolderBoard):
        posts = 0

        def post(self, rank: int, report: str) -> None:
            self.posts += 1

    monkeypatch.setattr(reporter, "_POST", 600.0)
    board, told = Counting(tmp_path), []
    report = Report(0, "[]", 3, None, (), 0.0, "", {}, {}, (), ProcessId("here", 1, ""))
    mine = Reporter([0, 1], 0, board, lambda left, explained: report, [])
    for look in range(6):
        if look == 3:
            board.raise_alarm()  # seen at the end of this look
        mine._round()
        told.append(board.posts)
    assert told == [1, 1, 1, 1, 2, 3]


def test_what_a_rank_says_last_counts_though_it_ended_while_reports_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 explains and ends between being read and being looked for: that is no end without a word."""
    process = ProcessId("here", 1, "")

    def report(rank: int, explained: bool) -> Report:
        return Report(rank, "[]", 3, None, (), 0.0, "", {}, {}, (), process, explained=explained)

    class Late(FolderBoard):
        tick, reads = 0.0, 0

        def read(self, rank: int) -> str:
            self.reads += 1
            return report(rank, explained=self.reads > 2).to_json()

    monkeypatch.setattr(reporter, "has_ended", lambda _: True)
    monkeypatch.setattr(reporter, "_SETTLE", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        mine = Reporter([0, 1], 1, Late(Path(folder)), lambda left, explained: report(1, explained), [])
        mine.start()
        picture = mine.gather()
        mine.stop(reporter.IN_ORDER)
    assert mine.gone == {} and picture.gone == {} and picture.reports[0].explained


def test_of_a_large_run_the_reports_along_the_way_to_the_cause_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits over tp for rank 1, which waits over pp for rank 70."""

    def report(rank: int, axis: str = "", *others: int) -> Report:
        waiting = Operation("all_reduce", axis, "", False, 4, "here.py:1", 1) if others else None
        return Report(rank, "[]", 3, waiting, others, 0.0, "", {}, {}, (), ProcessId("here", 1, ""))

    told = {0: report(0, "tp", 0, 1), 1: report(1, "pp", 1, 70), 2: report(2), 70: report(70)}

    class Alive(FolderBoard):
        tick, beat = 0.0, 0

        def read(self, rank: int) -> str | None:
            self.beat += 1
            return replace(told[rank], beat=self.beat).to_json() if rank in told else None

    monkeypatch.setattr(reporter, "has_ended", lambda _: False)
    monkeypatch.setattr(reporter, "_SETTLE", 0.0)
    mine = Reporter(range(100), 0, Alive(tmp_path), lambda left, explained: told[0], [])
    mine.start()
    picture = mine.gather()
    mine.stop(reporter.IN_ORDER)
    assert picture.reports.keys() == {0, 1, 70}
    assert "; rank 70 [] is busy in step 3\n" in explain(0, picture)
