"""Processes of commands: open files, output that nobody reads any more."""

import io
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from colonnade.launch import process
from tests.distributed import fork

LINES = """
import sys
from colonnade.launch.process import outlive_readers
outlive_readers()
outlive_readers()
sys.stdin.readline()
for number in range(3):
    print("line", number, flush=number < 2)
print("told", file=sys.stderr)
sys.exit(3)
"""
LOST = "this process works on without it. What a run tells of its steps is in its folder too.\n"


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """That of open files, soft and hard; as it was behind the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_may_open_as_many_files_as_it_can_ask_for(
    limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, soft), hard))
    monkeypatch.setattr(process, "OPEN_FILES", 300)
    process.allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
    monkeypatch.setattr(process, "OPEN_FILES", 250)
    process.allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard), "what it has already stays"


@pytest.mark.parametrize(("most", "soft"), [(61_440, 32_768), (10_240, 8192), (0, 256)])
def test_a_process_takes_what_a_system_grants_that_calls_unlimited_more(
    most: int, soft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS does; never less than it has, and whatever is refused is no error."""
    now = 256, resource.RLIM_INFINITY

    def grant(_: int, wanted: tuple[int, int]) -> None:
        nonlocal now
        if wanted[0] > most:
            raise ValueError("current limit exceeds maximum limit")
        now = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: now)
    monkeypatch.setattr(resource, "setrlimit", grant)
    process.allow_open_files()
    assert now == (soft, resource.RLIM_INFINITY)


def test_a_command_asks_for_them() -> None:
    code = "import resource as r; from colonnade import cli; cli.app = lambda **_: print(*r.getrlimit(r.RLIMIT_NOFILE))"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 300; ulimit -Sn 200; {sys.executable} -c '{code}; cli.main()'"],
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("300 300\n", "")


@pytest.mark.parametrize("closed", ["", "0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_streams_that_a_command_is_started_without_lead_nowhere(closed: str, tmp_path: Path) -> None:
    """Also for what it starts: nothing else takes their numbers."""
    told = tmp_path / "told"
    code = f"""
import os, subprocess, sys
from colonnade import cli
def tell(**_):
    streams = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]
    print("out"); print("err", file=sys.stderr); read = sys.stdin.read()
    with open({str(told)!r}, "w") as file:
        child = subprocess.run(["sh", "-c", "true <&0 && true >&1 && true >&2"]).returncode
        print(streams, repr(read), file.fileno() > 2, child, file=file)
cli.app = tell
cli.main()
"""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, input="", capture_output=True, text=True)
    expected = ("" if "1>" in closed else "out\n", "" if "2>" in closed else "err\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, *expected)
    assert told.read_text() == "[0, 1, 2] '' True 0\n"


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_process_outlives_who_reads_its_output(unbuffered: bool) -> None:
    started = subprocess.Popen(
        [sys.executable, *["-u"] * unbuffered, "-c", LINES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    started.stdout.close()
    _, errors = started.communicate("\n")
    assert (started.returncode, errors) == (3, f"Standard output cannot be written (Broken pipe): {LOST}told\n")


def test_a_process_outlives_a_full_disk_behind_its_output() -> None:
    """Errors too; and nothing is said of those."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", LINES], input="\n", stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (
            3,
            f"Standard output cannot be written (No space left on device): {LOST}told\n",
        )
        done = subprocess.run([sys.executable, "-c", LINES], input="\n", stdout=subprocess.PIPE, stderr=full, text=True)
        assert (done.returncode, done.stdout) == (3, "line 0\nline 1\nline 2\n")


@pytest.mark.parametrize(("status", "ends"), [(None, 0), (0, 0), (7, 7), ("in words", 1), ("", 1)])
def test_beside_a_thread_that_computes_a_process_ends_as_it_would_alone(status: object, ends: int) -> None:
    """With what was given to `sys.exit`."""

    def program() -> None:
        threading.Thread(target=time.sleep, args=(60,), daemon=True, name=process.BACKGROUND).start()
        process.end_beside_threads(status)

    child = fork(program)
    child.join(20)
    assert child.exitcode == ends


def test_ctrl_c_interrupts_unless_somebody_else_hears_it() -> None:
    own, before = (lambda *_: None), signal.getsignal(signal.SIGINT)
    try:
        for set_before, expected in ((signal.SIG_IGN, signal.default_int_handler), (own, own)):
            signal.signal(signal.SIGINT, set_before)
            process.hear_ctrl_c()
            assert signal.getsignal(signal.SIGINT) == expected
    finally:
        signal.signal(signal.SIGINT, before)


def test_output_that_is_closed_or_kept_by_others_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.StringIO()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", kept)
    process.print_what_it_lacks()
    process.outlive_readers()
    assert sys.stdout is None and sys.stderr is kept


def test_output_of_which_nobody_else_holds_the_descriptor_is_written() -> None:
    """That of Python itself is held by `sys.__stdout__`."""
    own = 'import os, sys; sys.stdout = os.fdopen(os.dup(1), "w")' + LINES
    done = subprocess.run([sys.executable, "-c", own], input="\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "line 0\nline 1\nline 2\n", "told\n")


@pytest.mark.parametrize(
    ("encoding", "errors", "written"),
    [
        ("ascii", "strict", rb"\xe9 \u20ac \udcff"),
        ("latin-1", "strict", b"\xe9 \\u20ac \\udcff"),
        ("utf-8", "strict", b"\xc3\xa9 \xe2\x82\xac \\udcff"),
        ("ascii", "surrogateescape", rb"\xe9 \u20ac \udcff"),
        ("utf-8", "surrogateescape", b"\xc3\xa9 \xe2\x82\xac \xff"),
        ("ascii", "replace", b"? ? ?"),
    ],
)
def test_what_an_encoding_lacks_is_written_in_its_characters(
    encoding: str, errors: str, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters, and what a file's name has that is no UTF-8; a name's own bytes where they can be told, and as somebody
    has asked for."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding, errors))
    process.print_what_it_lacks()
    print("é € \udcff", end="", flush=True)
    assert out.getvalue() == written


@pytest.mark.parametrize("line_buffering", [True, False])
def test_output_is_written_as_before(line_buffering: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its encoding, with what that lacks as it was, and by lines on a terminal."""
    with (tmp_path / "out").open("wb") as out, (tmp_path / "errors").open("wb") as errors:
        for name, stream in (("stdout", out), ("stderr", errors)):
            text = io.TextIOWrapper(stream, "latin-1", "backslashreplace", line_buffering=line_buffering)
            monkeypatch.setattr(sys, name, text)
        process.outlive_readers()
        for now, path in ((sys.stdout, tmp_path / "out"), (sys.stderr, tmp_path / "errors")):
            with now:
                print("é of 5 €", file=now)
                assert bool(path.read_bytes()) == line_buffering
            assert path.read_bytes() == b"\xe9 of 5 \\u20ac\n"
