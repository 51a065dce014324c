"""What a run says of checkpoints that are to go and cannot be deleted: it goes on, and tries again at each save."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from colonnade.train.monitor import Monitor, write_event

NOT_REMOVED = "not removed"


class NotRemoved:
    """Says once of each folder that it cannot be deleted: as an event, and as a line."""

    def __init__(self, event: Callable[..., object], say: Callable[[str], object]) -> None:
        self._event, self._say, self._told = event, say, set[Path]()

    def __call__(self, path: Path, error: OSError) -> None:
        if path not in self._told:
            self._told.add(path)
            self._event(NOT_REMOVED, checkpoint=str(path), reason=str(error.strerror))
            self._say(
                f"{path} is not needed any more and cannot be deleted: {error.strerror}. It is tried again at each "
                "save. Let this user delete it, or move it elsewhere."
            )


def by_monitor(monitor: Monitor) -> NotRemoved:
    """Of a run that is at work."""
    return NotRemoved(monitor.event, monitor.say)


def by_line(run: Path) -> NotRemoved:
    """Where no rank runs."""
    return NotRemoved(partial(write_event, run), partial(print, flush=True))
