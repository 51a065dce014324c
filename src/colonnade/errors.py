"""What a user can do wrong, one class a kind.

    ColonnadeError            base: shown as one message, no traceback, exit status 2
    ├── ConfigError           a key, a value, or values that cannot go together
    │   └── DiskError         a run's folder that its disk refuses, and may give back
    ├── LayoutError           ranks and parallel sizes that do not fit
    ├── DataError             token files, text, tokenizers
    ├── CheckpointError       checkpoints that are missing, foreign or newer
    │   ├── CopiesError       state that several ranks hold alike, and that differs: not saved
    │   ├── DamagedError      … whose bytes are not those that were written
    │   ├── GoneError         … that were deleted or replaced while they were read
    │   └── UnreadableError   … that the disk refuses, or that is on a storage that is away
    ├── LockError             a folder in which another process is working
    └── MemoryShortError      a run that does not fit into the memory that is there

Every message says what is (with values), why it cannot be, and what to set.
"""

import errno
import re
import resource
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ZIP_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, struct.error)
"""What zipfile and its decoders raise for contents that are not as they should be: bz2 an OSError, as does a place
before the file's beginning, an encrypted member a RuntimeError, as does an unknown feature, a name that cannot be
decoded a ValueError.
"""

REFUSED_BY_THE_DISK = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
    }
)
"""What is no mistake of the program, wherever it comes up: permissions, space, names that are too long or turn in
circles, and files where folders should be, or folders where files should.
"""

AWAY = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO),
        *(errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)
"""What a disk or a network file system says that is away, and may be back in a while. An input/output error (EIO) may
be a bad sector as well, which stays.
"""

