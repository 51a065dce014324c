"""Starting the ranks of a run, and joining them: with `elastic.py` the only file that reads the environment.

    alone                                            under torchrun
    ─────                                            ──────────────
    colonnade train …        (the supervisor)        torchrun --nproc-per-node=N … colonnade train …
     └─ run_ranks(N, command)                         └─ N ranks, found through env://
         ├─ rank 0   output shown
         ├─ rank 1   output kept aside               each rank: connect(…) … disconnect()
         └─ …        found through a file

The supervisor (`supervisor.py`) imports no torch. Each rank holds one end of a pipe whose other end only the supervisor
holds: however the supervisor dies, its ranks see the pipe close and die too. On Linux the kernel ends them at once,
from their first lines on (`end_with_supervisor`). What is left then, `guard.py` tidies.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from colonnade.control_groups import num_cores
from colonnade.errors import LayoutError, mistake, name_of
from colonnade.launch import idle, process
from colonnade.launch.board import Board, FolderBoard, StoreBoard, note, note_of_failure
from colonnade.launch.devices import check_threads, choose_device
from colonnade.launch.elastic import is_shared, store_of_group, store_of_start
from colonnade.launch.freed_memory import keep_freed_memory
from colonnade.launch.reach import explained
from colonnade.launch.supervisor import At, Ended, Failure, Supervisor

if TYPE_CHECKING:
    import torch

FOLDER = "COLONNADE_LAUNCH_FOLDER"  # where the ranks of a local run find each other and note the time of their errors
PLACE = "COLONNADE_PLACE"  # where a rank of a local run runs: the number of a GPU, or of nothing in particular
MEMORY = "COLONNADE_MEMORY"  # where a supervised run keeps copies of its state in memory
FAULT = "COLONNADE_FAULT"  # when the supervisor noticed the fault before this start (monotonic), and the last step then
BEGAN = "COLONNADE_BEGAN"  # when the supervisor started ranks for the first time (monotonic)
PIPE = "COLONNADE_LAUNCH_PIPE"  # the descriptor that closes when the supervisor is gone
OPENMP = "OMP_NUM_THREADS"  # with how many threads a process computes
STARTED = "COLONNADE_STARTED"  # how many ranks torchrun has started, where the layout takes fewer
_WATCH = "end-with-supervisor"  # the thread that reads it
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


# --- in a rank --------------------------------------------------------------------------------------------------------


def is_rank() -> bool:
    """Whether this process is one rank of a run, started by `run_ranks` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def has_supervisor() -> bool:
    """Whether this process is a rank that `run_ranks` has started."""
    return PIPE in os.environ


def memory_folder() -> Path | None:
    """Where this run keeps copies of its state in memory; None where nobody has made such a folder."""
    return Path(os.environ[MEMORY]) if MEMORY in os.environ else None


def file_of_start() -> str | None:
    """The text of the configuration file with which the supervisor of this rank was started; None where it had none."""
    file = _file_of_start(os.environ[FOLDER]) if FOLDER in os.environ else None
    return file.read_text(encoding="utf-8") if file is not None and file.exists() else None


def _file_of_start(folder: str) -> Path:
    return Path(folder) / "configuration.toml"


def last_fault() -> tuple[float, int] | None:
    """The fault before this start: when its supervisor noticed it (`time.monotonic`), and the last step until then."""
    if FAULT not in os.environ:
        return None
    when, step = os.environ[FAULT].split()
    return float(when), int(step)


def began() -> float | None:
    """When the supervisor of this rank started ranks for the first time (`time.monotonic`); None in these."""
    return float(os.environ[BEGAN]) if BEGAN in os.environ else None


def speaks_first() -> bool:
    """Whether this is the first process of a run: the one that a user started, or torchrun's rank 0."""
    return not is_rank() or (FOLDER not in os.environ and rank_and_size()[0] == 0)


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
    return _whole("LOCAL_RANK", 0)


def num_local_ranks() -> int:
    """How many ranks share this machine."""
    return _whole("LOCAL_WORLD_SIZE", 1)


