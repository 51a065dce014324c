"""Starting the ranks of a run, and joining them: the only file that reads the environment.

    alone                                            under torchrun
    ─────                                            ──────────────
    colonnade train …        (the supervisor)        torchrun --nproc-per-node=N … colonnade train …
     └─ run_ranks(N, command)                         └─ N ranks, found through env://
         ├─ rank 0   output shown
         ├─ rank 1   output kept aside               each rank: connect(…) … disconnect()
         └─ …        found through a file

The supervisor (`supervisor.py`) imports no torch. Each rank holds one end of a pipe whose other end only the supervisor
holds: however the supervisor dies, its ranks see the pipe close and die too.
"""

import ctypes
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from colonnade.errors import LayoutError
from colonnade.mesh.board import Board, FolderBoard, StoreBoard
from colonnade.mesh.supervisor import Supervisor, note_of_failure

if TYPE_CHECKING:
    import torch

FOLDER = "COLONNADE_LAUNCH_FOLDER"  # where the ranks of a local run find each other and note the time of their errors
PIPE = "COLONNADE_LAUNCH_PIPE"  # the descriptor that closes when the supervisor is gone
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt, from malloc.h


# --- in a rank --------------------------------------------------------------------------------------------------------


def is_rank() -> bool:
    """Whether this process is one rank of a run, started by `run_ranks` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_and_size() -> tuple[int, int]:
    """This process' rank and the number of ranks; (0, 1) where there is one process only."""
    if not is_rank():
        return 0, 1
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise LayoutError(
            f"RANK = {rank!r} and WORLD_SIZE = {size!r} in the environment name no rank of a run: a launcher sets them "
            "to whole numbers, RANK below WORLD_SIZE. Start with torchrun, or unset both."
        )
    return int(rank), int(size)


def local_rank() -> int:
    """This rank's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_local_ranks() -> int:
    """How many ranks share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def connect(num_ranks: int, device: str, *, threads: int = 0, timeout: float = 1800.0) -> "torch.device":
    """Join this process to the `num_ranks` ranks of its run, and return the device to compute on.

    `device` is "cpu", "cuda" or "auto" (CUDA where every local rank can have a GPU of its own). CPU tensors travel over
    gloo, CUDA tensors over NCCL. `threads` is the CPU threads of this rank; 0 shares the cores evenly between the local
    ranks. An operation between ranks that takes longer than `timeout` seconds fails. One process that nobody launched
    forms no process group. LayoutError if the launcher's ranks are not `num_ranks`, or if a GPU is missing.
    """
    import torch
    import torch.distributed as dist

    rank, size = rank_and_size()
    _check_size(size, num_ranks)
    _die_with_supervisor()
    torch.set_num_threads(threads or max(1, num_cores() // num_local_ranks()))
    place = _choose_device(device, torch.cuda.device_count())
    if place.type == "cpu":
        _keep_freed_memory()
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if is_rank():
        _note_errors()
        folder = os.environ.get(FOLDER)
        if folder is None and "MASTER_ADDR" not in os.environ:
            raise LayoutError(
                "RANK and WORLD_SIZE are set in the environment, but MASTER_ADDR is not: where the other ranks are is "
                "unknown. Start with torchrun, which sets them all, or unset RANK and WORLD_SIZE."
            )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
            init_method=f"file://{folder}/rendezvous" if folder else "env://",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    return place


def board() -> Board | None:
    """Where the ranks of this run, connected, report to each other; None where there is one process only."""
    if not is_rank():
        return None
    if FOLDER in os.environ:
        return FolderBoard(Path(os.environ[FOLDER]))
    import torch.distributed as dist

    # A connection of its own: that of the process group is held by whatever waits on it.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, wait_for_workers=False)  # type: ignore[attr-defined]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return StoreBoard(dist.PrefixStore(f"colonnade/{attempt}", store))  # type: ignore[attr-defined]


def neighbours() -> range:
    """The ranks of this machine."""
    first = rank_and_size()[0] - local_rank()
    return range(first, first + num_local_ranks())


def disconnect() -> None:
    """Leave the run's process group. Harmless where there is none. May stand in a `finally`."""
    import torch.distributed as dist

    if isinstance(sys.exc_info()[1], Exception):
        _note_error()  # before the other ranks lose their connection to this one
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_size(size: int, num_ranks: int) -> None:
    if size == num_ranks:
        return
    raise LayoutError(
        f"The launcher started {size} {'rank' if size == 1 else 'ranks'} (WORLD_SIZE = {size}), but parallel.tp × "
        f"parallel.pp × parallel.dp = {num_ranks}: every rank needs one place in the layout, and every place a rank. "
        f"Start {num_ranks} (torchrun --nproc-per-node={num_ranks} on one machine), or set parallel.dp so that the "
        f"product is {size}."
    )


def _choose_device(device: str, num_gpus: int) -> "torch.device":
    import torch

    needed = num_local_ranks()
    if device == "cpu" or (device == "auto" and num_gpus < needed):
        return torch.device("cpu")
    if num_gpus >= needed:
        return torch.device("cuda", local_rank())
    raise LayoutError(
        f"train.device = {device!r}, but this machine has {num_gpus} CUDA GPUs for {needed} local ranks: each rank "
        f"needs a GPU of its own. Set train.device = 'cpu', or lower parallel.tp × parallel.pp × parallel.dp."
    )


def _keep_freed_memory() -> None:
    """Have glibc keep freed blocks of up to 32 MB for the next tensors instead of handing each back to the system.

    Else every activation above a threshold costs a page fault for each 4 KB, every time it is made (figures:
    docs/design/11-freed-memory.md). Other C libraries, which have no `mallopt`, stay as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # larger blocks, few and long, go back as before
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _die_with_supervisor() -> None:
    """Watch the pipe whose other end the supervisor holds; kill this process when it closes."""
    if PIPE not in os.environ:
        return

    def watch(pipe: int) -> None:
        os.read(pipe, 1)  # returns only when the supervisor is gone: nothing is ever written
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, args=(int(os.environ[PIPE]),), daemon=True, name="die-with-supervisor").start()


def _note_errors() -> None:
    """Note when an uncaught exception is raised: exits alone do not tell which of two failures was the first."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _note_error()
        previous(kind, error, trace)

    sys.excepthook = hook


def _note_error() -> None:
    if FOLDER not in os.environ:
        return
    note = note_of_failure(Path(os.environ[FOLDER]), rank_and_size()[0])
    if not note.exists():
        note.with_suffix(".new").write_text(str(time.monotonic()))
        note.with_suffix(".new").rename(note)


# --- in the supervisor ------------------------------------------------------------------------------------------------


def run_ranks(num_ranks: int, command: list[str]) -> int:
    """Run `command` as `num_ranks` local ranks, and return the exit status of the run.

    Rank 0 has this process' input and output, so a progress bar on its output lives; its error stream is shown within
    a second. When a rank fails, its error is shown whole under a line that names it, and the others are stopped.
    Ctrl-C reaches every rank once, and they may take their time to save; a second one stops them at once. SIGTERM is
    passed on.
    """
    with tempfile.TemporaryDirectory(prefix="colonnade-") as folder:
        supervisor = Supervisor(command, num_ranks, Path(folder), partial(_environment, num_ranks, Path(folder)))
        try:
            return supervisor.run()
        finally:
            supervisor.close()


def _environment(num_ranks: int, folder: Path, rank: int, pipe: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, PIPE: pipe}
    environment = {**os.environ, **{name: str(value) for name, value in numbers.items()}, FOLDER: str(folder)}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # all ranks are here: a host name that does not resolve, or a VPN, is no hindrance
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environment
