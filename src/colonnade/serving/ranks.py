"""A model on several ranks that stays and answers: the process that asks starts them and talks with rank 0 by pipes.

    who asks (lm-eval)            colonnade rank-of-answers …         rank 0        rank 1 …
      one line of JSON ──stdin──────────────(supervisor)────────────▶ shares it ──▶ all answer together
      one line of JSON ◀─stdout────────────────────────────────────── answer

Standard input that ends ends the ranks, so they never outlive who asks. While nobody asks, rank 0 lets the others know
every minute that it is there: they wait for it as for any collective, which has a limit.
"""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import IO, Any

from colonnade.errors import ColonnadeError

IDLE_SECONDS = 60.0
_IDLE, _END = "idle", "end"
_ANSWER = "colonnade answer "
"""What a line of an answer begins with: the rest of the output is for people."""


class RanksEnded(ColonnadeError):
    """The ranks have ended before they had answered; they have said why on standard error."""


class RemoteModel:
    """The ranks, for who asks."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments`: of `colonnade rank-of-answers`. Returns when the model is there."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "colonnade", "rank-of-answers", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._answer()

    def ask(self, request: dict[str, Any]) -> list[Any]:
        """The answer to a request. RanksEnded where there will be none."""
        assert self._process.stdin is not None, "it was started with one"
        with suppress(BrokenPipeError):  # that they have ended is found where the answer is read
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the ranks, and return when they have ended. Harmless twice."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        self._process.wait()

    def _answer(self) -> list[Any]:
        assert self._process.stdout is not None, "it was started with one"
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                found: list[Any] = json.loads(line.removeprefix(_ANSWER))
                return found
            sys.stderr.write(line)
        status = self._process.wait()
        self.close()
        raise RanksEnded(f"the ranks that answer have ended with status {status}; what they said stands above")


def serve(answer: Callable[[Any], list[Any]], share: Callable[[str], str], *, asked: IO[str], is_first: bool) -> None:
    """In each rank: answer what rank 0 reads from `asked`, until that ends. `share` gives all ranks rank 0's text."""
    lines = _requests(asked) if is_first else iter(lambda: "", None)
    if is_first:
        _tell([])
    for line in lines:
        request = share(line)
        if request == _END:
            return
        if request == _IDLE:
            continue
        found = answer(json.loads(request))
        if is_first:
            _tell(found)


def _tell(found: list[Any]) -> None:
    print(f"{_ANSWER}{json.dumps(found)}", flush=True)


def _requests(asked: IO[str]) -> Iterator[str]:
    """Lines as they come, a sign of life where none does, and the end."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in asked:
            lines.put(line)
        lines.put(_END)

    threading.Thread(target=read, daemon=True, name="requests").start()
    while True:
        try:
            yield lines.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            yield _IDLE