PASSING = AWAY | {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""What a disk may get over."""

NOT_OFFERED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What a file system says that has no such call: no locks, say, or no fsync of a folder. The last two are one number on
Linux, and two on macOS.
"""


HIDDEN = "…"
# Paths make one slash of two.
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.\-]+:/{1,2})(?P<rest>[^\s'\"<>\\]*)")
_VALUE = re.compile(r"(?<=[?&;#])(?P<name>[\w.\-]*=)?(?P<value>[^&;#]+)")
_PORT = re.compile(r"\d*")


def without_credentials(text: str) -> str:
    """A text with the credentials of its URLs hidden: users, passwords and keys before a host, values behind `?`, `#`.

    Whatever is shown or kept of what a user named goes through here: messages, lines, events, stored configurations.
    """
    return _URL.sub(lambda url: url["scheme"] + _without(url["rest"]), text)


def hidden(value: Any) -> Any:
    """A value of a configuration or an event, with the credentials of the URLs that it is or contains hidden."""
    if isinstance(value, str):
        scheme = _URL.match(value)
        return scheme["scheme"] + _without(value[len(scheme["scheme"]) :]) if scheme else without_credentials(value)
    if isinstance(value, dict):
        return {hidden(key): hidden(each) for key, each in value.items()}
    return type(value)(map(hidden, value)) if isinstance(value, list | tuple) else value


def _without(rest: str) -> str:
    """What follows `://` in a URL, its credentials hidden."""
    begin = _credentials_end(rest)
    shown = f"{HIDDEN}@{rest[begin:]}" if begin else rest
    return _VALUE.sub(lambda value: f"{value['name'] or ''}{HIDDEN}", shown)


def _credentials_end(rest: str) -> int:
    """Where the host begins, behind a user's `@`; 0 where there is none. A key may have slashes that it should not."""
    head = re.split("[/?#]", rest, maxsplit=1)[0]
    _, colon, secret = head.partition(":")
    reaches_further = colon and "@" not in head and not _PORT.fullmatch(secret)
    return (re.split("[?#]", rest, maxsplit=1)[0] if reaches_further else head).rfind("@") + 1


def credentials_in(url: str) -> list[str]:
    """Every part of a URL that `without_credentials` hides, for hiding it where it stands alone; longest first."""
    found: set[str] = set()
    for match in _URL.finditer(url):
        rest = match["rest"]
        user = rest[: max(0, _credentials_end(rest) - 1)]
        found |= {user, user.partition(":")[2], *(value["value"] for value in _VALUE.finditer(rest))}
    return sorted((part for part in found if len(part) > 3), key=len, reverse=True)


def printable(text: str) -> str:
    """A text as a terminal takes it: without control characters that a file may have smuggled in, and without what is
    no Unicode, as in names that are not UTF-8.
    """
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


@contextmanager
def names(path: Path) -> Iterator[None]:
    """What the system refuses without a name (it has none for what is open already) names this file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


class ColonnadeError(Exception):
    """A mistake that a user can cause and mend. The command line prints the message alone and exits 2.

    Messages show no credentials, and are `printable`.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(without_credentials(str(message))))


class ConfigError(ColonnadeError):
    """A configuration that cannot be run: unknown or mistyped keys, impossible values or combinations."""


class DiskError(ConfigError):
    """What a disk refuses, and may get over."""


class LayoutError(ColonnadeError):
    """A number of ranks, or a set of axis sizes, that does not fit the model or the machine."""


class DataError(ColonnadeError):
    """Token files, text or tokenizers that are missing, broken, foreign or do not match."""


class CheckpointError(ColonnadeError):
    """A checkpoint that is missing, incomplete, damaged, of another model, or from a newer version."""

    @classmethod
    def of_broken_weights(cls, made: str) -> "CheckpointError":
        """Of a model of which what is `made`, in words, is no finite numbers. In fp16 sound weights may make such."""
        return cls(
            f"the model's {made} are not finite: its weights are broken, as after training that diverged, or it "
            "computes in fp16, and a number came above 65,504. In fp16 try --precision bf16; else use an earlier "
            "checkpoint, and train on from it with a lower optim.learning_rate."
        )


class CopiesError(CheckpointError):
    """Copies of state that are not equal any more."""

    def __init__(self, message: object = "", by_rank: Sequence[Mapping[str, str]] = ()) -> None:
        super().__init__(message)
        self.by_rank = tuple(by_rank)
        """Of each rank: what it sees differing, with its own checksum."""


class DamagedError(CheckpointError):
    """A checkpoint whose bytes are not those that were written: the one before it may be sound."""


class GoneError(CheckpointError):
    """A checkpoint that was deleted, or replaced by another, while it was read: nothing of it is damaged."""


class UnreadableError(CheckpointError):
    """A checkpoint that the disk refuses as `AWAY` says: sectors of it are bad, or the disk or its network is away."""


class LockError(ColonnadeError):
    """A folder or a file in which another process is working."""


class MemoryShortError(ColonnadeError):
    """A model, or a step of it, that does not fit into the memory that is there."""


def of_the_disk(message: str, error: Exception) -> ConfigError:
    """What to raise of what cannot be read or written: a DiskError where its disk may get over it."""
    return (DiskError if _passes(error) else ConfigError)(message)


def raise_passing(file: object, error: BaseException) -> None:
    """DiskError of a file that cannot be read now, where its disk may get over it: what is in it is not known."""
    if _passes(error):
        raise DiskError(f"{file} cannot be read ({error}). Start the same command again when its disk answers.")


def name_of(error: BaseException) -> str:
    """The kind of an error, by which whoever starts ranks again knows a DiskError, raised as such or by the system."""
    return (DiskError if _passes(error) else type(error)).__name__


def _passes(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in PASSING


def mistake(error: BaseException) -> str | None:
    """What to tell the user, if an error is a mistake of theirs or of their disk; None for what only we can mend."""
    if isinstance(error, ColonnadeError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (*REFUSED_BY_THE_DISK, errno.EMFILE):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{without_credentials(where)}{error.strerror}{limit_of(error)}. Fix that, and run the command again."
    return None


def not_installed(what: str, package: str, install: str = "", instead: str = "") -> str:
    """What to say where `what` needs a package that is missing, which comes with `install` (its own name unless another
    is given). `instead`: what else to do.
    """
    named = install or package
    quoted, otherwise = f"'{named}'" if "[" in named else named, f", or {instead}" if instead else ""
    return f"{what} needs the package {package}, which is not installed. Run `pip install {quoted}`{otherwise}."


def limit_of(error: OSError) -> str:
    """The limit of this process that it has met, in words behind what the system says; "" where there is none."""
    if error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f", more than the {most:,} that this process may have (ulimit -n)"
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and most != resource.RLIM_INFINITY:
        return f", more than the {most:,} bytes that a file of this process may have (ulimit -f)"
    return ""
