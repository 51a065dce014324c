"""Run `colonnade …` as a user would: as a new process, or (in tenths of a second) as forked ranks of one.

A forked rank has torch imported already and one thread. Everything else is as torchrun would start it: RANK and
WORLD_SIZE in the environment, output and status of its own.
"""

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import IO

import torch
import typer.main

from colonnade import cli
from colonnade.config.describe import all_keys
from colonnade.config.load import loads
from colonnade.launch import launch
from colonnade.planner import comparison
from colonnade.planner.predict import predict
from colonnade.train.products import Decision
from tests import predicted

import_module("colonnade.planner.banner")  # what each forked rank would import for itself
all_keys()  # remembered, likewise
typer.main.get_command = cache(typer.main.get_command)
typer.main.get_command(cli.app)
REMEMBERED: list[Path] = []
"""The folder of this session for what the planner says to forked ranks; none: each asks for itself."""
TINIEST = """\
model = { num_layers = 1, hidden_size = 16, num_heads = 2, seq_length = 8, dropout = 0.1, attention_dropout = 0.1 }
data.train = "none"
train = { steps = 1, global_batch_size = 1, micro_batch_size = 1, device = "cpu" }
optim.learning_rate = 1.0
run.folder = "none"
"""
"""A configuration that can be planned."""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", launch.FOLDER, launch.PIPE)


@dataclass(frozen=True)
class Answer:
    """What one process said, and how it ended (as for subprocess: −9 if it was killed by signal 9)."""

    status: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """That of a user who has launched nothing yet."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHED} | {"OMP_NUM_THREADS": "1"}


def colonnade(*arguments: object, timeout: float = 120.0, **more: str) -> Answer:
    """`python -m colonnade arguments` with `more` in its environment."""
    command = [sys.executable, "-m", "colonnade", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment() | more, timeout=timeout)
    return Answer(done.returncode, done.stdout, done.stderr)


def here(*arguments: object) -> Answer:
    """`colonnade arguments` in this very process: for what is refused, and has no signals and no ranks."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    threads, before = torch.get_num_threads(), sys.argv
    heard = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    sys.argv = ["colonnade", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.argv = before
        torch.set_num_threads(threads)
        for number, handler in heard.items():  # a run that has ended hears them no more
            signal.signal(number, handler)
    return Answer(status, out.getvalue(), err.getvalue())


def after_banner(out: str) -> str:
    """What a run printed after it introduced itself."""
    lines = out.splitlines(keepends=True)
    told = [line.startswith(("Colonnade ", "  ")) for line in lines]
    return "".join(lines[told.index(False) if False in told else len(lines) :])


@dataclass
class Ranks:
    """Forked ranks of one run."""

    folder: "tempfile.TemporaryDirectory[str]" = field(default_factory=tempfile.TemporaryDirectory)
    pids: list[int] = field(default_factory=list)
    streams: list[tuple[IO[bytes], IO[bytes]]] = field(default_factory=list)

    def signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def answers(self, timeout: float = 60.0) -> list[Answer]:
        """Wait for all of them. One that fails or dies takes the others with it, as a launcher would see to."""
        statuses: dict[int, int] = {}
        end = time.monotonic() + timeout
        while len(statuses) < len(self.pids):
            for pid in set(self.pids) - statuses.keys():
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
            late = time.monotonic() > end
            if late or any(statuses.values()):
                time.sleep(0.3 * _busy())  # let the others say what they have to say
                for pid in set(self.pids) - statuses.keys():
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        answers = [
            Answer(statuses[pid], *(_text(stream) for stream in pair))
            for pid, pair in zip(self.pids, self.streams, strict=True)
        ]
        self.folder.cleanup()
        assert time.monotonic() <= end, f"not ended within {timeout} s: {answers}"
        return answers


def start(*arguments: object, num_ranks: int = 1, first: Callable[[int], None] = lambda rank: None) -> Ranks:
    """Fork `num_ranks` processes that run `colonnade arguments`; each calls `first(rank)` before."""
    _plan_once()
    ranks = Ranks()
    for rank in range(num_ranks):
        pair = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115  closed by `answers`
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():  # 3.12 warns of forking with threads: the child's first line makes it safe
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            environment = _as_rank(rank, num_ranks, ranks.folder.name)
            become([str(argument) for argument in arguments], pair, environment, partial(first, rank))
        ranks.pids.append(pid)
        ranks.streams.append(pair)
    return ranks


def forked(*arguments: object, num_ranks: int = 1, first: Callable[[int], None] = lambda rank: None) -> Answer:
    """Rank 0's answer to `colonnade arguments`, when all ranks have ended."""
    return start(*arguments, num_ranks=num_ranks, first=first).answers()[0]


@cache
def _plan_once() -> None:
    """What torch looks up at each operator's first call on tensors without memory, each forked rank that plans would
    look up for itself.
    """
    config, cpu = loads(TINIEST), torch.device("cpu")
    memory = predict(config, 16, stage=0, device=cpu)
    comparison.prediction(config, 16, cpu, Decision("fp32", None), memory)


def become(
    arguments: list[str],
    streams: tuple[IO[bytes], IO[bytes]],
    environment: Mapping[str, str] = MappingProxyType({}),
    first: Callable[[], None] = lambda: None,
) -> None:
    """In the child: be a rank of the command, and never return."""
    status = 70
    try:
        torch.set_num_threads(1)  # before anything: the parent's thread pool does not exist here
        vars(launch)["num_cores"] = lambda: 1
        os.environ.pop(launch.OPENMP, None)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
        os.environ |= environment
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else the library warns of the fork
        sys.argv = ["colonnade", *arguments]
        for known in REMEMBERED:
            predicted.remember(known)
        first()
        cli.main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001  whatever it is, the parent reads it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _as_rank(rank: int, num_ranks: int, folder: str) -> dict[str, str]:
    """What torchrun would tell it, and where ranks meet; of one rank nothing."""
    if num_ranks == 1:
        return {}
    of_all = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), launch.FOLDER: folder}
    of_machine = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks), "GLOO_SOCKET_IFNAME": "lo"}
    return of_all | of_machine


def ranks_of(supervisor: int) -> dict[int, int]:
    """The process of each rank that a supervisor, a process of Linux, has started and that has not ended."""
    found: dict[int, int] = {}
    with suppress(OSError):
        for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
            name, _, rank = Path(f"/proc/{child}/comm").read_text().strip().partition(" ")
            if name == "rank":
                found[int(rank)] = int(child)
    return found


def _busy() -> float:
    """How many times as long as on an idle machine what a process does may take now, by the load; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _text(stream: IO[bytes]) -> str:
    with stream:
        stream.seek(0)
        return stream.read().decode()
