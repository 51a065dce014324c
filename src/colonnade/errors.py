"""What a user can do wrong, one class a kind.

    ColonnadeError            base: shown as one message, no traceback, exit status 2
    ├── ConfigError           a key, a value, or values that cannot go together
    ├── LayoutError           ranks and parallel sizes that do not fit
    ├── DataError             token files, text, tokenizers
    ├── CheckpointError       checkpoints that are missing, broken, foreign or newer
    ├── LockError             a folder in which another process is working
    └── MemoryShortError      a run that does not fit into the memory that is there

Every message says what is (with values), why it cannot be, and what to set.
"""

import errno

REFUSED_BY_THE_DISK = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EEXIST, errno.ENOTDIR}
)
"""What is no mistake of the program, wherever it comes up: permissions, space, and files where folders should be."""


class ColonnadeError(Exception):
    """A mistake that a user can cause and mend. The command line prints the message alone and exits 2."""


class ConfigError(ColonnadeError):
    """A configuration that cannot be run: unknown or mistyped keys, impossible values or combinations."""


class LayoutError(ColonnadeError):
    """A number of ranks, or a set of axis sizes, that does not fit the model or the machine."""


class DataError(ColonnadeError):
    """Token files, text or tokenizers that are missing, broken, foreign or do not match."""


class CheckpointError(ColonnadeError):
    """A checkpoint that is missing, incomplete, damaged, of another model, or from a newer version."""


class LockError(ColonnadeError):
    """A folder or a file in which another process is working."""


class MemoryShortError(ColonnadeError):
    """A model, or a step of it, that does not fit into the memory that is there."""


def mistake(error: BaseException) -> str | None:
    """What to tell the user, if an error is a mistake of theirs or of their disk; None for what only we can mend."""
    if isinstance(error, ColonnadeError):
        return str(error)
    if isinstance(error, OSError) and error.errno in REFUSED_BY_THE_DISK:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}. Mend that, and run the command again."
    return None
