"""Work on several processes: results in order, errors raised, no process left behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from colonnade.data.parallel import ordered_map
from colonnade.errors import DataError


def make_square() -> Callable[[int], int]:
    return lambda number: number * number


def make_uneven() -> Callable[[int], int]:
    def work(number: int) -> int:
        time.sleep(0.05 if number % 7 == 0 else 0)
        return number

    return work


def make_failing() -> Callable[[int], int]:
    def work(number: int) -> int:
        match number:
            case 5:
                raise DataError("the fifth is no data")
            case 6:
                raise KeyError("a bug")
            case 7:
                os._exit(3)
        return number

    return work


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order(workers: int) -> None:
    assert list(ordered_map(make_square, range(50), workers=workers)) == [number**2 for number in range(50)]
    assert list(ordered_map(make_square, [], workers=workers)) == []


INTERRUPTED = """
import os, pathlib, signal, time
from colonnade.data.parallel import ordered_map
from tests.data.test_parallel import make_square

FOLDER = pathlib.Path(__file__).parent
if __name__ == "__mp_main__":  # a worker imports this file
    (FOLDER / f"{os.getpid()}.importing").touch()
    time.sleep(30)

def tasks():
    while len(list(FOLDER.glob("*.importing"))) < 2:
        time.sleep(0.01)
    os.killpg(0, signal.SIGINT)
    time.sleep(30)
    yield 1

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        list(ordered_map(make_square, tasks(), workers=2))
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_workers_do_not_hear_ctrl_c_while_they_start(tmp_path: Path) -> None:
    """A terminal sends it to all processes of a command: each that imports would show a traceback."""
    (tmp_path / "program.py").write_text(INTERRUPTED)
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


@pytest.mark.parametrize("refused", ["process.BaseProcess.start", "context.SpawnContext.Queue"])
def test_workers_that_cannot_be_started_are_told(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """And not taken for a disk that is full, where it is a file that is made of their results."""

    def start(*given: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(f"multiprocessing.{refused}", start)
    with pytest.raises(DataError, match=r"worker processes cannot be started: .*unavailable\. .*use --workers 1"):
        list(ordered_map(make_square, range(9), workers=2))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_results_come_in_order_from_uneven_work() -> None:
    assert list(ordered_map(make_uneven, range(40), workers=2)) == list(range(40))
    assert not multiprocessing.active_children()


def test_tasks_are_drawn_as_they_are_needed() -> None:
    drawn: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(1_000):
            drawn.append(number)
            yield number

    results = ordered_map(make_square, tasks(), workers=2)
    assert next(results) == 0
    assert len(drawn) < 20
    results.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [1, 2])
def test_data_errors_are_raised_as_they_are(workers: int) -> None:
    with pytest.raises(DataError, match="the fifth is no data"):
        list(ordered_map(make_failing, [1, 5], workers=workers))
    assert not multiprocessing.active_children()


def test_other_errors_carry_the_workers_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)in a worker process.*KeyError: 'a bug'"):
        list(ordered_map(make_failing, [1, 6], workers=2))


@pytest.fixture
def _a_minute() -> Iterator[None]:
    """Then a test that waits for ever fails."""

    def over(*_: object) -> None:
        raise TimeoutError("a minute is over")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_a_minute")
def test_a_worker_that_dies_is_noticed() -> None:
    """While another one lives."""
    with pytest.raises(DataError, match="ended with status 3"):
        list(ordered_map(make_failing, [1, 7, 2, 3], workers=2))
    assert not multiprocessing.active_children()
