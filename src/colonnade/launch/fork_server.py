"""Ranks forked from one process that has imported what they need: importing torch takes each seconds.

    supervisor ─── starts ───▶ fork server: imports once, computes nothing
     │   ─── command, environment, descriptors ───▶ │
     │                                              └─ forks twice: the first ends, the second is the rank,
     └─ and adopts it: a rank is the supervisor's own child ◀───────────────── left without a parent

A rank has the environment, descriptors, session, signals and cores that a new process of the supervisor would have;
lists of processes alone show the difference: there its command is the fork server's, and its name is `rank N`.
Linux only, where a process can adopt; and not where there are GPUs: there it has not been tried.
"""

import atexit
import ctypes
import fcntl
import json
import os
import runpy
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module

from colonnade.garbage import imports_stay
from colonnade.launch.devices import count_gpus

TORCH = "torch.distributed"
"""What every rank imports."""
READY = b"\0"
_NUMBER = struct.Struct("!I")
_MOST_DESCRIPTORS = 64
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36  # from linux/prctl.h


@dataclass(frozen=True)
class _Request:
    """A rank to start. Its descriptors are sent along, in the order of `descriptors`."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    descriptors: list[int]
    """Their numbers in the rank."""
    parent: int
    """The process that adopts it."""
    folder: str
    cores: list[int]
    name: str


def can_fork(command: Sequence[str]) -> bool:
    """Whether `command` is a module for this very interpreter, on a system and a machine where ranks are forked."""
    return sys.platform == "linux" and [*command[:2]] == [sys.executable, "-m"] and count_gpus() == 0


# --- in the supervisor ------------------------------------------------------------------------------------------------


@dataclass
class Forked:
    """A process that a fork server has started, as `subprocess.Popen` shows one."""

    pid: int
    status: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> int:
        """Its exit status, when it has ended; −n where signal n has ended it."""
        with self.lock:
            if self.status is None:
                self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self.status


@dataclass
class ForkServer:
    """The process that ranks are forked from. `start` as soon as `is_ready`; `close` ends it, and no rank."""

    imports: Sequence[str]
    process: "subprocess.Popen[bytes]" = field(init=False)
    channel: socket.socket = field(init=False)
    ready: bool = False

    def __post_init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno()), *self.imports],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Whether it has imported everything, by then at the latest. ForkError if it has ended."""
        if not self.ready and select.select([self.channel], [], [], seconds)[0]:
            self.ready = self._received(1) == READY
        return self.ready

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int], name: str
    ) -> Forked:
        """A process of its own session that runs a `command` for which `can_fork`. `descriptors`: of its numbers, which
        of ours each is; it has no others. ForkError if there is no such process.
        """
        _, _, module, *arguments = command
        me, cores = os.getpid(), sorted(os.sched_getaffinity(0))
        with _adopting():
            try:
                request = _Request(
                    module, arguments, dict(environment), list(descriptors), me, os.getcwd(), cores, name
                )
                content = json.dumps(asdict(request)).encode()
                socket.send_fds(self.channel, [_NUMBER.pack(len(content))], list(descriptors.values()))
                self.channel.sendall(content)
            except OSError as error:
                raise ForkError(f"what they are forked from does not answer ({error})") from error
            (pid,) = _NUMBER.unpack(self._received(_NUMBER.size))
        if not pid:
            raise ForkError("the system did not start one, or did not let it be adopted")
        return Forked(pid)

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()

    def _received(self, size: int) -> bytes:
        try:
            found = self.channel.recv(size, socket.MSG_WAITALL)
        except OSError as error:
            raise ForkError(f"what they are forked from does not answer ({error})") from error
        if len(found) < size:
            raise ForkError("what they are forked from has ended")
        return found


class ForkError(Exception):
    """Why ranks cannot be forked."""


_there: list[ForkServer] = []


def fork_server(imports: Sequence[str]) -> ForkServer:
    """This process' own, which is started at the first call and serves all others, whatever they import."""
    if not _there:
        _there.append(ForkServer([TORCH, *imports]))
        atexit.register(forget)
    return _there[0]


def forget() -> None:
    """End the fork server of this process, if it has one."""
    while _there:
        _there.pop().close()


@contextmanager
def _adopting() -> Iterator[None]:
    """Within, whoever is left without a parent below this process becomes its child."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


# --- in the fork server -----------------------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> _Request | None:
    """Returns in each rank, with what it is to be; None when the supervisor has ended or wants no more."""
    while (asked := _next(channel)) is not None:
        request, descriptors = asked
        if (pid := _fork_away(request.parent, request.name)) is None:
            channel.close()
            _become(request, descriptors)
            return request
        for each in descriptors:
            os.close(each)
        channel.sendall(_NUMBER.pack(pid))
    return None


def _next(channel: socket.socket) -> tuple[_Request, list[int]] | None:
    """What is asked for, and the descriptors that came with it."""
    head, descriptors, _, _ = socket.recv_fds(channel, _NUMBER.size, _MOST_DESCRIPTORS, socket.MSG_WAITALL)
    if len(head) < _NUMBER.size:
        return None
    (size,) = _NUMBER.unpack(head)
    content = bytearray()
    while len(content) < size:
        if not (more := channel.recv(size - len(content))):
            return None
        content += more
    return _Request(**json.loads(content)), list(descriptors)


def _fork_away(parent: int, name: str) -> int | None:
    """None in a new process of this name, of which `parent` is the parent, in a session of its own; here its number, 0
    if that has failed.
    """
    reading, writing = os.pipe()
    if (between := _fork()) == 0:
        os.close(reading)
        between = os.getpid()
        try:
            if _fork() != 0:
                os._exit(0)
        except OSError:
            os._exit(1)
        while os.getppid() == between:  # until its end, which is next
            time.sleep(1e-4)
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        _prctl(_PR_SET_NAME, name.encode())
        os.write(writing, _NUMBER.pack(os.getpid()))
        os.close(writing)
        return None
    os.close(writing)
    os.waitpid(between, 0)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read(_NUMBER.size)
    return int(_NUMBER.unpack(told)[0]) if told else 0


def _fork() -> int:
    with warnings.catch_warnings():  # 3.12 warns where there are threads: libraries' own, which know of forks
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(request: _Request, descriptors: Sequence[int]) -> None:
    """Makes this process what one of the supervisor would be."""
    os.chdir(request.folder)
    if not sys.flags.safe_path:
        sys.path[0] = request.folder
    os.sched_setaffinity(0, request.cores)
    os.environ.clear()
    os.environ.update(request.environment)
    above = max(*request.descriptors, *descriptors) + 1
    held = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for number, each in zip(request.descriptors, held, strict=True):
        os.dup2(each, number)
        os.close(each)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    sys.argv[1:] = request.arguments


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main() -> None:
    """`python -m` this module, with the descriptor of its channel and what it is to import."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    with imports_stay():
        for name in sys.argv[2:]:
            import_module(name)
    channel.sendall(READY)
    if (request := _serve(channel)) is not None:
        try:
            runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                raise
            _end(end.code or 0)
        _end(0)


def _end(status: int) -> None:
    """End as Python does, but for freeing what was imported: of a forked process that would copy all of it first."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as `multiprocessing` does with it
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
