"""Where ranks pin up their reports for each other: a folder on one machine, a store between several.

The supervisor reads the folder too; so nothing here imports torch.
"""

import shutil
import signal
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

ALARM = "alarm"
ROOM = 1 << 16
"""[bytes] As much as the last words of a rank take."""


class Board(Protocol):
    """Reports by rank, and one alarm for all. Any call may fail with OSError or RuntimeError, or take its time."""

    tick: float
    """Seconds between looks at it."""

    def post(self, rank: int, report: str) -> None: ...
    def read(self, rank: int) -> str | None: ...
    def raise_alarm(self) -> None: ...
    def is_alarmed(self) -> bool: ...
    def ended(self) -> dict[int, str]:
        """Ranks that somebody outside has seen ending badly, and how."""
        ...

    def explain(self, rank: int, text: str) -> bool:
        """Hand over a rank's explanation; False where nobody is there to show it."""
        ...


class FolderBoard:
    """A folder that all ranks and their supervisor see."""

    tick = 0.1

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def post(self, rank: int, report: str) -> None:
        _write(report_file(self.folder, rank), report)

    def read(self, rank: int) -> str | None:
        file = report_file(self.folder, rank)
        return file.read_text(encoding="utf-8") if file.exists() else None

    def raise_alarm(self) -> None:
        (self.folder / ALARM).touch()

    def is_alarmed(self) -> bool:
        return (self.folder / ALARM).exists()

    def ended(self) -> dict[int, str]:
        notes = self.folder.glob("rank*.ended")
        return {int(note.stem.removeprefix("rank")): note.read_text(encoding="utf-8") for note in notes}

    def explain(self, rank: int, text: str) -> bool:
        _write(explanation_file(self.folder, rank), text)
        return True


class StoreBoard:
    """A key-value store that all ranks reach."""

    tick = 0.5

    def __init__(self, store: "Store") -> None:
        self.store = store
        store.set_timeout(timedelta(seconds=5))

    def post(self, rank: int, report: str) -> None:
        self.store.set(f"report/{rank}", report)

    def read(self, rank: int) -> str | None:
        key = f"report/{rank}"
        if not self.store.check([key]):
            return None
        text: bytes = self.store.get(key)
        return text.decode()

    def raise_alarm(self) -> None:
        self.store.set(ALARM, "1")

    def is_alarmed(self) -> bool:
        return bool(self.store.check([ALARM]))

    def ended(self) -> dict[int, str]:
        return {}

    def explain(self, rank: int, text: str) -> bool:
        return False


def report_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.report"


def note_end(folder: Path, rank: int, how: str) -> None:
    """For the supervisor: say to all ranks how one of them has ended."""
    note(folder / f"rank{rank}.ended", how)


def how_ended(status: int) -> str:
    """How a process has ended, in words, by its status."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unnamed"
    return f"killed by signal {-status} ({name})"


def no_room(folder: Path) -> str:
    """Why nothing may be here of what a rank has said, in words; "" where there is room."""
    with suppress(OSError):
        if shutil.disk_usage(folder).free < ROOM:
            return f"what it said found no room in {folder.parent} (TMPDIR)"
    return ""


def note_of_failure(folder: Path, rank: int) -> Path:
    """The file in which a rank notes its uncaught exception: a `Failure`."""
    return folder / f"rank{rank}.failed"


def note(file: Path, text: str) -> None:
    """Tell others of an end by this file; on a full disk they learn of it later, and the end is not held up."""
    with suppress(OSError):
        _write(file, text)


def explanation_file(folder: Path, rank: int) -> Path:
    """Read by the supervisor: what the rank waited for."""
    return folder / f"rank{rank}.explanation"


def _write(file: Path, text: str) -> None:
    """All of it or nothing, whoever reads meanwhile."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text, encoding="utf-8")
    new.rename(file)