def _whole(name: str, least: int) -> int:
    said = os.environ.get(name, str(least))
    if not said.isdecimal() or int(said) < least:
        raise LayoutError(
            f"{name} = {said!r} in the environment is no whole number of {least} or more: a launcher sets it. Start "
            "with torchrun, or unset it."
        )
    return int(said)


def connect(
    num_ranks: int, device: str, *, threads: int = 0, timeout: float = 1800.0, deterministic: bool = False
) -> "torch.device":
    """Join this process to the `num_ranks` ranks of its run, and return the device to compute on.

    `device` is "cpu", "cuda" or "auto" (`choose_device`). CPU tensors travel over gloo, CUDA tensors over NCCL.
    `threads` is the CPU threads of this rank; 0: those of `num_threads`. An operation between ranks that takes longer
    than `timeout` seconds fails. One process that nobody launched forms no process group. `deterministic`: on CUDA,
    only kernels whose sums have an order. LayoutError if the launcher's ranks are not `num_ranks`, or if a GPU is
    missing.
    """
    import torch
    import torch.distributed as dist

    rank, size = rank_and_size()
    check_size(num_ranks)
    end_with_supervisor()
    torch.set_num_threads(checked_threads(threads))
    ask_for_queues()
    place = _choose_device(device, torch.cuda.device_count())
    if place.type == "cpu":
        keep_freed_memory()
    if place.type == "cuda":
        _prepare_cuda(deterministic=deterministic)
        torch.cuda.set_device(place)
    if is_rank():
        _note_errors()
        folder = os.environ.get(FOLDER)
        port = os.environ.get("MASTER_PORT", "")
        if folder is None and not ("MASTER_ADDR" in os.environ and port.isdecimal() and int(port) < 1 << 16):
            raise LayoutError(
                "RANK and WORLD_SIZE are set in the environment, but MASTER_ADDR is not, or MASTER_PORT is no port: "
                "where the other ranks are is unknown. Start with torchrun, which sets them all, or unset RANK and "
                "WORLD_SIZE."
            )
        store = store_of_group(rank, size, timeout, new=True) if is_shared() else None
        method = None if store is not None else f"file://{folder}/rendezvous" if folder else "env://"
        backend, limit = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo", timedelta(seconds=timeout)
        with explained():
            dist.init_process_group(backend, init_method=method, store=store, rank=rank, world_size=size, timeout=limit)
    return place


def elastic_run() -> str | None:
    """Under torchrun the name of its run (--rdzv-id), which its later attempts share; None elsewhere."""
    return os.environ.get("TORCHELASTIC_RUN_ID") if is_rank() else None


def attempt() -> int:
    """How often torchrun has started its ranks anew."""
    return _whole("TORCHELASTIC_RESTART_COUNT", 0)


def use_first(num_ranks: int) -> bool:
    """Under torchrun with more ranks than a layout takes: be one of the first `num_ranks`; False where this is none."""
    rank, size = rank_and_size()
    if is_shared():
        _store()  # all ranks agree on its name, also those that then are idle
    if rank >= num_ranks:
        return False
    local = min(num_local_ranks(), num_ranks - (rank - local_rank()))
    os.environ |= {STARTED: str(size), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(local)}
    return True


def tell_idle() -> None:
    """On rank 0: ranks that the layout leaves idle may end. Returns when they know it, or the store is gone."""
    from torch.distributed import DistError

    rank, size = rank_and_size()
    if num_idle := int(os.environ.get(STARTED, size)) - size:
        with suppress(DistError):
            idle.tell(store_of_start(rank, size, idle.PATIENCE), num_idle)


def be_idle() -> None:
    """In a rank that the layout leaves idle: stay until the run has ended."""
    idle.stay(_store())


def _store() -> Any:
    return store_of_start(*rank_and_size())


def board() -> Board | None:
    """Where the ranks of this run, connected, report to each other; None where there is one process only."""
    if not is_rank():
        return None
    if FOLDER in os.environ:
        return FolderBoard(Path(os.environ[FOLDER]))
    return StoreBoard(store_of_group(*rank_and_size()))


