"""The supervisor of ranks in this very process: who is to blame, what is said of it, and that nothing stays behind."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.launch import board, supervisor
from colonnade.launch.board import FolderBoard, explanation_file, how_ended, note_of_failure, report_file
from colonnade.launch.launch import run_on, run_ranks
from colonnade.launch.process import PASSED_ON
from colonnade.launch.supervisor import (
    CRASH,
    EXCEPTION,
    LATELY,
    MISTAKE,
    STUCK,
    UNFINISHED,
    USER_MISTAKE,
    WAIT,
    At,
    Failure,
    Supervisor,
    _killed,
    _Rank,
)

Make = Callable[..., _Rank]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Make]:
    """Makes a rank that has ended, or has not, and has said something."""
    with ExitStack() as files:

        def make(number: int, status: int | None, *, ended: float = 0.0, said: str = "", printed: str = "") -> _Rank:
            streams = []
            for name, text in (("output", printed), ("errors", said)):
                streams.append(files.enter_context((tmp_path / f"{name}{number}").open("w+b", buffering=0)))
                streams[-1].write(text.encode())
            note, process = note_of_failure(tmp_path, number), SimpleNamespace(pid=-1)
            return _Rank(number, process, streams[0] if number else None, streams[1], note, status, ended)  # type: ignore[arg-type]

        yield make


def of(folder: Path, *ranks: _Rank, **more: Any) -> Supervisor:
    return Supervisor([], len(ranks), folder, lambda number, pipe: {}, ranks=list(ranks), **more)


def test_a_cause_comes_before_its_consequences(rank: Make, tmp_path: Path) -> None:
    """Whichever rank it is, and whenever each has ended; of equals it is the first one's."""
    order = [
        rank(3, -signal.SIGKILL, ended=8.0),
        rank(5, -signal.SIGSEGV, ended=9.0),
        rank(1, USER_MISTAKE, ended=7.0),
        rank(2, USER_MISTAKE, ended=1.0),
        rank(6, 1, ended=3.0),
        rank(4, 1, ended=5.0),
        rank(0, STUCK, ended=2.0),
    ]
    for count, first in enumerate(order):
        assert of(tmp_path, *order[:count:-1], first, rank(9, 0), rank(8, None))._cause() is first
    assert [each.cause_order()[0] for each in order] == [CRASH] * 2 + [MISTAKE] * 2 + [EXCEPTION] * 2 + [WAIT]


def test_why_a_run_has_failed_is_one_line(rank: Make, tmp_path: Path) -> None:
    stuck, silent, raised = rank(1, STUCK), rank(2, STUCK), rank(3, 1)
    explanation_file(tmp_path, 1).write_text("rank 1 waits; rank 2 is busy\nrank 2 is busy\n\nThe last operations")
    raised.note.write_text(Failure(1.0, None, "ValueError: three is broken").to_json())
    for each, by_itself, words in (
        (stuck, True, "rank 1 waits; rank 2 is busy"),
        (silent, True, "rank 2 waited too long"),
        (raised, True, "rank 3 raised ValueError: three is broken"),
        (rank(4, 5), True, "rank 4 ended with exit status 5"),
        (rank(5, -signal.SIGKILL), True, "rank 5 was killed by signal 9 (SIGKILL), perhaps out of memory"),
        (rank(6, -signal.SIGKILL), False, "rank 6 was made to end"),
    ):
        assert of(tmp_path, each)._in_words(each, by_itself) == words


