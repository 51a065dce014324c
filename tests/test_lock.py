"""One at a time in a folder: who has it is said, death gives it back, children hold it too; also without flock."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from colonnade import lock as module
from colonnade.errors import NOT_OFFERED, LockError
from colonnade.lock import Holder, Lock, holder_of, is_held, locked
from tests.disks import room_for

HOLD = """
import sys, time
from pathlib import Path
from colonnade.lock import locked
with locked(Path(sys.argv[1]), "a test"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(params=["flock", "no flock"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel's locks, or a file system that has none."""
    if request.param == "no flock":

        def refused(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(module.fcntl, "flock", refused)
    return str(request.param)


@pytest.mark.parametrize("name", ["mkdir", "open"])
def test_a_folder_that_goes_with_its_last_holder_is_made_again(
    name: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who held it before removes it just before it would be opened in, or while it is looked whether it is there."""
    folder, real, calls = tmp_path / "work", getattr(os, name), list[str]()
    folder.mkdir()

    def patched(path: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(str(path))
        if len(calls) > 1:
            return real(path, *args, **kwargs)
        folder.rmdir()
        raise (FileExistsError if name == "mkdir" else FileNotFoundError)(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, patched)
        with locked(folder, "the next"):
            assert is_held(folder)
    assert len(calls) > 1


def test_a_second_one_is_told_who_where_and_since_when(tmp_path: Path, kind: str) -> None:
    with locked(tmp_path / "new", "colonnade train"):
        with pytest.raises(LockError) as caught, locked(tmp_path / "new", "another"):
            pass
        said = str(caught.value)
        for part in (f"{tmp_path / 'new'} is in use", "`colonnade train`", f"process {os.getpid()}", "since 20"):
            assert part in said
        assert socket.gethostname() in said
        assert (f"remove {tmp_path / 'new' / 'lock'}" in said) == (kind == "no flock")
        with locked(tmp_path / "new", "beside", name="other.lock"):
            pass
    assert not list((tmp_path / "new").iterdir())
    with locked(tmp_path / "new", "again"):
        holder = holder_of(tmp_path / "new")
        assert holder is not None and holder.purpose == "again" and not holder.is_dead()


def test_death_gives_it_back(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(LockError, match=f"`a test`, process {process.pid} of user .* on"), locked(tmp_path, "me"):
        pass
    process.kill()
    process.communicate()
    assert holder_of(tmp_path) is not None, "it could not clean up"
    with locked(tmp_path, "me"):
        pass
    assert holder_of(tmp_path) is None


def _hold(lock: Lock, stop: Any) -> None:
    stop.recv()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_holds_it_too(tmp_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    with locked(tmp_path, "parent and child") as lock:
        process = context.Process(target=_hold, args=(lock, there))
        process.start()
        while not process.is_alive():
            time.sleep(0.01)
        time.sleep(0.1)
    with pytest.raises(LockError, match="parent and child"), locked(tmp_path, "next"):
        pass
    here.send("stop")
    process.join()
    with locked(tmp_path, "next"):
        pass


def test_without_the_kernels_locks_the_dead_of_this_machine_are_known(tmp_path: Path, kind: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    content = {"purpose": "old", "host": socket.gethostname(), "pid": process.pid, "born": "1", "since": "then"}
    if kind == "no flock":
        for change in ({"pid": process.pid}, {"pid": os.getpid()}):  # a number that is used again has another birth
            (tmp_path / "lock").write_text(json.dumps(content | change))
            with locked(tmp_path, "new"):
                pass
        (tmp_path / "lock").write_text(json.dumps(content | {"host": "elsewhere"}))
        with pytest.raises(LockError, match=r"process .* on elsewhere, since then"), locked(tmp_path, "new"):
            pass
    else:  # the kernel knows better than the file, whatever the file says
        (tmp_path / "lock").write_text(json.dumps(content | {"host": "elsewhere"}))
        with locked(tmp_path, "new"):
            pass


@pytest.mark.parametrize("kind", ["no flock"], indirect=True)
@pytest.mark.usefixtures("kind")
def test_without_the_kernels_locks_nothing_is_known_of_another_container_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes have numbers of their own there, and here others have them."""
    left = json.dumps(holder(2**22 + 1, "1", space="pid:[4]")._asdict())
    (tmp_path / "lock").write_text(left)
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[7]")
    with pytest.raises(LockError, match="in use by `train`"), locked(tmp_path, "new"):
        pass
    assert is_held(tmp_path) and (tmp_path / "lock").read_text() == left
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[4]")
    with locked(tmp_path, "new"):
        found = holder_of(tmp_path)
        assert found is not None and (found.purpose, found.space) == ("new", "pid:[4]")


@pytest.mark.parametrize("kind", ["no flock"], indirect=True)
@pytest.mark.usefixtures("kind")
def test_of_two_that_see_the_same_dead_holder_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one has seen is not what the other removes. The other is this test's parent, as far as the lock can tell."""
    (tmp_path / "lock").touch()
    looked = list[Any]()

    def look(path: Path) -> Any:
        found = holder_in(path)
        looked.append(found)
        if len(looked) == 1:
            with monkeypatch.context() as other:
                other.setattr(os, "getpid", os.getppid)
                with pytest.raises(LockError, match=rf"`the first`.* remove {tmp_path}/lock\.turn\."):
                    module._take(tmp_path / "lock", "the second", module._Refusal("it", None))
        return found

    holder_in = module._holder_in
    monkeypatch.setattr(module, "_holder_in", look)
    with locked(tmp_path, "the first"):
        holder = holder_of(tmp_path)
        assert holder is not None and holder.purpose == "the first"
    assert looked[0] is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["no flock"], indirect=True)
@pytest.mark.usefixtures("kind")
def test_without_the_kernels_locks_one_that_cannot_be_read_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an empty one: a disk that is away for a moment would have two at work."""
    left = json.dumps(holder(os.getpid(), "")._asdict())
    (tmp_path / "lock").write_text(left)

    def refused(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as away:
        away.setattr(Path, "read_bytes", refused)
        with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/lock'"), locked(tmp_path, "new"):
            pass
        with pytest.raises(OSError, match="Input/output error"):
            is_held(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"] and (tmp_path / "lock").read_text() == left


def test_only_one_of_many_gets_it(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom colonnade.lock import locked\n"
        "for _ in range(60):\n"
        "    try:\n"
        "        with locked(Path(sys.argv[1]), 'race'):\n"
        "            (Path(sys.argv[1]) / 'inside').open('x').close(); (Path(sys.argv[1]) / 'inside').unlink()\n"
        "    except Exception as e:\n"
        "        if type(e).__name__ != 'LockError': raise\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE) for _ in "abc"]
    for process in processes:
        _, said = process.communicate()
        assert process.returncode == 0, said.decode()
    with locked(tmp_path, "after"):
        pass


def test_a_lock_that_its_holder_has_just_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening a file and locking it, its holder may have ended and taken it away."""
    flock, files = module.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not files:
            (tmp_path / "lock").unlink()
        files.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(module.fcntl, "flock", late)
    before = len(os.listdir("/dev/fd"))
    with locked(tmp_path, "a test"):
        assert len(files) == 2 and holder_of(tmp_path) is not None
        assert len(os.listdir("/dev/fd")) == before + 1, "the other file is let go of"
    assert len(os.listdir("/dev/fd")) == before


# --- holders ----------------------------------------------------------------------------------------------------------


def holder(pid: int, born: str, **more: str) -> Holder:
    return Holder(
        **{"purpose": "train", "host": socket.gethostname(), "pid": pid, "born": born, "since": "then"} | more
    )


def test_a_process_that_nobody_has_waited_for_is_dead() -> None:
    """Its number is still there, and so is its birth: the kernel keeps both until its parent asks."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = holder(process.pid, module._born(process.pid))
    assert found.born.isdigit() and not found.is_dead()
    process.kill()
    while not found.is_dead():
        time.sleep(0.01)
    process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_when_a_process_was_born_does_not_hang_on_its_name() -> None:
    """Which may have brackets and spaces, as the kernel writes it into the same line."""
    name, born = Path("/proc/self/comm"), module._born(os.getpid())
    before = name.read_text()
    try:
        name.write_text("a) S 1 (b")
        assert born.isdigit() and module._born(os.getpid()) == born
    finally:
        name.write_text(before)


def test_a_process_that_has_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    """As process 1 of a container that was started again."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    found = holder_of(tmp_path)
    was_alive = found is not None and not found.is_dead()
    process.kill()
    process.communicate()
    assert found is not None and found.pid == process.pid and was_alive
    assert found._replace(pid=os.getpid()).is_dead(), "this process is older"


def test_another_users_process_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    found = holder(os.getpid(), module._born(os.getpid()))
    monkeypatch.setattr(module.os, "kill", kill)
    assert not found.is_dead()


def test_another_users_process_that_is_hidden_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc mounted with hidepid, the way of clusters, hides it."""

    def hidden(pid: int) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(module, "stat_of", hidden)
    assert not holder(os.getpid(), "1").is_dead() and holder(2**22 + 1, "1").is_dead()


def test_a_system_without_proc_has_locks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(module, "stat_of", missing)
    with locked(tmp_path, "a test"):
        found = holder_of(tmp_path)
        assert found is not None and found.born == "" and not found.is_dead()


def test_where_the_kernel_tells_no_birth_a_number_is_believed() -> None:
    assert not holder(os.getpid(), "").is_dead() and holder(os.getpid(), "1").is_dead()
    assert not holder(2**22 + 1, "1", host="elsewhere").is_dead(), "nothing is known of other machines"
    assert holder(2**22 + 1, "1").is_dead(), "no system has so large a number"


def test_a_holder_in_words() -> None:
    assert str(holder(7, "1", host="node3")) == "`train`, process 7 on node3, since then"
    assert str(holder(7, "1", host="node3", user="ann")) == "`train`, process 7 of user ann on node3, since then"


def test_a_user_without_a_name_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(module.pwd, "getpwuid", nobody)
    with locked(tmp_path, "a test"):
        found = holder_of(tmp_path)
    assert found is not None and found.user == str(os.getuid())


def test_a_lock_of_before_users_were_written_names_its_holder(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"purpose": "p", "host": "h", "pid": 7, "born": "", "since": "then"}))
    assert holder_of(tmp_path) == Holder("p", "h", 7, "", "then", "")
    for content in ("", "[]", '{"purpose": "p"}', "7"):
        (tmp_path / "lock").write_text(content)
        assert holder_of(tmp_path) is None


@pytest.mark.parametrize("left", ["", "x" * 1000, json.dumps(holder(2**22 + 1, "1")._asdict()) + " " * 500])
def test_nothing_of_an_earlier_holder_stays_in_the_file(tmp_path: Path, left: str) -> None:
    (tmp_path / "lock").write_text(left)
    with locked(tmp_path, "x"):
        content = (tmp_path / "lock").read_text()
        found = holder_of(tmp_path)
    assert content.endswith("}\n") and content.count("\n") == 1 and json.loads(content)["purpose"] == "x"
    assert found is not None and (found.pid, found.host) == (os.getpid(), socket.gethostname())


def test_what_else_can_be_done_is_said(tmp_path: Path) -> None:
    with locked(tmp_path, "a test"), pytest.raises(LockError) as caught, locked(tmp_path, "b", instead="go elsewhere"):
        pass
    assert str(caught.value).endswith("Wait until it has ended, stop it, or go elsewhere.")
    what = "the token file"
    with locked(tmp_path, "a"), pytest.raises(LockError) as caught, locked(tmp_path, "b", what=what, instead=None):
        pass
    assert str(caught.value).startswith("the token file is in use by `a`, ")
    assert str(caught.value).endswith("Wait until it has ended, or stop it.")


def test_the_lock_that_another_has_made_meanwhile_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding the lock free and taking its file away, somebody may have done that and taken it anew."""
    flock = module.fcntl.flock

    def then_another(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").write_text("of another")

    with locked(tmp_path, "a test"):
        monkeypatch.setattr(module.fcntl, "flock", then_another)
    assert (tmp_path / "lock").read_text() == "of another"


def test_a_disk_that_fails_is_no_other_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that it fails on is named."""

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    before = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(module.fcntl, "flock", failing)
    for ask in (lambda: locked(tmp_path, "a test").__enter__(), lambda: is_held(tmp_path)):
        with pytest.raises(OSError) as caught:
            ask()
        assert str(caught.value) == f"[Errno 5] Input/output error: '{tmp_path / 'lock'}'"
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("number", sorted({*NOT_OFFERED, errno.ENOLCK}))
def test_whatever_a_file_system_without_locks_answers_a_file_is_the_lock(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.fcntl, "flock", refused)
    with locked(tmp_path, "a test"):
        assert is_held(tmp_path)
    assert not is_held(tmp_path) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["no flock"], indirect=True)
def test_without_locks_a_file_is_on_the_disk_before_it_is_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Another machine would find it empty, and take it for nobody's."""
    synced, link = set[int](), os.link

    def linked(source: Path, target: Path) -> None:
        assert source.stat().st_ino in synced and source.stat().st_size
        link(source, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(os, "link", linked)
    with locked(tmp_path, "a test"):
        assert synced and is_held(tmp_path)


LEAVE_A_CHILD = """
import os, signal, sys, time
from pathlib import Path
from colonnade.lock import locked
with locked(Path(sys.argv[1]), "a parent") as lock:
    if os.fork() == 0:
        print("held", flush=True)
        time.sleep(1.0)
        os._exit(0)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_children_of_a_killed_holder_that_are_just_ending_are_waited_for(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", LEAVE_A_CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.wait()
    with locked(tmp_path, "me"):
        pass
    process.communicate()


def test_but_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a lock that is held and whose holder is dead, whoever holds it is not going to end."""
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(module, "_SIGN", 0.1)
    with locked(tmp_path, "child"):
        (tmp_path / "lock").write_text(json.dumps(holder(os.getpid(), "1")._asdict()))
        with pytest.raises(LockError, match="is in use by `train`, process"), locked(tmp_path, "me"):
            pass


@pytest.mark.parametrize("left", [b"", json.dumps(holder(2**22 + 1, "1", purpose="dead")._asdict()).encode()])
def test_who_is_refused_waits_until_the_holder_has_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    """For a moment it has the lock, and its name is not in the file yet, or that of one who was killed still is."""
    monkeypatch.setattr(module, "_SIGN", 30.0)
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.0)
    with locked(tmp_path, "the holder"):
        content = (tmp_path / "lock").read_bytes()
        (tmp_path / "lock").write_bytes(left)
        signing = threading.Timer(0.2, (tmp_path / "lock").write_bytes, (content,))
        signing.start()
        with pytest.raises(LockError, match="in use by `the holder`"), locked(tmp_path, "me"):
            pass
        signing.join()
        monkeypatch.setattr(module, "_SIGN", 0.1)
        (tmp_path / "lock").write_bytes(b"")
        with pytest.raises(LockError, match="in use by another process"), locked(tmp_path, "me"):
            pass


@pytest.mark.usefixtures("kind")
def test_whether_a_folder_is_held_is_known_of_other_machines_holders_too(tmp_path: Path, kind: str) -> None:
    """Where the kernel has locks: what a killed holder has left says no more. Else its file is believed."""
    assert not is_held(tmp_path)
    with locked(tmp_path, "test"):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)
    for host, is_unknown in ((socket.gethostname(), False), ("elsewhere", kind == "no flock")):
        (tmp_path / "lock").write_text(json.dumps(Holder("killed", host, 2**22 + 1, "", "")._asdict()))
        assert is_held(tmp_path) == is_unknown


def test_who_looks_whether_a_folder_is_held_hinders_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").touch()
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    module.fcntl.flock(looking, module.fcntl.LOCK_SH)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: os.close(looking))
    with locked(tmp_path, "test"):
        assert is_held(tmp_path)


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this folder whose owner may not write them are another user's: root could write them as well."""
    opened = os.open

    def refusing(path: Any, flags: int, *mode: int) -> int:
        is_ours = not os.path.exists(path) or os.stat(path).st_mode & 0o200
        if Path(path).parent == tmp_path and flags & os.O_RDWR and not is_ours:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, *mode)

    monkeypatch.setattr(module.os, "open", refusing)


def test_the_umask_decides_who_may_take_what_a_killed_holder_has_left(tmp_path: Path, kind: str) -> None:
    before = os.umask(0o002)
    try:
        with locked(tmp_path, "test"):
            assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


@pytest.mark.usefixtures("unwritable")
def test_what_another_user_has_left_is_removed_where_nobody_holds_it(tmp_path: Path, kind: str) -> None:
    """The folder is shared, the file is not: it was made with a strict umask."""
    before = len(os.listdir("/dev/fd"))
    (tmp_path / "lock").write_text(json.dumps(holder(2**22 + 1, "1")._asdict()))
    (tmp_path / "lock").chmod(0o444)
    with locked(tmp_path, "mine"):
        found = holder_of(tmp_path)
        assert found is not None and found.purpose == "mine"
    assert not list(tmp_path.iterdir()) and len(os.listdir("/dev/fd")) == before


@pytest.mark.usefixtures("unwritable")
def test_who_has_the_folder_is_said_also_where_its_lock_may_not_be_written(tmp_path: Path, kind: str) -> None:
    with locked(tmp_path, "of another user"):
        (tmp_path / "lock").chmod(0o444)
        with pytest.raises(LockError, match=f"{tmp_path} is in use by `of another user`"), locked(tmp_path, "mine"):
            pass
        assert (tmp_path / "lock").exists()
        (tmp_path / "lock").chmod(0o644)


@pytest.mark.usefixtures("unwritable")
def test_a_lock_that_can_neither_be_written_nor_taken_is_refused_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS locks for one process alone what may be written."""

    def refused(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    (tmp_path / "lock").touch(0o444)
    monkeypatch.setattr(module.fcntl, "flock", refused)
    with pytest.raises(PermissionError, match=rf"Permission denied: '{tmp_path}/lock'"), locked(tmp_path, "test"):
        pass


def test_a_disk_without_room_for_the_lock_names_it(tmp_path: Path) -> None:
    """And it can be taken when there is room again."""
    with room_for(0), pytest.raises(OSError, match="File too large") as full, locked(tmp_path, "test"):
        pass
    assert full.value.filename == str(tmp_path / "lock")
    with locked(tmp_path, "test"):
        assert holder_of(tmp_path) is not None
