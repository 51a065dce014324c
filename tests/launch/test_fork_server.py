"""A forked process finds what a new one finds, ends as one, and is its starter's child; and what happens without it."""

import ctypes
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from colonnade.launch import devices, fork_server
from colonnade.launch.fork_server import Forked, ForkError, ForkServer, can_fork
from colonnade.launch.launch import run_ranks
from colonnade.launch.starter import Starter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")

FINDS = """
import json, os, signal, sys
from pathlib import Path

def place(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None  # that of the folder that was listed

numbers = {int(each) for each in os.listdir("/proc/self/fd")}
found = {
    "arguments": sys.argv[1:],
    "program": sys.argv[0],
    "module": __name__,
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "cores": sorted(os.sched_getaffinity(0)),
    "descriptors": {number: there for number in numbers if (there := place(number)) is not None},
    "parent": os.getppid(),
    "own session": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "signals": [str(signal.getsignal(number)) for number in range(1, 32)],
    "blocked": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "inherits": [os.get_inheritable(number) for number in range(3)],
    "lines": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "path": sys.path,
    "read": sys.stdin.read(),
}
Path(sys.argv[1]).write_text(json.dumps(found))
print("said")
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("OF_THE_SERVER", "alone")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return folder


def command(modules: Path, body: str, *arguments: object) -> list[str]:
    (modules / "body.py").write_text(textwrap.dedent(body))
    return [sys.executable, "-m", "body", *map(str, arguments)]


@pytest.fixture
def server(modules: Path) -> Iterator[ForkServer]:
    made = ForkServer(["json"])
    assert made.is_ready(60)
    yield made
    made.close()


def status(server: ForkServer, command: list[str], folder: Path) -> tuple[int, str, str]:
    """How a command ends, and what it says."""
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err, Path(os.devnull).open("rb") as nothing:
        streams = {0: nothing.fileno(), 1: out.fileno(), 2: err.fileno()}
        ended = server.start(command, os.environ, streams, "rank 0").wait()
    return ended, (folder / "out").read_text(), (folder / "err").read_text()


def test_a_forked_process_finds_what_a_new_one_finds(
    modules: Path, tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").write_text("to be read")
    told = {}
    environment = {**os.environ, "RANK": "3", "OTHER": "ünlike"}
    del environment["OF_THE_SERVER"]
    monkeypatch.chdir(modules)
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})  # later than the server was started
    try:
        with (
            (tmp_path / "in").open("rb") as first,
            (tmp_path / "out").open("ab") as out,
            (tmp_path / "err").open("ab") as err,
            (tmp_path / "kept").open("ab") as kept,
        ):
            for way in ("new", "forked"):
                first.seek(0)
                asked = command(modules, FINDS, tmp_path / way, "--and", "more words")
                streams = {0: first.fileno(), 1: out.fileno(), 2: err.fileno(), kept.fileno(): kept.fileno()}
                if way == "forked":
                    process: Forked | subprocess.Popen[bytes] = server.start(asked, environment, streams, "rank 3")
                else:
                    process = subprocess.Popen(
                        asked,
                        env=environment,
                        stdin=first,
                        stdout=out,
                        stderr=err,
                        pass_fds=[kept.fileno()],
                        start_new_session=True,
                    )
                assert process.wait() == 0, (tmp_path / "err").read_text()
                told[way] = json.loads((tmp_path / way).read_text())
                assert told[way]["arguments"].pop(0) == str(tmp_path / way)
    finally:
        os.sched_setaffinity(0, affinity)
    assert told["forked"] == told["new"]
    found = told["forked"]
    assert found["arguments"] == ["--and", "more words"] and found["module"] == "__main__"
    assert found["parent"] == os.getpid() and found["own session"] and found["read"] == "to be read"
    assert found["folder"] == str(modules) and found["cores"] == [min(affinity)] and found["environment"]["RANK"] == "3"
    assert {str(tmp_path / name) for name in ("in", "out", "err", "kept")} <= set(found["descriptors"].values())
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("said\n" * 2, "")


def test_descriptors_may_change_places(modules: Path, tmp_path: Path, server: ForkServer) -> None:
    """Those of the server lie where the rank's are to be, and the other way round."""
    numbers = range(20, 80)
    asked = command(modules, f"import os; [os.write(number, str(number).encode()) for number in {numbers}]")
    with ExitStack() as files, Path(os.devnull).open("r+b") as nothing:
        opened = [files.enter_context((tmp_path / str(number)).open("wb")) for number in numbers]
        streams = dict(zip(reversed(numbers), (file.fileno() for file in opened), strict=True))
        asked_for = dict.fromkeys(range(3), nothing.fileno()) | streams
        assert server.start(asked, os.environ, asked_for, "rank 0").wait() == 0
    assert [(tmp_path / str(number)).read_text() for number in numbers] == [str(99 - number) for number in numbers]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("print('out', end='')", (0, "out", "")),
        ("raise SystemExit", (0, "", "")),
        ("import sys; print('x', file=sys.stderr, end=''); sys.exit(7)", (7, "", "x")),
        ("import sys; sys.exit('in words')", (1, "", "in words\n")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", (-9, "", "")),
        ("import atexit; atexit.register(print, 'on the way out'); raise SystemExit(3)", (3, "on the way out\n", "")),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print('waited for'))).start()",
            (0, "waited for\n", ""),
        ),
    ],
)  # fmt: skip
def test_it_ends_as_a_new_one(
    modules: Path, tmp_path: Path, server: ForkServer, body: str, expected: tuple[int, str, str]
) -> None:
    assert status(server, command(modules, body), tmp_path) == expected


