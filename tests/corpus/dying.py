"""Steps whose process is killed. In a module of their own: workers import it, and nothing heavy with it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from colonnade.corpus.read import Read


class DiesOnce(Read):
    """A reader whose process is killed in its second task, the first time."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        marker = self.setting.folder / "died"
        if rank == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().run(data, rank, world_size)


class Dies(Read):
    """A reader whose process is always killed in its second task."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().run(data, rank, world_size)


class Sleeps(Read):
    """A reader that sleeps in its second task."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        if rank == 1:
            (self.setting.folder / "asleep.partial").write_text(str(os.getpid()))
            (self.setting.folder / "asleep.partial").rename(self.setting.folder / "asleep")
            time.sleep(600)
        yield from super().run(data, rank, world_size)


class Waits(Read):
    """A reader that says who it is, and works for ten minutes."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        (self.setting.folder / f"works{rank}.partial").write_text(str(os.getpid()))
        (self.setting.folder / f"works{rank}.partial").rename(self.setting.folder / f"works{rank}")
        end = time.monotonic() + 600
        while time.monotonic() < end:
            sum(range(100_000))
        yield from super().run(data, rank, world_size)


def dies_at_once(_: object) -> None:
    """What a worker begins with: it is killed before it has a task."""
    os.kill(os.getpid(), signal.SIGKILL)
