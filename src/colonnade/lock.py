"""One run at a time in a folder: a lock that names its holder, and that the death of its holder gives back.

    with locked(folder, "colonnade train") as lock:
        Process(target=work, args=(lock,))     a child holds it too: until the last of them has ended
        …                                      who asks meanwhile gets a LockError that says who has it, and since when

The lock is the kernel's (`flock` of FOLDER/lock): it goes with the processes that hold it, however they end, so nothing
that a dead holder left can block. NFS and Lustre mounted with `flock` keep it between machines, as do most parallel
file systems; a mount that keeps locks to itself (NFS with `nolock` or `local_lock`, Lustre with `localflock`) shows it
to the processes of one machine only. Where a file system has no such locks, the file itself is the lock: made
exclusively, and taken from a holder that is known to be dead, which can be told of holders on this machine, and in
this container, only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NamedTuple

from colonnade.errors import NOT_OFFERED, LockError, names
from colonnade.proc import numbering, stat_of

NAME = "lock"
_PATIENCE_SECONDS = 10.0  # for the children of a holder that was killed
_POLL_SECONDS = 0.05
_REMOVED = 10  # times that the folder may go between being made and being opened in
_SIGN = 1.0  # seconds, at most, from having a lock to having written whose it is
_NO_LOCKS = NOT_OFFERED | {errno.ENOLCK}  # what file systems without flock answer


class Holder(NamedTuple):
    """Who holds a lock."""

    purpose: str
    """What it is doing: the command, say."""
    host: str
    pid: int
    born: str
    """When the process started, in the kernel's count: a number that is used again is another process."""
    since: str
    """When it took the lock: local time, ISO 8601."""
    user: str = ""
    """Whose process it is."""
    space: str = ""
    """Where its number holds: a container on the same host may count its processes itself."""

    def __str__(self) -> str:
        whose = f" of user {self.user}" if self.user else ""
        return f"`{self.purpose}`, process {self.pid}{whose} on {self.host}, since {self.since}"

    def is_dead(self) -> bool:
        """Whether it is known to have ended. Of processes of another machine, or container, nothing is known."""
        if self.host != socket.gethostname() or self.space not in ("", numbering()):
            return False
        try:
            return self.born not in ("", _born(self.pid))
        except OSError:  # gone, or hidden: another user's, where /proc is mounted with hidepid
            return not _is_alive(self.pid)


class Lock:
    """A lock that this process holds, and each child that it is given to: as an argument of a process that
    `multiprocessing` starts, by `pass_fds=[lock.fileno()]` of `subprocess`, or by fork."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_child, (self.path, reduction.DupFd(self._descriptor))

    def fileno(self) -> int:
        """The descriptor whose last copy, when it is closed, gives the lock back."""
        return self._descriptor

    def release(self) -> None:
        """Gives the lock back, unless a child still holds it; the last one leaves no file."""
        os.close(self._descriptor)
        with suppress(OSError):  # another has it, or it is gone
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if not self._is_kernels(descriptor) or _is_that_file(self.path, descriptor):
                    self.path.unlink()
            finally:
                os.close(descriptor)

    def _is_kernels(self, descriptor: int) -> bool:
        """Whether it is the kernel's lock, which is free. Raises BlockingIOError where it is not."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        return True


class _Refusal(NamedTuple):
    """What is said to who comes second."""

    what: str
    instead: str | None

    def error(self, path: Path, *, remove: bool = False) -> LockError:
        holder = _signed(path) or "another process"
        more = f" Where that has ended without a word, remove {path}." if remove else ""
        ways = "or stop it" if self.instead is None else f"stop it, or {self.instead}"
        return LockError(
            f"{self.what} is in use by {holder}: only one at a time may write there. Wait until it has ended, {ways}."
            f"{more}"
        )


def _in_child(path: Path, shared: Any) -> Lock:
    return Lock(path, shared.detach())


@contextmanager
def locked(
    folder: Path,
    purpose: str,
    *,
    name: str = NAME,
    what: str | None = None,
    instead: str | None = "choose another folder",
) -> Iterator[Lock]:
    """Holds FOLDER/name for `purpose`; the folder is made if it is missing. Raises LockError where another has it.

    `what`: that is held, for people; None: the folder. `instead`: what somebody who is refused can do besides waiting
    and stopping it; None: nothing.
    """
    lock = _take(folder / name, purpose, _Refusal(what or str(folder), instead))
    try:
        yield lock
    finally:
        lock.release()


def holder_of(folder: Path, *, name: str = NAME) -> Holder | None:
    """Who holds a folder, as its file says; None where there is no such file, or nothing in it, or the disk does not
    give it.
    """
    with suppress(OSError):
        return _holder_in(folder / name)
    return None