def neighbours() -> range:
    """The ranks of this machine."""
    first = rank_and_size()[0] - local_rank()
    return range(first, first + num_local_ranks())


def disconnect() -> None:
    """Leave the run's process group, if any; one that its own program has made stays. May stand in a `finally`."""
    import torch.distributed as dist

    note_failure(sys.exc_info()[1])  # before the other ranks lose their connection to this one
    if is_rank() and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def num_threads(num_ranks: int) -> int:
    """CPU threads of each of so many ranks on this machine, where nobody has chosen: what OMP_NUM_THREADS says, else an
    equal share of the cores.

    torchrun sets the variable to 1 for several ranks where it is not set: there, 1 says nothing.
    """
    told = os.environ.get(OPENMP, "").partition(",")[0].strip()
    says = told.isdecimal() and int(told) > 0 and not (int(told) == 1 and num_ranks > 1 and elastic_run() is not None)
    return int(told) if says else max(1, num_cores() // num_ranks)


def checked_threads(chosen: int) -> int:
    """CPU threads of this rank: those that are chosen, or for 0 those of `num_threads`. ConfigError for too many."""
    threads = chosen or num_threads(num_local_ranks())
    check_threads(threads, "train.threads or --threads" if chosen else OPENMP)
    return threads


def cache_folder() -> Path | None:
    """Where this user's programs keep what can be made again; None where no home is known, and no such folder named."""
    if told := os.environ.get("XDG_CACHE_HOME"):
        return Path(told) / "colonnade"
    try:
        return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "colonnade"
    except RuntimeError:
        return None


def check_size(num_ranks: int) -> None:
    """LayoutError if the launcher has started more or fewer ranks than these."""
    size = rank_and_size()[1]
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

    kind = choose_device(device, num_gpus, num_local_ranks())
    return torch.device("cuda", local_rank()) if kind == "cuda" else torch.device("cpu")


def ask_for_queues() -> None:
    """To be called before CUDA's driver is: a stream of a process group that waits holds up what shares its queue."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # the most; 8 unless told otherwise


def _prepare_cuda(*, deterministic: bool) -> None:
    """What CUDA's libraries read from the environment when the device is first used; what the user has set stays."""
    import torch
    from torch.utils import deterministic as settings

    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS promises equal bits with it alone
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it: a pass saved


def end_with_supervisor() -> None:
    """In a rank: see to it that this process ends at once when its supervisor does. Harmless elsewhere, and twice.

    The sooner it is called, the less time a supervisor that is killed leaves ranks behind.
    """
    if PIPE not in os.environ or any(thread.name == _WATCH for thread in threading.enumerate()):
        return
    pipe = int(os.environ[PIPE])
    if sys.platform == "linux":  # by the kernel, whatever holds the interpreter: importing torch takes seconds
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([pipe], [], [], 0)[0]:
        os.kill(os.getpid(), signal.SIGKILL)  # it has ended before it could be watched

    def watch() -> None:
        os.read(pipe, 1)  # returns only when the supervisor is gone: nothing is ever written
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name=_WATCH).start()


