"""Starting the processes of local ranks: forked where that can be, else each as a new interpreter."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from colonnade.launch.fork_server import Forked, ForkError, ForkServer, can_fork, forget, fork_server

Process = subprocess.Popen[bytes] | Forked
SOON = 1.0
"""[seconds] In which an ended process is waited for."""
ANEW = "Ranks cannot be forked: {}. Each starts as a new process, which takes longer.\n"


@dataclass
class Starter:
    """Starts ranks that run one command."""

    command: Sequence[str]
    keep: Sequence[int]
    """Descriptors that every rank inherits."""
    say: Callable[[str], None]
    """Shows what a user should know."""
    imports: Sequence[str] = ()
    """Modules that ranks import."""
    forks: ForkServer | None = None

    def __post_init__(self) -> None:
        if can_fork(self.command):
            self.forks = fork_server(self.imports)

    def is_ready(self) -> bool:
        """Whether ranks would start at once: those that are forked wait for what is imported for all of them."""
        try:
            return self.forks is None or self.forks.is_ready()
        except ForkError as error:
            self._without(error)
            return True

    def start(
        self, name: str, environment: Mapping[str, str], pipe: int, output: IO[bytes] | None, errors: IO[bytes]
    ) -> Process:
        """A process in a session of its own, which inherits `pipe`. Without an `output` it has this process' own, and
        its input.
        """
        if self.forks is not None:
            try:
                with open(os.devnull, "rb") as nothing:
                    first = nothing.fileno() if output is not None or not _is_open(0) else 0
                    theirs = {0: first, 1: 1 if output is None else output.fileno(), 2: errors.fileno(), pipe: pipe}
                    theirs |= {each: each for each in self.keep}
                    return self.forks.start(self.command, environment, theirs, name)
            except ForkError as error:
                self._without(error)
        return subprocess.Popen(
            self.command,
            env=environment,
            stdin=None if output is None else subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            pass_fds=(pipe, *self.keep),
            start_new_session=True,
        )

    def _without(self, error: ForkError) -> None:
        forget()
        self.forks = None
        self.say(ANEW.format(error))


def send(process: Process, number: int) -> None:
    """Send a signal to a process that `start` has made and to what that has started, unless it has ended."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:  # so macOS says it of one that has ended, until somebody has waited for it
        if isinstance(process, Forked) or not _ends(process):
            raise


def _ends(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(SOON)
    except subprocess.TimeoutExpired:
        return False
    return True


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