@pytest.mark.parametrize(("free", "is_told"), [(4_000, True), (10_000_000, False)])
def test_that_there_was_no_room_for_an_error_is_said_where_there_is_none(
    rank: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    is_told: bool,
) -> None:
    """Ranks' error streams are files in TMPDIR. One that has found room is shown, and nothing more; who was killed has
    said nothing."""
    monkeypatch.setattr(board.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    run, silent, heard, killed = tmp_path / "run", rank(0, 1), rank(1, 1, said="it broke\n"), rank(2, -9)
    lost = f"what it said found no room in {tmp_path} (TMPDIR)"
    words = of(run, silent)._in_words(silent, True)
    assert words == "rank 0 ended with exit status 1" + (f", and {lost}" if is_told else "")
    assert of(run, heard)._in_words(heard, True) == "rank 1 ended with exit status 1"
    for each, status, shown in (
        (silent, 1, f"rank 0: {lost}\n" * is_told),
        (heard, 1, "rank 1 failed with exit status 1:\nit broke\n"),
        (killed, -9, "rank 2 was killed by signal 9 (SIGKILL), perhaps out of memory\n"),
    ):
        of(run, each)._show_error(each, status)
        assert capsys.readouterr().err == shown


def test_a_signal_is_told_with_its_name() -> None:
    """And memory is blamed for that alone with which the system takes it back."""
    assert _killed(2, signal.SIGSEGV) == "rank 2 was killed by signal 11 (SIGSEGV)"
    assert (how_ended(-40), how_ended(0)) == ("killed by signal 40 (unnamed)", "ended with exit status 0")


LOST = "rank 1 was killed by signal 9 (SIGKILL), perhaps out of memory\n"
TOLD = "rank 0 waits; rank 1 left\nThe last of 0\n"


@pytest.mark.parametrize(
    ("status", "shown", "result"),
    [
        (-signal.SIGKILL, f"{LOST}it broke\n{TOLD}Run it again.\n", 137),
        (-signal.SIGTERM, "rank 1 was killed by signal 15 (SIGTERM)\nit broke\n", 143),
        (STUCK, f"{TOLD}Run it again.\n", STUCK),
        (3, "rank 1 failed with exit status 3:\nit broke\n", 3),
    ],
)
def test_what_is_shown_of_a_failure(
    rank: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, shown: str, result: int
) -> None:
    """What others say of it, and how to go on, where a rank was lost or has not come; and no empty line elsewhere."""
    explanation_file(tmp_path, 0).write_text("rank 0 waits; rank 1 left\n\nThe last of 0")
    lost = rank(1, status, said="it broke\n", printed="not shown")
    others = rank(0, STUCK, said="a consequence")
    assert of(tmp_path, others, lost, after_a_loss=lambda: "Run it again.")._show_cause(lost, status) == result
    assert capsys.readouterr().err == shown
    of(tmp_path, others, lost)._show_cause(lost, status)
    assert capsys.readouterr().err == shown.removesuffix("Run it again.\n")


def test_a_rank_that_waited_in_vain_is_named_though_nobody_could_explain(
    rank: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert of(tmp_path, lost := rank(1, STUCK))._show_cause(lost, STUCK) == STUCK
    assert capsys.readouterr().err == "rank 1 waited too long\n"


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("shown", ["", "a warning\n"])
def test_of_a_failure_that_is_shown_which_was_not_yet(
    rank: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: str, number: int
) -> None:
    """What rank 0 said before is on the terminal; of other ranks nothing is."""
    lost = rank(number, 3, said="a warning\nit broke\n", printed="not shown")
    lost.shown = len(shown)
    assert of(tmp_path, lost)._show_cause(lost, 3) == 3
    head = "rank 1 failed with exit status 3:\n" if number else ""
    assert capsys.readouterr().err == head + ("" if shown else "a warning\n") + "it broke\n"


@pytest.mark.parametrize("asked", [True, False])
def test_nobody_explains_the_end_of_a_run_that_was_asked_to_end(
    rank: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """By a second Ctrl-C ranks are killed: who looks at reports then has something to wait for."""
    awaited = list[str]()
    monkeypatch.setattr(Supervisor, "_await_explanations", lambda self: awaited.append("explanations"))
    run = of(tmp_path, rank(0, 0), rank(1, -signal.SIGKILL), asked=[signal.SIGINT, signal.SIGKILL] if asked else [])
    assert run._fail() == (130 if asked else 137) and awaited == ([] if asked else ["explanations"])


def test_what_rank_0_says_is_shown_once_and_in_order(
    rank: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = rank(0, None)
    run = of(tmp_path, first, rank(1, None))
    for text in ("one\n", "two\n", "three\n"):
        first.errors.write(text.encode())
        run._show_held(0.0)
        assert capsys.readouterr().err == "", "it is held back for a moment"
    seen = run.sizes[1][0]
    run._show_held(seen)
    assert capsys.readouterr().err == "one\ntwo\n"
    run._show_held(time.monotonic())
    assert capsys.readouterr().err == "three\n"
    first.errors.write(b"a consequence\n")
    run.ranks[1].status = 1
    run._show_held(time.monotonic() + 60)
    assert capsys.readouterr().err == ""


def test_a_run_that_is_to_be_started_again_says_so_whichever_rank_knows(rank: Make, tmp_path: Path) -> None:
    assert of(tmp_path, rank(0, 0), rank(1, UNFINISHED), rank(2, 0))._succeed() == UNFINISHED
    assert of(tmp_path, rank(0, 0), rank(1, 0))._succeed() == 0


@pytest.mark.parametrize(("last_report", "until"), [(None, 0.0), (0.5, 0.5 + LATELY), (9.0, supervisor.EXPLAIN)])
def test_a_rank_that_stands_still_itself_is_not_awaited(
    rank: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_report: float | None, until: float
) -> None:
    """One that reports has some seconds to explain itself."""
    now, report = [100.0], report_file(tmp_path, 0)
    run = of(tmp_path, rank(0, None), rank(1, STUCK))
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(seconds: float) -> None:
        now[0] += seconds
        if last_report is not None and now[0] <= 100.0 + last_report:
            os.utime(report, ns=(0, int(now[0] * 1e9)))

    if last_report is not None:
        report.touch()
    run.__dict__["_wait"] = wait
    run._await_explanations()
    assert now[0] - 100.0 == pytest.approx(until, abs=0.25)


@pytest.mark.parametrize(
    ("status", "stopping", "noted"),
    [
        *((0, False, False), (UNFINISHED, False, False), (128 + signal.SIGINT, False, False), (STUCK, False, False)),
        *((1, False, True), (-signal.SIGKILL, False, True), (-signal.SIGKILL, True, False)),
    ],
)
def test_who_waits_for_a_rank_that_has_ended_badly_is_told_how(
    rank: Make, tmp_path: Path, status: int, stopping: bool, noted: bool
) -> None:
    """And not of one that waited itself, ended as it was asked to, or was made to end: that explains nothing."""
    ended = rank(1, None)
    ended.process = SimpleNamespace(pid=-1, wait=lambda: status)  # type: ignore[assignment]
    run = of(tmp_path, ended, asked=[signal.SIGINT], stopping=stopping)
    run._await(ended)
    assert FolderBoard(tmp_path).ended() == ({1: how_ended(status)} if noted else {})
    assert (ended.status, run.events.get(timeout=10)) == (status, ended)


def test_the_end_of_a_rank_is_seen_though_it_cannot_be_written_down(rank: Make, tmp_path: Path) -> None:
    """As on a disk that is full."""
    ended = rank(1, None)
    ended.process = SimpleNamespace(pid=-1, wait=lambda: 3)  # type: ignore[assignment]
    run = of(tmp_path / "gone", ended)
    run._await(ended)
    assert (ended.status, run.events.get_nowait()) == (3, ended)


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_signal_that_is_refused_is_an_error_unless_the_rank_has_just_ended(
    has_ended: bool, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS refuses one to processes that have ended, until somebody has waited for them."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def wait(seconds: float) -> int:
        if has_ended:
            return 0
        raise subprocess.TimeoutExpired([], seconds)

    asked = rank(1, None)
    asked.process = SimpleNamespace(pid=-1, wait=wait)  # type: ignore[assignment]
    monkeypatch.setattr(os, "killpg", refuse)
    with nullcontext() if has_ended else pytest.raises(PermissionError):
        asked.send(signal.SIGTERM)


def test_ranks_are_waited_for_until_they_have_ended(rank: Make, tmp_path: Path) -> None:
    """By looking at what happens meanwhile: a signal may come."""
    ranks, waits = [rank(0, None), rank(1, None)], list[float]()
    run = of(tmp_path, *ranks)
    run.__dict__["_wait"] = lambda seconds: (waits.append(seconds), setattr(ranks[len(waits) % 2], "status", 0))
    run._wait_all(5.0)
    assert len(waits) == 2


# --- whole runs -------------------------------------------------------------------------------------------------------


def program(body: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time; rank = int(os.environ['RANK'])\n{body}"]


def held() -> tuple[int, str]:
    """Descriptors and processes of this process."""
    me = Path("/proc/self")
    return len(os.listdir(me / "fd")), (me / "task" / str(os.getpid()) / "children").read_text()


@pytest.mark.parametrize(
    ("body", "status", "cause"),
    [
        ("pass", 0, None),
        ("sys.exit(99 * rank)", UNFINISHED, None),
        ("sys.exit(3 * rank)", 3, (1, EXCEPTION, "rank 1 ended with exit status 3")),
        ("sys.exit(2 * rank)", 2, (1, MISTAKE, "rank 1 ended with exit status 2")),
        ("sys.exit(75 * rank)", 75, (None, WAIT, "rank 1 waited too long")),
        ("rank and os.kill(os.getpid(), signal.SIGKILL)", 137, (1, CRASH, LOST.strip())),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_how_a_run_has_ended_is_told_and_nothing_of_it_stays(
    body: str, status: int, cause: tuple[int | None, int, str] | None
) -> None:
    before, handlers, began = held(), [signal.getsignal(number) for number in PASSED_ON], time.monotonic()
    ended = run_on(range(2), program(body))
    assert (ended.status, ended.asked) == (status, 0)
    assert (ended.cause and (ended.cause.rank, ended.cause.order, ended.cause.said)) == cause
    assert ended.cause is None or began <= ended.cause.noticed <= time.monotonic()
    assert held() == before and [signal.getsignal(number) for number in PASSED_ON] == handlers


@pytest.mark.parametrize(("num_ranks", "blamed"), [(2, 1), (3, None)])
def test_not_who_waited_is_blamed_but_the_one_that_stands_still(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, blamed: int | None
) -> None:
    """Nobody, where that may be several."""
    monkeypatch.setattr(supervisor, "GRACE", 0.1)
    ended = run_on(range(num_ranks), program("rank or sys.exit(75)\ntime.sleep(60)"))
    assert (ended.cause and (ended.cause.rank, ended.cause.said)) == (blamed, "rank 0 waited too long")


def test_the_exit_status_of_a_rank_counts_where_that_of_processes_is_ignored() -> None:
    """As a parent that ignores SIGCHLD leaves it to all that it starts."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_on(range(2), program("sys.exit(3 * rank)")).status == 3
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_of_what_ranks_print_that_of_the_first_is_the_runs_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_on(range(2), program("print(f'rank {rank} speaks')")).status == 0
    assert capfd.readouterr().out == "rank 0 speaks\n"


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_is_asked_to_end_says_so(saves: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whether its ranks save first, or are ended by the signal, which is no error then."""
    heard = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))" if saves else ""
    asking = f"until [ -e '{tmp_path}/there' ]; do sleep 0.02; done; kill -TERM {os.getpid()}"
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the run has not heard it"))
    try:
        with subprocess.Popen(["sh", "-c", asking]):
            stays = "[time.sleep(0.05) for _ in range(1200)]"  # what comes just before a sleep is heard behind it
            ended = run_on([0], program(f"{heard}\nopen(r'{tmp_path}/there', 'w').close(); {stays}"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ended.status, ended.asked, capfd.readouterr().err) == (143, signal.SIGTERM, "")


def test_a_signal_that_comes_when_all_ranks_have_ended_is_left_to_who_has_started_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is left of them is tidied first."""
    close, heard = Supervisor.close, list[int]()
    monkeypatch.setattr(Supervisor, "close", lambda self: (signal.raise_signal(signal.SIGTERM), close(self)))
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    assert run_on([0], program("pass")) == supervisor.Ended(0, 0, None, [signal.SIGTERM]) and not heard
    assert run_ranks(1, program("pass")) == 0 and heard == [signal.SIGTERM]


def test_so_is_one_that_comes_while_the_folder_of_the_ranks_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = list[Path]()

    class Asked(tempfile.TemporaryDirectory[str]):
        def cleanup(self) -> None:
            folders.append(Path(self.name))
            signal.raise_signal(signal.SIGTERM)
            super().cleanup()

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Asked)
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("heard in between"))
    assert run_on([0], program("pass")) == supervisor.Ended(0, 0, None, [signal.SIGTERM])
    assert len(folders) == 1 and not folders[0].exists()


def test_what_is_to_be_done_after_some_seconds_is_done_once_or_until_it_asks_for_no_more(tmp_path: Path) -> None:
    """And not at all where the run has ended before."""
    done = list[float]()

    def do() -> At | None:
        done.append(time.monotonic())
        if len(done) == 1:
            return 0.3, do
        (tmp_path / "go").touch()
        return None

    body = f"while not os.path.exists(r'{tmp_path}/go'): time.sleep(0.01)\ntime.sleep(0.3)"
    began = time.monotonic()
    assert run_on([0], program(body), at=(0.2, do)) == supervisor.Ended(0, 0, None, [])
    assert len(done) == 2 and done[0] >= began + 0.2 and done[1] >= began + 0.3
    assert run_on([0], program("pass"), at=(600.0, do)).status == 0 and len(done) == 2


def test_a_run_goes_on_without_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks end with their supervisor by themselves."""
    start = Supervisor._start_guard

    def start_and_kill(self: Supervisor) -> None:
        start(self)
        assert self.guard is not None
        self.guard.kill()
        self.guard.wait()

    monkeypatch.setattr(Supervisor, "_start_guard", start_and_kill)
    assert run_on(range(2), program("pass")).status == 0