def test_an_uncaught_exception_is_shown(modules: Path, tmp_path: Path, server: ForkServer) -> None:
    ended, out, err = status(server, command(modules, "1 / 0"), tmp_path)
    assert (
        (ended, out) == (1, "")
        and err.startswith("Traceback")
        and err.endswith("ZeroDivisionError: division by zero\n")
    )


def test_what_was_imported_is_there_and_is_imported_once(modules: Path, tmp_path: Path) -> None:
    (modules / "heavy.py").write_text("import os; marker = os.getpid()")
    body = "import os, sys; print('heavy' in sys.modules); import heavy; print(heavy.marker != os.getpid())"
    server = ForkServer(["heavy"])
    assert server.is_ready(60)
    for _ in range(2):
        assert status(server, command(modules, body), tmp_path) == (0, "True\nTrue\n", "")
    server.close()


def test_a_run_imports_once_for_all_its_ranks(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "TORCH", "json")
    monkeypatch.setattr(fork_server, "_there", [])
    (modules / "heavy.py").write_text(f"with open({str(tmp_path / 'imported')!r}, 'a') as file: file.write('once')")
    try:
        assert run_ranks(3, command(modules, "import heavy"), imports=["heavy"]) == 0
    finally:
        fork_server.forget()
    assert (tmp_path / "imported").read_text() == "once"


def test_lines_on_a_terminal_are_shown_at_once(modules: Path, server: ForkServer) -> None:
    ours, theirs = pty.openpty()
    asked = command(modules, "import sys, time; print(sys.stdout.line_buffering); time.sleep(60)")
    process = server.start(asked, os.environ, {0: theirs, 1: theirs, 2: theirs}, "rank 0")
    assert select.select([ours], [], [], 20)[0] and os.read(ours, 100) == b"True\r\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    os.close(ours)
    os.close(theirs)


