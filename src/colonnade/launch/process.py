"""How a process of a command hears the signals that it is sent, and how it ends beside threads that still compute."""

import os
import signal
import sys
import threading

BACKGROUND = "checkpoint"  # the name of threads that compute beside training


def outlive_sigusr1() -> None:
    """Have SIGUSR1, which asks a run to save, end no process that is not ready for it yet."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def hear_ctrl_c() -> None:
    """Have SIGINT interrupt this process even where a script has started it in the background, ignoring the signal.

    Whoever sends it wants the run to stop, and a run saves first. What is started from here then hears it too.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