def _holder_in(path: Path) -> Holder | None:
    """The same; OSError where the disk does not give the file."""
    try:
        with names(path):
            content = json.loads(path.read_bytes())
        return Holder(**{field: content[field] for field in Holder._fields if field in content})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def is_held(folder: Path, *, name: str = NAME) -> bool:
    """Whether somebody holds a folder: the kernel knows; where it has no such locks, what the file says. On a mount
    that keeps locks to itself a holder on another machine is not seen.
    """
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        with names(folder / name):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        holder = _holder_in(folder / name)
        return holder is not None and not holder.is_dead()
    finally:
        os.close(descriptor)
    return False


def _take(path: Path, purpose: str, refusal: _Refusal) -> Lock:
    end, is_first = time.monotonic() + _PATIENCE_SECONDS, True
    while True:
        descriptor, may_write = _open(path)
        try:
            with names(path):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return _take_file(path, purpose, refusal)
            if error.errno == errno.EBADF and not may_write:  # NFS wants a file that may be written
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path)) from None
            if not isinstance(error, BlockingIOError):
                raise
            holder = holder_of(path.parent, name=path.name)
            has_it = holder is None or not holder.is_dead()
            if (has_it and not is_first) or time.monotonic() > end:
                raise refusal.error(path) from None
            is_first = False
            time.sleep(_POLL_SECONDS)  # its children are just ending, or it was but looked at
            continue
        try:
            if _is_that_file(path, descriptor):
                if may_write:
                    _write(path, descriptor, purpose)
                    return Lock(path, descriptor)
                path.unlink()  # of a holder who was killed
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the holder before has just removed it


def _open(path: Path) -> tuple[int, bool]:
    """(the lock's file, made where it or its folder is missing; whether it may be written). Who had it before may just
    be removing the folder with it.
    """
    for _ in range(_REMOVED):
        with suppress(FileNotFoundError, FileExistsError):  # of mkdir the latter, where the folder goes meanwhile
            path.parent.mkdir(parents=True, exist_ok=True)
            return _open_in_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _open_in_folder(path)


def _open_in_folder(path: Path) -> tuple[int, bool]:
    """As `_open`. It may not be written where another user has left it so."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), True
    except PermissionError as error:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
        except OSError:
            raise error from None


def _take_file(path: Path, purpose: str, refusal: _Refusal) -> Lock:
    """The lock where there is no flock: a file of our own, linked to the lock's name, which only one can do."""
    own = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}")
    descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write(path, descriptor, purpose)
        with names(path):
            os.fsync(descriptor)  # or another machine may find it empty, which is nobody's
        try:
            os.link(own, path)
        except FileExistsError:
            _take_over(own, path, refusal)
        return Lock(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        own.unlink(missing_ok=True)


def _take_over(own: Path, path: Path, refusal: _Refusal) -> None:
    """Link `own` to the lock's name in place of a file that nobody holds. Who does so has a file for its turn: what it
    has seen of the lock stays true until it removes it.
    """
    turn = path.with_name(f"{path.name}.turn")
    try:
        os.link(own, turn)
    except FileExistsError:
        raise refusal.error(turn, remove=True) from None
    try:
        holder = _holder_in(path)
        if holder is not None and not holder.is_dead():
            raise refusal.error(path, remove=True)
        path.unlink(missing_ok=True)  # empty (made before flock was refused), or of a process that is dead
        os.link(own, path)
    except FileExistsError:
        raise refusal.error(path, remove=True) from None
    finally:
        turn.unlink(missing_ok=True)


def _signed(path: Path) -> Holder | None:
    """Who holds a lock, or None if that is not said: it has the lock for a moment before its name is in the file."""
    end = time.monotonic() + _SIGN
    while True:
        holder = holder_of(path.parent, name=path.name)
        if (holder is not None and not holder.is_dead()) or time.monotonic() > end:
            return holder
        time.sleep(0.02)


def _write(path: Path, descriptor: int, purpose: str) -> None:
    """Say who has the lock at `path`, to whose file this descriptor leads."""
    pid = os.getpid()
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    try:
        born = _born(pid)
    except OSError:  # a system without /proc
        born = ""
    holder = Holder(purpose, socket.gethostname(), pid, born, since, _user(), numbering())
    content = json.dumps(holder._asdict()) + "\n"
    with names(path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content.encode(), 0)


def _is_that_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _born(pid: int) -> str:
    """Clock ticks from the machine's start to the process's (proc(5), field 22 of stat); of one that is dead and not
    yet waited for, nothing. OSError where the kernel does not tell."""
    fields = stat_of(pid)
    return "" if fields[0] in "ZX" else fields[19]


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a number without a name, as in containers
        return str(os.getuid())