def test_nothing_piles_up(modules: Path, server: ForkServer) -> None:
    """The server keeps no descriptor and no process, and its starter adopts nobody else."""

    def held() -> tuple[list[str], str]:
        process = Path(f"/proc/{server.process.pid}")
        return os.listdir(process / "fd"), (process / "task" / process.name / "children").read_text()

    before, own = held(), os.listdir("/proc/self/fd")
    for _ in range(3):
        assert server.start(command(modules, "pass"), os.environ, {0: 0, 1: 1, 2: 2}, "rank 0").wait() == 0
    assert held() == before and before[1] == "" and len(os.listdir("/proc/self/fd")) == len(own)
    adopts = ctypes.c_int(1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    assert adopts.value == 0


def test_its_name_is_told_and_who_waits_twice_is_answered_twice(modules: Path, server: ForkServer) -> None:
    asked = command(modules, "import time; time.sleep(60)")
    process = server.start(asked, os.environ, {0: 0, 1: 1, 2: 2}, "rank 12")
    assert Path(f"/proc/{process.pid}/comm").read_text() == "rank 12\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert (process.wait(), process.wait()) == (-15, -15)


def test_a_new_process_has_the_descriptors_that_a_forked_one_has(tmp_path: Path) -> None:
    """Where ranks cannot be forked: that of its supervisor, and those that every rank inherits."""
    ends = [os.pipe() for _ in range(2)]
    pipe, kept = (writing for _, writing in ends)
    program = f"import os; os.write({pipe}, b'pipe'); os.write({kept}, b'kept')"
    starter = Starter([sys.executable, "-c", program], [kept], lambda text: None)
    with open(tmp_path / "errors", "w+b") as errors:
        process = starter.start("rank 0", os.environ, pipe, errors, errors)
        assert process.wait() == 0, (tmp_path / "errors").read_text()
    assert [os.read(reading, 9) for reading, _ in ends] == [b"pipe", b"kept"]
    for each in (end for both in ends for end in both):
        os.close(each)


WITH_INPUT = """
import os, sys
from colonnade.launch.starter import Starter
with open(sys.argv[1], "w+b") as output, open(os.devnull, "wb") as errors:
    reads = "import sys; print(sys.stdin.read(), end='')"
    starter = Starter([sys.executable, "-c", reads], (), print)
    statuses = [starter.start("rank", os.environ, 2, each, errors).wait() for each in (output, None)]
assert statuses == [0, 0]
"""


def test_a_new_process_has_the_input_where_it_has_the_output(tmp_path: Path) -> None:
    """What another one reads would be lost to rank 0."""
    command = [sys.executable, "-c", WITH_INPUT, str(tmp_path / "output")]
    done = subprocess.run(command, input="to be read", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "to be read", "")
    assert (tmp_path / "output").read_text() == ""


def test_ranks_outlive_the_server_and_it_ends_with_its_starter(modules: Path, tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from colonnade.launch.fork_server import ForkServer
server = ForkServer(["json"])
assert server.is_ready(60)
rank = server.start({command(modules, "import time; time.sleep(60)")!r}, os.environ, {{0: 0, 1: 1, 2: 2}}, "rank 0")
if sys.argv[1] == "close":
    server.close()
    assert os.path.exists(f"/proc/{{rank.pid}}")
print(rank.pid, server.process.pid, flush=True)
time.sleep(60)
"""
    for how in ("close", "leave"):
        with subprocess.Popen([sys.executable, "-c", program, how], stdout=subprocess.PIPE, text=True) as starter:
            assert starter.stdout is not None
            rank, server = map(int, starter.stdout.readline().split())
            starter.kill()
        end = time.monotonic() + 20
        while _is_alive(server) and time.monotonic() < end:
            time.sleep(0.02)
        assert not _is_alive(server) and _is_alive(rank)  # which its own pipe ends, where it is a rank of a run
        os.kill(rank, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_cannot_be_imported_is_told(modules: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer(["no_such_module"])
    with pytest.raises(ForkError, match="what they are forked from has ended"):
        server.is_ready(60)
    server.close()
    assert "ModuleNotFoundError: No module named 'no_such_module'" in capfd.readouterr().err


def test_a_process_that_is_not_adopted_is_none(
    modules: Path, server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could tell how it ends."""
    monkeypatch.setattr(fork_server, "_adopting", nullcontext)
    asked = command(modules, f"open({str(tmp_path / 'begun')!r}, 'w')")
    with pytest.raises(ForkError, match="did not let it be adopted"):
        server.start(asked, os.environ, {0: 0, 1: 1, 2: 2}, "rank 0")
    server.close()
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize("when", ["while it imports", "before the next rank"])
def test_without_it_ranks_are_started_anew_and_that_is_said(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(fork_server, "TORCH", "json")
    monkeypatch.setattr(fork_server, "_there", [])
    said: list[str] = []
    asked = command(modules, "import os, sys; print(os.environ['RANK'], sys.stdin.read() == '')")
    starter = Starter(asked, (), said.append, ["colonnade.errors"])
    (server,) = fork_server._there
    if when == "before the next rank":
        assert server.is_ready(60) and starter.is_ready()
    server.process.kill()
    server.process.wait()
    if when == "while it imports":
        assert starter.is_ready() and len(said) == 1
    reading, writing = os.pipe()
    for rank in range(2):
        with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
            environment = {**os.environ, "RANK": str(rank)}
            process = starter.start(f"rank {rank}", environment, reading, out, err)
            assert isinstance(process, subprocess.Popen) and process.wait() == 0, (tmp_path / "err").read_text()
        assert (tmp_path / "out").read_text() == f"{rank} True\n"
    (line,) = said
    assert line.startswith("Ranks cannot be forked: what they are forked from ") and line.endswith("takes longer.\n")
    assert not fork_server._there
    os.close(reading)
    os.close(writing)


def test_one_server_for_all_starts_of_a_process(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "TORCH", "json")
    monkeypatch.setattr(fork_server, "_there", [])
    asked = command(modules, "pass")
    first, second = (Starter(asked, (), pytest.fail) for _ in range(2))
    assert first.forks is second.forks is not None and len(fork_server._there) == 1
    fork_server.forget()
    assert first.forks.process.returncode == -signal.SIGKILL and not fork_server._there


@pytest.mark.parametrize(("there", "forks"), [(0, True), (1, False), (None, False)])
def test_where_ranks_are_forked(monkeypatch: pytest.MonkeyPatch, there: int | None, forks: bool) -> None:
    """A module, for this interpreter, on Linux, and no GPU that anybody knows of."""
    monkeypatch.setattr(fork_server, "count_gpus", lambda: there)
    assert can_fork([sys.executable, "-m", "colonnade", "train"]) is forks
    assert not can_fork([sys.executable, "-c", "pass"]) and not can_fork(["python", "-m", "colonnade"])
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not can_fork([sys.executable, "-m", "colonnade", "train"])


def test_this_machine_is_asked_for_gpus() -> None:
    assert fork_server.count_gpus is devices.count_gpus


def test_a_run_that_is_interrupted_while_it_imports_ends_at_once(modules: Path, tmp_path: Path) -> None:
    (modules / "endless.py").write_text("import pathlib, time; pathlib.Path('begun').touch(); time.sleep(600)")
    program = (
        "import sys; from colonnade.launch import fork_server; from colonnade.launch.launch import run_ranks\n"
        "fork_server.TORCH = 'endless'; sys.exit(run_ranks(2, sys.argv[1:]))"
    )
    asked = [sys.executable, "-c", program, *command(modules, "print('never')")]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    end = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 130


def test_a_run_that_is_killed_while_it_imports_leaves_no_folder(modules: Path, tmp_path: Path) -> None:
    (modules / "slow.py").write_text("import pathlib, time; pathlib.Path('begun').touch(); time.sleep(2)")
    (tmp_path / "tmp").mkdir()
    program = (
        "import sys; from colonnade.launch import fork_server; from colonnade.launch.launch import run_ranks\n"
        "fork_server.TORCH = 'slow'; sys.exit(run_ranks(2, sys.argv[1:]))"
    )
    asked = [sys.executable, "-c", program, *command(modules, "print('never')")]
    own = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path, env=own)
    end = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    assert [path.name[:10] for path in (tmp_path / "tmp").iterdir()] == ["colonnade-"]
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while list((tmp_path / "tmp").iterdir()) and time.monotonic() < end:
        time.sleep(0.02)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_is_asked_for_may_come_in_any_number_of_pieces() -> None:
    """As a large environment does."""
    asked = {
        "module": "m", "arguments": ["a" * 1000], "environment": {}, "descriptors": [1], "parent": 2, "folder": "f",
        "cores": [0], "name": "rank 0",
    }  # fmt: skip
    content = json.dumps(asked).encode()
    asker, server = socket.socketpair()

    def send() -> None:
        with open(os.devnull) as sent:
            socket.send_fds(asker, [fork_server._NUMBER.pack(len(content))], [sent.fileno()])
        for begin in range(0, len(content), 300):
            asker.sendall(content[begin : begin + 300])
            time.sleep(0.01)

    with asker, server:
        sender = threading.Thread(target=send)
        sender.start()
        found = fork_server._next(server)
        sender.join()
    assert found is not None and vars(found[0]) == asked and len(found[1]) == 1
    os.close(found[1][0])
