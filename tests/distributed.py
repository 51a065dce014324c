"""Run a plain function on forked gloo ranks: the way to test what communicates, in tenths of a second.

    def sums(rank: int, num_ranks: int, scale: float) -> float:
        x = torch.full((), scale * rank)
        torch.distributed.all_reduce(x)
        return x.item()

    assert run_on_ranks(sums, 4, 0.5) == [3.0] * 4

Ranks are forked, so functions may be closures and the parent's imports are not paid again. They find each
other through a file in a temporary folder, never through a port.
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed

PATIENCE = 5.0
"""[seconds] For the end of a rank whose connection another one has lost."""


class RankFailed(Exception):
    """A rank died without an exception, overran the time limit, or raised what cannot be sent to the parent."""


def run_on_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    time_limit: float = 60.0,
    start: Callable[..., multiprocessing.process.BaseProcess] | None = None,
) -> list[Any]:
    """`[function(rank, num_ranks, *args) for each rank]`, each on its own process within one gloo group.

    Results are pickled. The first exception of any rank is raised here with that rank's traceback as a note;
    the other ranks are killed. `time_limit` is in seconds. `start`: what makes a process, in the place of `fork`.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes: list[multiprocessing.process.BaseProcess] = []
        connections: list[Connection] = []
        try:
            for rank in range(num_ranks):
                ours, theirs = multiprocessing.Pipe(duplex=False)
                connections.append(ours)
                processes.append(
                    (start or fork)(_rank, theirs, function, rank, num_ranks, args, Path(folder), time_limit)
                )
                theirs.close()  # so that the end of the rank is the end of what can be read from `ours`
            return _collect(connections, processes, time_limit)
        finally:
            for process in processes:
                process.kill()  # a rank that has answered waits for this, so that no peer loses its connection
                process.join()
            for connection in connections:
                connection.close()


def fork(target: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    """Start a function on a forked process. Its first line must be `torch.set_num_threads(1)`."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    with warnings.catch_warnings():  # 3.12 warns of forking with threads: the child's first line makes it safe
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _rank(
    connection: Connection,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    folder: Path,
    time_limit: float,
) -> None:
    torch.set_num_threads(1)  # first: the parent's thread pool does not exist here, and waiting for it hangs
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve is no hindrance
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=time_limit),
        )
        answer = pickle.dumps((time.monotonic(), function(rank, num_ranks, *args), None))
    except BaseException as error:  # noqa: BLE001  whatever it is, the parent raises it
        answer = _pickled_error(rank, error)
    connection.send_bytes(answer)
    time.sleep(time_limit)


def _pickled_error(rank: int, error: BaseException) -> bytes:
    when, trace = time.monotonic(), "".join(traceback.format_exception(error))
    error.add_note(f"on rank {rank}:\n{trace}")
    try:
        answer = pickle.dumps((when, None, error))
        pickle.loads(answer)  # some exceptions can be written but not read
        return answer
    except Exception:  # noqa: BLE001  an exception's own pickling may raise anything
        return pickle.dumps((when, None, RankFailed(f"rank {rank} raised {type(error).__name__}:\n{trace}")))


def _collect(
    connections: list[Connection], processes: list[multiprocessing.process.BaseProcess], time_limit: float
) -> list[Any]:
    end = time.monotonic() + time_limit
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = [c for rank, c in enumerate(connections) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(connections)) if rank not in results]
            raise RankFailed(f"ranks {late} did not answer within {time_limit} s")
        heard = [connections.index(c) for c in ready if isinstance(c, Connection)]
        answers = {rank: _receive(connections[rank], rank, processes[rank]) for rank in heard}
        errors = [(when, error) for when, _, error in answers.values() if error is not None]
        if any("onnection" in str(error) for _, error in errors):  # that of a rank whose death is heard of next
            for connection in wait([c for c in waiting if c not in ready], timeout=PATIENCE):
                rank = connections.index(connection)  # type: ignore[arg-type]
                when, _, error = _receive(connections[rank], rank, processes[rank])
                errors += [] if error is None else [(when, error)]
        if errors:
            raise min(errors, key=lambda pair: pair[0])[1]
        results |= {rank: result for rank, (_, result, _) in answers.items()}
    return [results[rank] for rank in range(len(connections))]


def _receive(
    connection: Connection, rank: int, process: multiprocessing.process.BaseProcess
) -> tuple[float, Any, BaseException | None]:
    try:
        answer: tuple[float, Any, BaseException | None] = pickle.loads(connection.recv_bytes())
        return answer
    except EOFError:
        # Time 0 puts it before the exceptions of its peers, which are what its death did to them.
        process.join(10.0)
        how = f"exit code {process.exitcode}; -N: killed by signal N"
        return 0.0, None, RankFailed(f"rank {rank} died without an exception ({how})")
