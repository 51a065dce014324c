"""A run's folder of checkpoints: names that are taken away at once, leftovers, and how many are kept."""

import errno
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from uuid import uuid4

from colonnade.checkpoint.names import checkpoints_in
from colonnade.errors import NOT_OFFERED

Spared = Callable[[Collection[int]], Collection[int]]
"""Of the steps of all checkpoints that are there, those that stay however old they are."""
Refused = Callable[[Path, OSError], object]
"""What is to be done about a folder that cannot be deleted. It is tried again at the next call."""


def raised(path: Path, error: OSError) -> None:
    raise error


def publish(partial: Path, final: Path, keep: int, spared: Spared, refused: Refused = raised) -> None:
    """Give a whole checkpoint its name, and delete all but the `keep` newest, this one included, and what is spared.

    From the rename on the checkpoint is there, whatever happens next; the old ones go only after it.
    """
    sync(partial)
    if os.path.lexists(final):
        take_away(final)
    partial.rename(final)
    sync(final.parent)
    _keep_newest(final.parent, keep - 1, spared, refused, but=final)
    remove_leftovers(final.parent, refused)


def discard_after(folder: Path, step: int, refused: Refused = raised) -> None:
    """Delete the checkpoints of later steps, the newest first: what stays has no gap."""
    for later, path in reversed(checkpoints_in(folder).items()):
        if later > step:
            take_away(path)
    remove_leftovers(folder, refused)


def tidy(folder: Path, keep: int, spared: Spared, refused: Refused = raised) -> None:
    """Delete what a run that was killed has left: half of a checkpoint, and more whole ones than `keep`."""
    _keep_newest(folder, keep, spared, refused)
    remove_leftovers(folder, refused)


def remove_leftovers(folder: Path, refused: Refused = raised) -> None:
    """Delete what has a temporary name."""
    for pattern in (".step_*.partial", ".step_*.deleted"):
        for path in folder.glob(pattern):
            try:
                remove(path)
            except OSError as error:
                refused(path, error)


def remove(path: Path) -> None:
    """Delete a folder with all that is in it. Of a link only the link goes, never what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # files of macOS go with others, those of NFS by another's hand
        if path.exists():
            shutil.rmtree(path)  # and says why it cannot
    else:
        path.unlink(missing_ok=True)


def take_away(path: Path) -> None:
    """Take away a checkpoint's name at once: removing it takes time, and half of it must never look whole.
    `remove_leftovers` does the rest. One that was taken away before, and cannot be removed, is in nobody's way.
    """
    aside = path.with_name(f".{path.name.lstrip('.')}.deleted")
    try:
        remove(aside)
    except OSError:
        aside = aside.with_name(f"{aside.stem}.{uuid4().hex}.deleted")
    path.rename(aside)


def damaged_name(path: Path) -> Path:
    """Where a checkpoint goes that is damaged."""
    return path.with_name(f"damaged_{path.name}")


def set_aside_damaged(path: Path) -> Path:
    """Give a damaged checkpoint another name, under which nobody takes it for one; where it is then."""
    aside = damaged_name(path)
    remove(aside)
    path.rename(aside)
    sync(path.parent)
    return aside


def sync(folder: Path) -> None:
    """Make names in a folder last, as fsync does for the bytes of a file, where its file system offers that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)


def _keep_newest(folder: Path, keep: int, spared: Spared, refused: Refused, but: Path | None = None) -> None:
    found = checkpoints_in(folder)
    others = [step for step, path in found.items() if path != but]
    old = others[: max(0, len(others) - keep)]
    stay = spared(found.keys()) if old else ()
    for step in old:
        if step not in stay:
            try:
                _check_removable(found[step])
                take_away(found[step])
            except OSError as error:
                refused(found[step], error)


def _check_removable(path: Path) -> None:
    """PermissionError where the files of a folder are not this process's to delete: it keeps its name then."""
    if not path.is_symlink() and not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
