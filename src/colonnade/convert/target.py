"""What a conversion writes: beside its target until it is whole, and then renamed. Nothing is ever overwritten."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from colonnade.checkpoint.folders import remove, sync
from colonnade.config.numbers import amount
from colonnade.errors import CheckpointError, limit_of
from colonnade.lock import NAME, locked

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDY = "Free some space, or choose a TARGET on another disk, and run the command again."


def check_target(target: Path) -> None:
    """CheckpointError if there is something already, or if nothing can be made there."""
    if os.path.lexists(target):
        raise CheckpointError(
            f"{target} exists already, and a conversion overwrites nothing. Choose another TARGET, or remove it."
        )
    above = next(path for path in target.absolute().parents if os.path.lexists(path))
    if not above.is_dir():
        raise CheckpointError(f"{target} cannot be made: {above} is no folder. Choose another TARGET.")
    most, longer = os.pathconf(above, "PC_NAME_MAX"), len(os.fsencode(_beside(target).name))
    if longer > most:
        name = len(os.fsencode(target.name))
        raise CheckpointError(
            f"{target} has a name of {name} bytes, and where it is to be made a TARGET's can have "
            f"{most - longer + name} at most. Choose a shorter one."
        )


def check_space(target: Path, needed: int) -> None:
    """CheckpointError if the target's disk has not so many bytes free."""
    free = shutil.disk_usage(_existing(target)).free
    if free < needed:
        raise CheckpointError(f"{target} needs {amount(needed)}, and its disk has {amount(free)} free. {_REMEDY}")


def when_full(target: Path, error: OSError) -> CheckpointError:
    """What to say of a target for which its disk has no room, or that has a file larger than may be."""
    if error.errno == errno.EFBIG:
        return CheckpointError(
            f"{target} could not be written: {error.strerror}{limit_of(error)}. Raise the limit on the size of files, "
            "or choose a TARGET on another file system, and run the command again."
        )
    return CheckpointError(f"The disk is full: {target} could not be written. {_REMEDY}")


@contextmanager
def workspace(target: Path) -> Iterator[Path]:
    """A folder beside the target, on the same disk. Nothing of it is left at the end, whatever happens within.

    One that was killed has left its own, and the next conversion to the same target removes that first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = _beside(target)
    try:
        purpose, instead = f"colonnade convert … {target}", "choose another TARGET"
        with locked(folder, purpose, what=str(target), instead=instead):
            _clear(folder)
            try:
                yield folder
            finally:
                _clear(folder)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise when_full(target, error) from None
    finally:
        with suppress(OSError):  # another conversion is at work in it
            folder.rmdir()


def publish(made: Path, target: Path) -> None:
    """Give what is whole its name."""
    sync(made)
    check_target(target)
    made.rename(target)
    sync(target.parent)


def _beside(target: Path) -> Path:
    """Where it is made."""
    return target.parent / f".{target.name}.partial"


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != NAME:
            remove(path)


def _existing(path: Path) -> Path:
    """The folder that the path will be made in, or the nearest that exists."""
    return next(folder for folder in path.absolute().parents if folder.is_dir())