def _note_errors() -> None:
    """Note when an uncaught exception is raised: exits alone do not tell which of two failures was the first."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note_failure(error)
        previous(kind, error, trace)

    sys.excepthook = hook


def note_failure(error: BaseException | None) -> None:
    """Tell the supervisor that this rank has raised, and in which words if it is a mistake of the user; once.

    To be called before other ranks lose their connection to this one: what they raise then is a consequence. None, and
    what asks a process to end, is no failure.
    """
    if FOLDER not in os.environ or not isinstance(error, Exception):
        return
    file = note_of_failure(Path(os.environ[FOLDER]), rank_and_size()[0])
    if not file.exists():
        note(file, Failure(time.monotonic(), mistake(error), _first_line(error)).to_json())


def _first_line(error: Exception) -> str:
    """RuntimeError: CUDA error: …; of what a disk may get over DiskError: …"""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{name_of(error)}: {line[:300]}"


# --- in the supervisor ------------------------------------------------------------------------------------------------


def run_ranks(
    num_ranks: int,
    command: list[str],
    *,
    file: str | None = None,
    keep: Sequence[int] = (),
    imports: Sequence[str] = (),
    after_a_loss: Callable[[], str] = lambda: "",
) -> int:
    """Run `command` as `num_ranks` local ranks, and return the exit status of the run.

    Rank 0 has this process' input and output, so a progress bar on its output lives; its error stream is shown within
    a second. When a rank fails, its error is shown whole under a line that names it, and the others are stopped; a
    mistake of the user is shown alone, whichever rank finds it. Ctrl-C reaches every rank once, and they may take their
    time to save; a second one stops them at once. SIGTERM and SIGHUP are passed on. `file`: what `file_of_start` is in
    the ranks. `keep`: descriptors that every rank inherits. `imports`: modules that ranks import, for where they are
    forked. `after_a_loss` is what to do when a rank was killed or has never come, in words.
    """
    ended = run_on(range(num_ranks), command, file=file, keep=keep, imports=imports, after_a_loss=after_a_loss)
    for number in ended.unheard:
        signal.raise_signal(number)
    return ended.status


def run_on(
    places: Sequence[int],
    command: list[str],
    *,
    file: str | None = None,
    keep: Sequence[int] = (),
    imports: Sequence[str] = (),
    after_a_loss: Callable[[], str] = lambda: "",
    at: At | None = None,
    choose_gpus: bool = False,
    memory: Path | None = None,
    fault: tuple[float, int] | None = None,
    began: float | None = None,
) -> Ended:
    """As `run_ranks`, a rank on each of these places of this machine, and tell more of the end.

    `choose_gpus`: places are GPUs, others are hidden. `memory`, `fault` and `began`: what `memory_folder`, removed if
    this process is killed, `last_fault` and `began` are in the ranks.
    """
    told = {MEMORY: memory, FAULT: fault and f"{fault[0]} {fault[1]}", BEGAN: began}
    own = {name: str(value) for name, value in told.items() if value is not None}
    events: SimpleQueue[Any] = SimpleQueue()  # of signals until the folder is gone
    with process.passed_on(events.put), tempfile.TemporaryDirectory(prefix="colonnade-") as folder:
        if file is not None:
            _file_of_start(folder).write_text(file, encoding="utf-8")
        environment = partial(_environment, tuple(places), Path(folder), choose_gpus)
        supervisor = Supervisor(
            command,
            len(places),
            Path(folder),
            lambda rank, pipe: environment(rank, pipe) | own,
            events=events,
            keep=tuple(keep),
            imports=tuple(imports),
            after_a_loss=after_a_loss,
            at=at,
            own=() if memory is None else (memory,),
        )
        with closing(supervisor):
            status = supervisor.run()
    return Ended(status, next(iter(supervisor.asked), 0), supervisor.cause, supervisor.unheard())


def _environment(places: tuple[int, ...], folder: Path, choose_gpus: bool, rank: int, pipe: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(places), "LOCAL_WORLD_SIZE": len(places)}
    numbers |= {PIPE: pipe, PLACE: places[rank]}
    environment = {**os.environ, **{name: str(value) for name, value in numbers.items()}, FOLDER: str(folder)}
    if choose_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = _named_gpus(places)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # all ranks are here: a host name that does not resolve, or a VPN, is no hindrance
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environment


def _named_gpus(places: Sequence[int]) -> str:
    """Of the GPUs that this process sees those with these numbers, as CUDA_VISIBLE_DEVICES names them."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return ",".join(named[place] if named else str(place) for place in places)


def hide_other_gpus(places: Sequence[int]) -> None:
    """From here on this process, and those that it starts, see these GPUs alone. Before torch looks for any."""
    os.environ["CUDA_VISIBLE_DEVICES"] = _named_gpus(places)
