"""The next step's micro-batches, read from the disk or over the network while this step computes.

    main thread    take 1 ─ step 1 ───────── take 2 ─ step 2 ───────── take 3 …
    reader              └─ read 2 ─┘              └─ read 3 ─┘

One step ahead, by a thread that ends with its reading. What is read is a function of a position, so that the data are
the same and checkpoints need not know of it. An error is raised by the `take` that wants what could not be read. The
thread touches no device: uploading is only enqueued, and stays with who computes.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple, Self

import torch

from colonnade.data.remote import RemoteTokenFile
from colonnade.launch.process import BACKGROUND
from colonnade.tasks.task import Microbatch
from colonnade.train.corpus import Corpus

Read = Callable[[int], list[Microbatch]]
"""A rank's micro-batches of the step that begins at a position."""


def pays(device: torch.device, corpus: Corpus) -> bool:
    """Whether a thread that reads gains time: where a GPU computes, or where reading waits for a network. On CPUs
    with files of their own reading is too small a part of a step to gain from (`benchmarks/read_ahead.py`).
    """
    return device.type == "cuda" or any(isinstance(file, RemoteTokenFile) for file in corpus.files.values())


class _Reading(NamedTuple):
    position: int
    result: Future[list[Microbatch]]
    thread: threading.Thread


class ReadAhead:
    """Reads batches within its `with` block; on leaving it, no thread of it is left.

    `active` false: everything is read when it is taken.
    """

    def __init__(self, read: Read, *, active: bool) -> None:
        self._read, self._active = read, active
        self._reading: _Reading | None = None

    def take(self, position: int, following: int | None) -> list[Microbatch]:
        """The batches of the step at `position`; then begin to read those at `following`, where there is one."""
        self.settle()
        reading, self._reading = self._reading, None
        ready = reading is not None and reading.position == position
        batches = reading.result.result() if reading is not None and ready else self._read(position)
        if self._active and following is not None:
            self._reading = self._begin(following)
        return batches

    def settle(self) -> None:
        """Return when nothing is being read: to be called before something else reads the same files."""
        if self._reading is not None:
            self._reading.thread.join()

    def _begin(self, position: int) -> _Reading:
        result: Future[list[Microbatch]] = Future()

        def read() -> None:
            try:
                result.set_result(self._read(position))
            except BaseException as error:  # noqa: BLE001  whatever it is, `take` raises it
                result.set_exception(error)

        thread = threading.Thread(target=read, daemon=True, name=BACKGROUND)
        thread.start()
        return _Reading(position, result, thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, KeyboardInterrupt):  # asked a second time to end at once
            self.settle()
