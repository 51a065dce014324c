"""Launching: what is shown, what is stopped, what is left behind. The ranks are small programs, most without torch."""

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.errors import LayoutError
from colonnade.launch import launch
from colonnade.launch.board import report_file
from colonnade.launch.supervisor import USER_MISTAKE, Failure, Supervisor, _Rank
from tests.distributed import run_on_ranks

PRELUDE = """
import os, pathlib, signal, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def live():  # says that this rank runs
    pathlib.Path(sys.argv[1], str(rank)).write_text(str(os.getpid()))
def await_all():
    live()
    while len(os.listdir(sys.argv[1])) < size:
        time.sleep(0.01)
def stay():  # a minute, or until a signal: one that comes just before a sleep is heard behind it alone
    for _ in range(1200):
        time.sleep(0.05)
"""
LIGHT = "from colonnade.launch import fork_server; fork_server.TORCH = 'json'"
"""Ranks here import no torch, or import it themselves."""
SUPERVISOR = (
    f"import sys; from colonnade.launch.launch import run_ranks; {LIGHT}; sys.exit(run_ranks({{}}, sys.argv[1:]))"
)
forks = True


@pytest.fixture(autouse=True, params=["forked", "new"])
def _started(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of ranks holds however they are started: a module is forked, a program is not."""
    monkeypatch.setitem(globals(), "forks", request.param == "forked")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def rank_command(folder: Path, body: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    program = PRELUDE + textwrap.dedent(body)
    if not forks:
        return [sys.executable, "-c", program, str(folder)]
    module = folder.with_name(f"body_of_{folder.name}.py")
    module.write_text(program)
    return [sys.executable, "-m", module.stem, str(folder)]


def start(num_ranks: int, folder: Path, body: str, **options: object) -> "subprocess.Popen[str]":
    """A supervisor with its ranks, in a process of its own."""
    command = [sys.executable, "-c", SUPERVISOR.format(num_ranks), *rank_command(folder, body)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, **streams)  # type: ignore[call-overload, no-any-return]


def run_to_end(num_ranks: int, folder: Path, body: str) -> tuple[int, str, str, float]:
    begin = time.monotonic()
    process = start(num_ranks, folder, body)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors, time.monotonic() - begin


def pids(folder: Path, num_ranks: int) -> list[int]:
    """The ranks' process ids, once all of them run."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        texts = [path.read_text() for path in folder.glob("*")] if folder.exists() else []
        if len(texts) == num_ranks and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError("the ranks did not start")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def assert_gone(numbers: list[int], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while any(map(is_alive, numbers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [number for number in numbers if is_alive(number)]


def test_only_rank_0_is_heard(tmp_path: Path) -> None:
    body = "print('hello from', rank, 'of', size); print('warning', rank, file=sys.stderr)"
    status, output, errors, _ = run_to_end(3, tmp_path / "r", body)
    assert (status, output, errors) == (0, "hello from 0 of 3\n", "warning 0\n")


def test_rank_0_has_the_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start(2, tmp_path / "r", "print(sys.stdout.isatty(), rank)", stdout=theirs)
    assert process.wait(30) == 0
    assert os.read(ours, 100).decode().strip() == "True 0"
    process.communicate()
    os.close(ours)
    os.close(theirs)


def test_rank_0_has_the_input_and_no_other_rank_has_one(tmp_path: Path) -> None:
    body = "read = sys.stdin.read()\npathlib.Path(sys.argv[1], f'{rank}.read').write_text(repr(read))"
    process = start(2, tmp_path / "r", body, stdin=subprocess.PIPE)
    output, errors = process.communicate("a line\n", timeout=60)
    assert (process.returncode, output, errors) == (0, "", "")
    assert [(tmp_path / "r" / f"{rank}.read").read_text() for rank in (0, 1)] == ["'a line\\n'", "''"]


def test_rank_0s_warnings_are_shown_while_it_runs(tmp_path: Path) -> None:
    process = start(2, tmp_path / "r", "print('careful', file=sys.stderr, flush=True); live(); stay()")
    assert process.stderr is not None
    assert process.stderr.readline() == "careful\n"
    process.terminate()
    process.communicate(timeout=10)


def test_the_failing_ranks_error_is_shown_whole_and_the_others_are_stopped(tmp_path: Path) -> None:
    body = """
        await_all()
        if rank == 2:
            print("x" * 100_000, file=sys.stderr)
            raise ValueError("two is broken")
        time.sleep(60)
    """
    status, _, errors, seconds = run_to_end(4, tmp_path / "r", body)
    assert status == 1 and seconds < 8
    assert errors.startswith("rank 2 failed with exit status 1:\n" + "x" * 100_000)
    assert errors.endswith("ValueError: two is broken\n")
    assert_gone(pids(tmp_path / "r", 4))


@pytest.mark.parametrize("noise", ["", "print(file=sys.stderr)"], ids=["nothing", "an empty line"])
def test_what_a_rank_printed_is_shown_where_its_error_stream_says_nothing(tmp_path: Path, noise: str) -> None:
    """Of other ranks than rank 0 the output is not seen otherwise."""
    body = f"""
    if rank == 1:
        print("the disk is gone", flush=True)
        {noise or "pass"}
        sys.exit(1)
    time.sleep(600)
    """
    status, _, errors, _ = run_to_end(2, tmp_path / "ranks", body)
    assert status == 1 and errors == "rank 1 failed with exit status 1:\nthe disk is gone\n"


def test_a_rank_that_ignores_being_stopped_is_killed(tmp_path: Path) -> None:
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await_all()
        time.sleep(60 * (rank != 1))
        sys.exit("gone")
    """
    status, _, errors, seconds = run_to_end(2, tmp_path / "r", body)
    assert (status, errors) == (1, "rank 1 failed with exit status 1:\ngone\n") and seconds < 9
    assert_gone(pids(tmp_path / "r", 2))


def test_a_mistake_that_all_ranks_report_is_shown_once(tmp_path: Path) -> None:
    status, _, errors, seconds = run_to_end(3, tmp_path / "r", "print('tp = 3 is odd', file=sys.stderr); sys.exit(2)")
    assert (status, errors) == (2, "tp = 3 is odd\n") and seconds < 5


def test_a_users_mistake_on_one_rank_comes_before_its_consequences(tmp_path: Path) -> None:
    body = """
        await_all()
        if rank == 1:
            print("the file is empty", file=sys.stderr, flush=True)
            time.sleep(0.3)  # slower to end than those that lose their connection to it
            sys.exit(2)
        raise RuntimeError("connection reset")
    """
    status, _, errors, _ = run_to_end(3, tmp_path / "r", body)
    assert (status, errors) == (2, "the file is empty\n")


def test_a_users_mistake_is_one_however_long_the_rank_takes_to_end(tmp_path: Path) -> None:
    """On a busy machine a rank ends seconds after those that lost their connection to it, whoever they are."""
    body = """
        from colonnade.errors import DataError
        from colonnade.launch import launch
        await_all()
        if rank == 1:
            launch.note_failure(DataError("the file is empty"))
            live_on = time.monotonic() + 8
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while time.monotonic() < live_on:
                time.sleep(0.1)
            sys.exit("never")
        time.sleep(0.5)
        raise RuntimeError("connection reset")
    """
    status, _, errors, _ = run_to_end(3, tmp_path / "r", body)
    assert (status, errors) == (2, "colonnade: the file is empty\n")


def test_a_mistake_that_a_rank_tells_late_comes_before_those_who_waited(tmp_path: Path) -> None:
    body = """
        from colonnade.errors import DataError
        from colonnade.launch import launch
        report(), await_all()
        if rank == 0:
            explain("rank 0 waits; rank 1 is busy")
        for _ in range(6):  # longer than a failure is given that needs no explanation
            report(), time.sleep(0.3)
        launch.note_failure(DataError("the file is empty"))
        print("colonnade: the file is empty", file=sys.stderr)
        sys.exit(2)
    """
    status, _, errors, _ = run_to_end(2, tmp_path / "r", EXPLAINING + textwrap.dedent(body))
    assert (status, errors) == (2, "colonnade: the file is empty\n")


@pytest.mark.slow
def test_after_a_loss_it_is_said_how_to_go_on(tmp_path: Path) -> None:
    program = SUPERVISOR.replace("sys.argv[1:])", "sys.argv[1:], after_a_loss=lambda: 'Run it again.')").format(2)
    bodies = {
        "await_all(); rank and os.kill(os.getpid(), signal.SIGKILL); time.sleep(0.1); sys.exit('lost')": True,
        "await_all(); rank and os._exit(75); time.sleep(9)": True,
        "await_all(); rank and sys.exit('broken'); time.sleep(9)": False,
    }
    for number, (body, told) in enumerate(bodies.items()):
        command = [sys.executable, "-c", program, *rank_command(tmp_path / str(number), body)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert answer.stderr.endswith("\nRun it again.\n" if body.count("SIGKILL") else "Run it again.\n") == told, (
            answer
        )


def test_a_killed_rank_is_named_with_the_signal(tmp_path: Path) -> None:
    body = """
        await_all()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        raise RuntimeError("connection reset")
    """
    status, _, errors, _ = run_to_end(3, tmp_path / "r", body)
    assert (status, errors) == (137, "rank 1 was killed by signal 9 (SIGKILL), perhaps out of memory\n")


EXPLAINING = """
def explain(*lines):
    path = pathlib.Path(os.environ["COLONNADE_LAUNCH_FOLDER"], f"rank{rank}")
    path.with_suffix(".explanation").write_text("\\n".join([*lines, "", f"The last of {rank}"]))
    print("consequence", file=sys.stderr)
    os._exit(75)
def await_end_of(other):
    note = pathlib.Path(os.environ["COLONNADE_LAUNCH_FOLDER"], f"rank{other}.ended")
    while not note.exists():
        time.sleep(0.01)
    return note.read_text()
def report():
    pathlib.Path(os.environ["COLONNADE_LAUNCH_FOLDER"], f"rank{rank}.report").write_text("here")
"""


def test_a_killed_rank_is_followed_by_the_explanations_of_the_others(tmp_path: Path) -> None:
    body = """
        report(), await_all()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        how = await_end_of(1)
        for _ in range(4 * rank):  # longer than a failure is given that needs no explanation
            report(), time.sleep(0.3)
        explain(f"rank {rank} waits; rank 1 left ({how})", "A note.")
    """
    status, _, errors, seconds = run_to_end(3, tmp_path / "r", EXPLAINING + textwrap.dedent(body))
    assert status == 137 and seconds < 8
    assert errors == (
        "rank 1 was killed by signal 9 (SIGKILL), perhaps out of memory\n"
        "rank 0 waits; rank 1 left (killed by signal 9 (SIGKILL))\n"
        "rank 2 waits; rank 1 left (killed by signal 9 (SIGKILL))\n"
        "A note.\nThe last of 0\nThe last of 2\n"
    )


def test_ranks_that_have_waited_too_long_are_all_there_is_to_show(tmp_path: Path) -> None:
    """Rank 1 stands still: it has not reported lately, so nothing is awaited from it, and it is killed at once."""
    body = """
        report(), await_all()
        time.sleep(3.5)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        explain(f"rank {rank} waits; rank 1 stands still")
    """
    status, _, errors, seconds = run_to_end(2, tmp_path / "r", EXPLAINING + textwrap.dedent(body))
    assert (status, errors) == (75, "rank 0 waits; rank 1 stands still\nThe last of 0\n") and seconds < 8
    assert_gone(pids(tmp_path / "r", 2))


def test_an_error_is_shown_without_what_others_say_of_it(tmp_path: Path) -> None:
    body = """
        report(), await_all()
        if rank == 1:
            time.sleep(0.5)  # slower to end than who waits for it
            sys.exit("one is broken")
        explain("rank 0 waits; rank 1 left")
    """
    status, _, errors, _ = run_to_end(2, tmp_path / "r", EXPLAINING + textwrap.dedent(body))
    assert (status, errors) == (1, "rank 1 failed with exit status 1:\none is broken\n")


def test_a_failure_of_rank_0_is_shown_once(tmp_path: Path) -> None:
    body = "await_all(); time.sleep(0.2 * rank); sys.stderr.write('before\\n'); assert rank, 'zero is broken'"
    status, _, errors, _ = run_to_end(2, tmp_path / "r", body)
    assert status == 1
    assert errors.count("AssertionError: zero is broken") == 1
    assert errors.count("before\n") == 1 and "rank" not in errors.splitlines()[0]


def test_ctrl_c_lets_the_ranks_save(tmp_path: Path) -> None:
    body = """
        def save(*_):
            time.sleep(2.5 - rank)  # at different speeds, and longer than a failure would be given
            print("saved", rank)
            sys.exit(130)
        signal.signal(signal.SIGINT, save)
        live()
        stay()
    """
    process = start(2, tmp_path / "r", body)
    pids(tmp_path / "r", 2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, output, errors) == (130, "saved 0\n", "")


def test_ctrl_c_before_the_ranks_are_ready_shows_no_traceback(tmp_path: Path) -> None:
    process = start(2, tmp_path / "r", "live(); stay()")
    numbers = pids(tmp_path / "r", 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (130, "")
    assert_gone(numbers)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    process = start(
        2, tmp_path / "r", "signal.signal(signal.SIGINT, lambda *_: None); live(); [time.sleep(9) for _ in range(9)]"
    )
    numbers = pids(tmp_path / "r", 2)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, errors = process.communicate(timeout=5)
    assert (process.returncode, errors) == (130, "")
    assert_gone(numbers)


def test_ranks_inherit_what_they_are_to_keep(tmp_path: Path) -> None:
    """A lock, for one, which then ends with the last of them."""
    program = (
        "import os, sys; from colonnade.launch.launch import run_ranks; kept = os.open(sys.argv[-1], os.O_RDONLY)\n"
        "sys.exit(run_ranks(2, [*sys.argv[1:-1], str(kept), sys.argv[-1]], keep=[kept]))"
    )
    body = "import os, sys; assert os.path.samestat(os.fstat(int(sys.argv[1])), os.stat(sys.argv[2]))"
    command = [sys.executable, "-c", program, sys.executable, "-c", body, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_sigterm_is_passed_on(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, lambda *_: (print('bye', rank), sys.exit(0))); live(); stay()"
    process = start(2, tmp_path / "r", body)
    pids(tmp_path / "r", 2)
    process.terminate()
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, output, errors) == (0, "bye 0\n", "")


def test_sighup_is_passed_on_as_itself(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGHUP, lambda *_: (print('bye', rank), sys.exit(129))); live(); stay()"
    process = start(2, tmp_path / "r", body)
    pids(tmp_path / "r", 2)
    process.send_signal(signal.SIGHUP)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (129, "bye 0\n", "")


IGNORING = """
import os, signal, sys
signal.signal({0}, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_ctrl_c_is_heard_where_a_script_started_the_run_in_the_background(tmp_path: Path) -> None:
    """A shell without job control has such processes ignore SIGINT; the supervisor hears it, and so do its ranks."""
    command = [
        *(sys.executable, "-c", IGNORING.format("signal.SIGINT"), "-c", SUPERVISOR.format(2)),
        *rank_command(tmp_path / "r", "print(signal.getsignal(signal.SIGINT)); live(); stay()"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    numbers = pids(tmp_path / "r", 2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "") and "default_int_handler" in output
    assert_gone(numbers)


def test_nohup_stays_in_force(tmp_path: Path) -> None:
    body = "live(); time.sleep(1.5); print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    command = [sys.executable, "-c", IGNORING.format("signal.SIGHUP"), "-c", SUPERVISOR.format(2)]
    process = subprocess.Popen(
        [*command, *rank_command(tmp_path / "r", body)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids(tmp_path / "r", 2)
    process.send_signal(signal.SIGHUP)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (0, "True\n", "")


def test_ctrl_z_suspends_the_ranks_too(tmp_path: Path) -> None:
    body = "live()\nwhile True: time.sleep(0.1); print('tick', flush=True)"
    process = start(1, tmp_path / "r", body, stdout=subprocess.DEVNULL)
    (number,) = pids(tmp_path / "r", 1)

    def state() -> str:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]

    process.send_signal(signal.SIGTSTP)
    time.sleep(0.5)
    assert state() == "T"
    process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert state() in "SR"
    process.terminate()
    process.communicate(timeout=10)


def test_no_orphans_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    body = "from colonnade.launch import launch; launch.connect(2, 'cpu'); live(); stay()"
    process = start(2, tmp_path / "r", body)
    numbers = pids(tmp_path / "r", 2)
    process.kill()
    assert_gone(numbers)
    process.communicate(timeout=5)


@pytest.mark.parametrize("watched", [False, True])
def test_a_supervisor_that_is_killed_while_ranks_start_leaves_nothing(tmp_path: Path, watched: bool) -> None:
    """Ranks that hold the interpreter, as an import of torch does; without a word to the kernel the guard ends them."""
    body = f"""
        from colonnade.launch import launch
        launch.end_with_supervisor() if {watched} else None
        live()
        import ctypes
        ctypes.PyDLL(None).sleep(60)
    """
    (tmp_path / "tmp").mkdir()
    process = start(
        2, tmp_path / "r", body, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}, start_new_session=True
    )
    numbers = pids(tmp_path / "r", 2)
    assert [path.name[:10] for path in (tmp_path / "tmp").iterdir()] == ["colonnade-"]
    os.killpg(process.pid, signal.SIGKILL)
    assert_gone(numbers)
    end = time.monotonic() + 20
    while list((tmp_path / "tmp").iterdir()) and time.monotonic() < end:
        time.sleep(0.02)
    assert list((tmp_path / "tmp").iterdir()) == []
    process.communicate(timeout=20)


KEEPING = f"""
import sys
from pathlib import Path
{LIGHT}
from colonnade.launch.launch import run_on
from colonnade.launch.supervisor import Supervisor
tell = Supervisor._tell_guard
def told(self, pid):
    tell(self, pid)
    Path(sys.argv[1]).with_name("told").touch()
Supervisor._tell_guard = told
sys.exit(run_on([0], sys.argv[2:], memory=Path(sys.argv[1])).status)
"""


def test_copies_in_memory_outlive_a_rank_that_fails(tmp_path: Path) -> None:
    """The next start goes on from them."""
    (tmp_path / "memory").mkdir()
    body = "pathlib.Path(os.environ['COLONNADE_MEMORY'], 'copy').touch(); sys.exit('lost')"
    command = [sys.executable, "-c", KEEPING, str(tmp_path / "memory"), *rank_command(tmp_path / "r", body)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1 and (tmp_path / "memory" / "copy").exists(), answer


def test_a_supervisor_that_is_killed_leaves_no_copies_in_memory(tmp_path: Path) -> None:
    """Nor a rank of which the guard knows: this one does not watch its supervisor, as others do from the beginning."""
    (tmp_path / "memory").mkdir()
    command = [*rank_command(tmp_path / "r", "live(); stay()")]
    process = subprocess.Popen([sys.executable, "-c", KEEPING, str(tmp_path / "memory"), *command])
    numbers = pids(tmp_path / "r", 1)
    end = time.monotonic() + 20
    while not (tmp_path / "told").exists() and time.monotonic() < end:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert_gone(numbers)
    while (tmp_path / "memory").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not (tmp_path / "memory").exists()


def test_on_linux_the_kernel_ends_ranks_with_their_supervisor(tmp_path: Path) -> None:
    body = """
        import ctypes
        from colonnade.launch import launch
        launch.end_with_supervisor()
        launch.end_with_supervisor()
        number, threads = ctypes.c_int(0), __import__("threading").active_count()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
        print(number.value, threads)
    """
    assert run_to_end(1, tmp_path / "r", body)[:3] == (0, f"{9 if sys.platform == 'linux' else 0} 2\n", "")


def test_a_process_that_is_asked_twice_to_stop_does_not_end_around_its_threads() -> None:
    code = """
import atexit, threading, time
from colonnade.launch import process
process.end_beside_threads(3)
threading.Thread(target=time.sleep, args=(60,), daemon=True, name=process.BACKGROUND).start()
atexit.register(print, "what the interpreter does on its way out")
print("said")
process.end_beside_threads(130)
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=buffered)
    assert (answer.returncode, answer.stdout, answer.stderr) == (130, "said\n", "")
    failing = code.replace("process.end_beside_threads(130)", "process.end_beside_threads(5, ValueError('of ours'))")
    answer = subprocess.run([sys.executable, "-c", failing], capture_output=True, text=True, timeout=60, env=buffered)
    assert (answer.returncode, answer.stdout, answer.stderr) == (5, "said\n", "ValueError: of ours\n")


@pytest.mark.slow
def test_ranks_meet_and_the_first_of_two_exceptions_is_shown(tmp_path: Path) -> None:
    body = """
        import torch
        from colonnade.launch import launch
        print(launch.connect(2, "cpu"), launch.is_rank(), launch.rank_and_size(), launch.local_rank())
        x = torch.ones(3)
        torch.distributed.all_reduce(x)
        print(x.tolist(), flush=True)
        try:
            if rank == 1:
                raise ValueError("one is broken")
            torch.distributed.all_reduce(x)
        finally:
            launch.disconnect()
            time.sleep(0.5 * rank)  # rank 0 loses its connection, raises and ends before rank 1 has ended
    """
    status, output, errors, _ = run_to_end(2, tmp_path / "r", body)
    assert output == "cpu True (0, 2) 0\n[2.0, 2.0, 2.0]\n"
    assert status == 1 and errors.startswith("rank 1 failed") and "ValueError: one is broken" in errors.splitlines()[-1]


def test_the_supervisor_does_not_import_torch() -> None:
    started = "from colonnade.launch.launch import run_ranks; status = run_ranks(1, ['true'])"
    code = f"import sys; {started}; sys.exit(status or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    try:
        assert launch.connect(1, "cpu", threads=1) == torch.device("cpu")
        assert torch.get_num_threads() == 1 and launch.rank_and_size() == (0, 1) and not launch.is_rank()
        assert not torch.distributed.is_initialized()
        launch.disconnect()
    finally:
        torch.set_num_threads(threads)


def test_a_group_of_the_program_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that opens a checkpoint beside a training of its own, whose ranks no launcher has started."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        launch.connect(1, "cpu", threads=torch.get_num_threads())
        launch.disconnect()
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_torch_is_asked_for_gpus_when_what_their_driver_reads_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the user has set stays."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "set, so that it is put back")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")

    def count() -> int:
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    with pytest.raises(InterruptedError):
        launch.connect(1, "cpu")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    launch.ask_for_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_cuda_is_prepared_and_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "set, so that it is put back")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        launch._prepare_cuda(deterministic=False)
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ and not torch.are_deterministic_algorithms_enabled()
        launch._prepare_cuda(deterministic=True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        launch._prepare_cuda(deterministic=True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def test_the_wrong_number_of_ranks_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(LayoutError, match=r"started 4 ranks .* = 8: .*--nproc-per-node=8 .*product is 4\."):
        launch.connect(8, "cpu")


def test_a_gpu_for_each_rank_or_a_clear_word() -> None:
    with pytest.raises(LayoutError, match=r"train\.device = 'cuda', but this machine has 0 CUDA GPUs for 1 local rank"):
        launch.connect(1, "cuda")


def test_cores_are_shared_between_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(rank: int, num_ranks: int) -> int:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        launch.connect(1, "cpu")
        return torch.get_num_threads()

    monkeypatch.setattr(launch, "num_cores", lambda: 6)
    monkeypatch.delenv(launch.OPENMP, raising=False)
    assert run_on_ranks(threads, 1) == [3]
    monkeypatch.setenv(launch.OPENMP, "2")
    assert run_on_ranks(threads, 1) == [2]


@pytest.mark.parametrize(("rank", "size"), [("one", "2"), ("0", "two"), ("5", "2"), ("2", "2"), ("-1", "2"), ("", "1")])
def test_an_environment_that_names_no_rank(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(LayoutError, match=r"name no rank of a run.*torchrun, or unset both"):
        launch.rank_and_size()


@pytest.mark.parametrize("port", [None, "", "abc", "99999"])
def test_an_environment_that_does_not_say_where_the_others_are(
    monkeypatch: pytest.MonkeyPatch, port: str | None
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if port is None:
        monkeypatch.delenv("MASTER_ADDR", raising=False)
    else:
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.delenv(launch.FOLDER, raising=False)
    with pytest.raises(LayoutError, match=r"MASTER_ADDR is not, or MASTER_PORT is no port.*torchrun"):
        launch.connect(2, "cpu", threads=torch.get_num_threads())


def test_a_mistake_of_all_ranks_is_told_by_the_first(tmp_path: Path) -> None:
    """Whichever ended first: the first one's output is on the terminal already."""
    stub: Any = None
    ranks = [
        _Rank(number, stub, None, stub, tmp_path / f"{number}", USER_MISTAKE, ended=9.0 - number) for number in (1, 0)
    ]
    assert min(ranks, key=_Rank.cause_order).number == 0


@pytest.mark.parametrize("ended", [11.0, 0.0], ids=["ended first", "not ended"])
def test_of_two_exceptions_that_which_was_raised_first_is_the_cause(tmp_path: Path, ended: float) -> None:
    """And not that of the rank that ended first, which had lost its connection to the other."""
    stub: Any = None
    ranks = [_Rank(0, stub, None, stub, tmp_path / "0", 1, ended=ended)]
    ranks += [_Rank(1, stub, None, stub, tmp_path / "1", 1, ended=12.0)]
    for rank, raised in zip(ranks, (10.5, 10.0), strict=True):
        rank.note.write_text(Failure(raised, None, "RuntimeError: x").to_json())
    assert min(ranks, key=_Rank.cause_order).number == 1


@pytest.mark.parametrize("shown", ["", "a warning\n"])
@pytest.mark.parametrize("noted", [None, "the file is empty"])
def test_a_mistake_is_shown_without_what_was_shown_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], noted: str | None, shown: str
) -> None:
    """What rank 0 said while it ran is on the terminal already; a message that it has not come to say is added."""
    with (tmp_path / "errors").open("w+b") as errors:
        errors.write(b"a warning\n" + (b"" if noted else b"colonnade: seq_length = 0\n"))
        errors.flush()
        rank = _Rank(0, SimpleNamespace(), None, errors, tmp_path / "note", USER_MISTAKE, shown=len(shown))  # type: ignore[arg-type]
        if noted:
            rank.note.write_text(Failure(1.0, noted).to_json())
        Supervisor([], 1, tmp_path, lambda number, pipe: {}, ranks=[rank])._show_mistake(rank)
    before = "" if shown else "a warning\n"
    assert capsys.readouterr().err == f"{before}colonnade: {noted or 'seq_length = 0'}\n"


def test_what_rank_0_said_is_shown_though_all_ranks_ended_before_anybody_looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "errors").open("w+b") as errors:
        errors.write(b"a warning\n")
        errors.flush()
        rank = _Rank(0, SimpleNamespace(), None, errors, tmp_path / "note", 0)  # type: ignore[arg-type]
        assert Supervisor([], 1, tmp_path, lambda number, pipe: {}, ranks=[rank])._succeed() == 0
    assert capsys.readouterr().err == "a warning\n"


def test_explanations_are_awaited_though_a_rank_was_lost_before_anybody_looked(tmp_path: Path) -> None:
    rank: Any = SimpleNamespace(number=0, status=None)
    supervisor = Supervisor([], 1, tmp_path, lambda number, pipe: {}, ranks=[rank])
    report_file(tmp_path, 0).touch()
    supervisor.__dict__["_wait"] = lambda seconds: setattr(rank, "status", 75)
    supervisor._await_explanations()
    assert rank.status == 75


def test_only_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    """Who asks a run to stop may ask twice: a machine that shuts down does."""
    got: list[int] = []
    rank: Any = SimpleNamespace(status=None, send=got.append)
    supervisor = Supervisor([], 1, tmp_path, lambda number, pipe: {}, ranks=[rank])
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        supervisor._pass_on(number)
    assert got == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGKILL]


def test_who_asks_for_a_save_asks_nobody_to_end(tmp_path: Path) -> None:
    """A rank that is lost later is started again."""
    got: list[int] = []
    rank: Any = SimpleNamespace(status=None, send=got.append)
    supervisor = Supervisor([], 1, tmp_path, lambda number, pipe: {}, ranks=[rank])
    supervisor._pass_on(signal.SIGUSR1)
    assert got == [signal.SIGUSR1] and supervisor.asked == []
    supervisor._pass_on(signal.SIGTERM)
    assert got[1:] == supervisor.asked == [signal.SIGTERM]
