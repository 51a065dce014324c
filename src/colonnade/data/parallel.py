"""Work spread over processes, its results in the order of the tasks: the same for any number of processes."""

from __future__ import annotations

import multiprocessing
import queue
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from colonnade.dependent import deaf_to_ctrl_c, end_with_parent
from colonnade.errors import ColonnadeError, DataError
from colonnade.lock import Lock

Task = TypeVar("Task")
Result = TypeVar("Result")

_AHEAD = 4  # tasks a worker that are under way or wait for an earlier one's result
_CHECK_SECONDS = 1.0


def ordered_map(
    make: Callable[[], Callable[[Task], Result]], tasks: Iterable[Task], *, workers: int, lock: Lock | None = None
) -> Generator[Result, None, None]:
    """What `make()` returns, applied to each task; every process calls `make` once.

    One worker works in this process. More are spawned (not forked: the parent may hold threads), so `make`, tasks and
    results have to be picklable, and a script needs `if __name__ == "__main__":` around what it does. They end with
    this process, however it ends, and hold the `lock` until then.
    """
    if workers <= 1:
        yield from map(make(), tasks)
        return
    context = multiprocessing.get_context("spawn")
    with _starting():
        inbox, outbox = context.Queue(), context.Queue()
    arguments = (make, inbox, outbox, lock)
    processes = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)]
    try:
        with _starting(), deaf_to_ctrl_c():
            for process in processes:
                process.start()
        yield from _exchange(iter(tasks), inbox, outbox, processes)
        for _ in processes:
            inbox.put(None)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join()
        for channel in (inbox, outbox):
            channel.close()
            channel.cancel_join_thread()


@contextmanager
def _starting() -> Iterator[None]:
    """DataError where the system does not start a process: an OSError would be taken for one of the file that is
    written.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"worker processes cannot be started: {error}. Check that {sys.executable} can be run here, and how many "
            "processes and how much shared memory are allowed; or use --workers 1, which needs none."
        ) from error


def _exchange(tasks: Iterator[Any], inbox: Any, outbox: Any, processes: Sequence[BaseProcess]) -> Iterator[Any]:
    """Keep the workers busy, and give their results in order."""
    sent = given = 0
    early: dict[int, Any] = {}
    exhausted = False
    while True:
        while not exhausted and sent - given < _AHEAD * len(processes):
            try:
                inbox.put((sent, next(tasks)))
                sent += 1
            except StopIteration:
                exhausted = True
        if given == sent:
            return
        index, result, error = _receive(outbox, processes)
        if error is not None:
            raise error
        early[index] = result
        while given in early:
            yield early.pop(given)
            given += 1


def _receive(outbox: Any, processes: Sequence[BaseProcess]) -> Any:
    while True:
        try:
            return outbox.get(timeout=_CHECK_SECONDS)
        except queue.Empty:
            codes = [process.exitcode for process in processes if process.exitcode is not None]
            if codes:
                raise DataError(
                    f"a worker process ended with status {codes[0]} before its work was done: killed from outside, "
                    "out of "
                    'memory, or started from a script without `if __name__ == "__main__":`. Try fewer workers.'
                ) from None


def _work(make: Callable[[], Callable[[Any], Any]], inbox: Any, outbox: Any, lock: Lock | None) -> None:
    """In each process; the lock came with it, and is held until the process ends."""
    end_with_parent()
    index = -1
    try:
        work = make()
        while (message := inbox.get()) is not None:
            index, task = message
            outbox.put((index, work(task), None))
    except ColonnadeError as error:
        outbox.put((index, None, error))
    except Exception:  # noqa: BLE001 - whatever it is, the parent raises it
        outbox.put((index, None, RuntimeError(f"in a worker process:\n{traceback.format_exc()}")))
