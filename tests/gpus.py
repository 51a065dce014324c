"""The suite computes on CPUs, on machines with GPUs too: what needs one is in `tests/gpu`, and has its own processes.

torch refuses gradients in a process that was forked from one which has computed any, if there is a GPU, and CUDA does
not survive a fork at all. So the suite's processes see none, and those that use one come from a server which is forked
before anything has been computed.
"""

import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests import commands
from tests.distributed import run_on_ranks

SEEN, KEPT = "CUDA_VISIBLE_DEVICES", "COLONNADE_TESTS_VISIBLE_DEVICES"
"""What CUDA reads, and where the user's value of it is kept; empty: all are visible."""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["tests.commands", "tests.parity.compare", "colonnade.train.loop", "colonnade.planner.banner"]
)


def hide() -> None:
    """From this process and all that it starts, unless they `see`."""
    os.environ.setdefault(KEPT, os.environ.get(SEEN, ""))
    os.environ[SEEN] = ""


def see() -> None:
    """In a process that has not asked CUDA for anything."""
    kept = os.environ.get(KEPT, "")
    os.environ.pop(SEEN, None)
    if kept:
        os.environ[SEEN] = kept


@cache
def are_there() -> bool:
    code = "from tests import gpus; gpus.see()\nfrom colonnade.launch.devices import count_gpus; print(count_gpus())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() not in ("0", "None")


def process(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a function of a module in a process that sees the GPUs."""
    started = SERVER.Process(target=_seeing, args=(target, *args), daemon=True)
    started.start()
    return started


def _seeing(target: Callable[..., None], *args: Any) -> None:
    see()
    target(*args)


def on_gpu_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, time_limit: float = 120.0) -> list[Any]:
    """As `run_on_ranks`, for functions of modules, on processes that all see the first GPU."""
    asked = pickle.dumps((function, args))  # as bytes: multiprocessing would send each tensor by a file of its own
    return run_on_ranks(_on_first_gpu, num_ranks, asked, time_limit=time_limit, start=process)


def _on_first_gpu(rank: int, num_ranks: int, asked: bytes) -> Any:
    torch.cuda.set_device(0)
    function, args = pickle.loads(asked)
    return function(rank, num_ranks, *args)


@dataclass
class Command:
    """`colonnade arguments` that runs."""

    process: BaseProcess
    folder: "tempfile.TemporaryDirectory[str]" = field(default_factory=tempfile.TemporaryDirectory)

    def answer(self, timeout: float = 120.0) -> commands.Answer:
        self.process.join(timeout)
        late = self.process.exitcode is None
        if late:
            self.process.kill()
            self.process.join()
        out, err = (Path(self.folder.name, name).read_text() for name in ("out", "err"))
        self.folder.cleanup()
        assert not late, f"not ended within {timeout} s: {out}{err}"
        assert self.process.exitcode is not None
        return commands.Answer(self.process.exitcode, out, err)


def start(*arguments: object, **environment: str) -> Command:
    folder = tempfile.TemporaryDirectory()
    return Command(process(_become, folder.name, [str(each) for each in arguments], environment), folder)


def command(*arguments: object, timeout: float = 120.0, **environment: str) -> commands.Answer:
    """What `colonnade arguments` answers, with more in its environment, where there is a GPU."""
    return start(*arguments, **environment).answer(timeout)


def _become(folder: str, arguments: list[str], environment: dict[str, str]) -> None:
    with Path(folder, "out").open("w+b") as out, Path(folder, "err").open("w+b") as err:
        commands.become(arguments, (out, err), environment)


def wait_for(path: Path, timeout: float = 90.0) -> None:
    """Until something has been written to a file."""
    end = time.monotonic() + timeout
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < end, f"{path} was not written within {timeout} s"
        time.sleep(0.05)
