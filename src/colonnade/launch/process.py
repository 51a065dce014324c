"""How a process of a command hears the signals that it is sent, what it may hold open, what becomes of its output when
nobody reads it any more, and how it ends beside threads that still compute.
"""

import io
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

ASK_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (*ASK_TO_END, signal.SIGTSTP, signal.SIGUSR1)
MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGTSTP)  # nohup and the like stay in force; who asks a run to stop is heard
BACKGROUND = "checkpoint"  # the name of threads that compute beside training
OPEN_FILES = 1 << 16
"""The most open files that a process asks for: some programs go through every number that they may have."""


def open_closed_streams() -> None:
    """Have each standard stream that this process was started without lead nowhere: what it opens would take the
    stream's number, and what it starts would miss it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # as the lowest number that is free: this one
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8", closefd=False))


def print_what_it_lacks() -> None:
    """Have standard output write characters that its encoding lacks as Python does on standard error, `\\xe9` for é:
    that one cannot be written is no reason to end. Nothing where somebody has said how else to write them.
    """
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and (
        stream.errors == "strict" or (stream.errors == "surrogateescape" and stream.encoding != "utf-8")
    ):
        stream.reconfigure(errors="backslashreplace")


def allow_open_files() -> None:
    """Let this process, and what it starts, hold open as many files as the system lets it ask for: of 1,024, which is
    usual, a blend of 500 token files would take all. macOS calls unlimited more than it grants: half of it, then, or
    half of that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return
        wanted //= 2


def outlive_readers() -> None:
    """Have this process work on where its output cannot be written: whoever read it has ended, as `tee` does at Ctrl-C,
    or the disk that it goes to is full. What was to be written meanwhile is lost.
    """
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    buffer = getattr(stream, "buffer", None)  # none where output is closed, or kept by a test; unbuffered by python -u
    raw = buffer.raw if isinstance(buffer, io.BufferedWriter) else buffer
    if not isinstance(stream, io.TextIOWrapper) or type(raw) is not io.FileIO:
        return stream
    stream.flush()
    mine = _Outliving(stream)
    return io.TextIOWrapper(
        mine if raw is buffer else io.BufferedWriter(mine),  # as Python makes it
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Outliving(io.FileIO):
    """The descriptor of a stream, to which nothing fails to be written."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._stream = stream  # which would close the descriptor when nobody holds it any more
        self._said = stream is sys.stderr

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self._said:
                self._said = True
                print(
                    f"Standard output cannot be written ({error.strerror}): this process works on without it. What a "
                    "run tells of its steps is in its folder too.",
                    file=sys.stderr,
                    flush=True,
                )
            return len(data)


def hear_ctrl_c() -> None:
    """Have SIGINT interrupt this process even where a script has started it in the background, ignoring the signal.

    Whoever sends it wants the run to stop, and a run saves first. What is started from here then hears it too.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def passed_on(hear: Callable[[int], object]) -> Iterator[None]:
    """Within, the signals of `PASSED_ON` do nothing here but that `hear` is told their numbers."""
    handlers = {number: signal.getsignal(number) for number in PASSED_ON}
    try:
        for number, handler in handlers.items():
            if handler != signal.SIG_IGN or number not in MAY_BE_IGNORED:
                signal.signal(number, lambda number, _: hear(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def hear_no_more() -> None:
    """Have nobody ask this process to end any more: what it was for has ended, and how is its exit status."""
    for number in ASK_TO_END:
        signal.signal(number, signal.SIG_IGN)


def end_beside_threads(status: object, error: Exception | None = None) -> None:
    """End the process at once, an uncaught `error` shown, if a thread of `BACKGROUND` is at work: nobody waits for it.
    While the interpreter ends, such a thread would free tensors without it, and C++ would abort the process.
    """
    if any(thread.name == BACKGROUND for thread in threading.enumerate()):
        if error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))
