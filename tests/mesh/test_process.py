"""Whether another process still runs."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from colonnade.mesh.process import ProcessId, has_ended, is_here, kill, mine, process_id_of
from tests.distributed import fork

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux's /proc")


def sleep() -> None:
    time.sleep(60)


def test_a_process_ends() -> None:
    child = fork(sleep)
    assert child.pid is not None
    process = ProcessId(
        mine().host, child.pid, Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    )
    assert not has_ended(process) and not has_ended(mine())
    os.kill(child.pid, signal.SIGSTOP)
    assert not has_ended(process), "it stands still"
    kill(process)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(process), "its parent has not asked for its end yet"
    child.join()
    assert has_ended(process)
    kill(process)  # harmless


@pytest.mark.parametrize("name", [b"a b", b"a) S 1 (b", b"))", b"caf\xe9"], ids=["space", "state", "ends", "Latin-1"])
def test_a_process_ends_whatever_it_is_called(name: bytes) -> None:
    def sleep_as() -> None:
        Path("/proc/self/comm").write_bytes(name)
        sleep()

    child = fork(sleep_as)
    assert child.pid is not None
    while Path(f"/proc/{child.pid}/comm").read_bytes() != name + b"\n":
        assert child.is_alive()
        time.sleep(0.001)
    process = process_id_of(child.pid)
    assert int(process.born) >= int(mine().born) and not has_ended(process)
    kill(process)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(process)
    child.join()


def test_a_number_that_is_used_again_is_another_process() -> None:
    assert has_ended(replace(mine(), born="1"))
    kill(replace(mine(), born="1"))  # this process has not been killed


def test_of_other_machines_nothing_is_known() -> None:
    elsewhere = ProcessId("another machine", 2**30, "5")
    assert not has_ended(elsewhere) and not has_ended(ProcessId(mine().host, 2**30, ""))
    assert not has_ended(replace(mine(), born="")), "nor of one whose birth nobody could ask for"
    kill(elsewhere)
    child = fork(sleep)
    assert child.pid is not None
    kill(replace(process_id_of(child.pid), host="another machine"))  # of the same number and the same birth
    child.join(0.2)
    assert child.exitcode is None
    kill(process_id_of(child.pid))
    child.join()


def test_a_container_on_this_machine_numbers_its_processes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same name of the host."""
    own = replace(mine(), born="1")
    assert has_ended(own)
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[7]")
    assert not is_here(own) and not has_ended(own) and is_here(mine())
