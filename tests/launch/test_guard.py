"""The guard ends what a killed supervisor has started, and nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from colonnade.launch.guard import line_of, tidy
from colonnade.mesh.process import process_id_of


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_process_that_was_given_an_old_number_is_left_alone(
    sleeper: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    rank = process_id_of(sleeper.pid)
    if not rank.born:
        pytest.skip("the system does not tell when a process began")
    tidy([replace(rank, born="1")], str(tmp_path / "folder"))
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.3)
    (tmp_path / "folder").mkdir()
    tidy([rank], str(tmp_path / "folder"))
    assert sleeper.wait(60) == -9 and not (tmp_path / "folder").exists()


def test_it_ends_all_ranks_and_removes_all_folders_that_it_was_told(tmp_path: Path) -> None:
    """As a process beside a supervisor that is killed, in the midst of a line perhaps."""
    folders = [tmp_path / name for name in ("ranks", "memory")]
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    ranks = [subprocess.Popen(asleep, start_new_session=True) for _ in range(2)]
    try:
        told = b"".join(line_of(process_id_of(rank.pid)) for rank in ranks)
        command = [sys.executable, "-m", "colonnade.launch.guard", *map(str, folders)]
        done = subprocess.run(command, input=told + b'{"host": "he', capture_output=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        assert [rank.wait(60) for rank in ranks] == [-signal.SIGKILL] * 2 and not list(tmp_path.iterdir())
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    """A child holds the other end of a pipe, which is at its end when nobody has it open any more."""
    program = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print(); sys.stdout.flush(); time.sleep(600)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"\n"
        tidy([process_id_of(rank.pid)], str(tmp_path / "folder"))
        try:
            assert rank.communicate(timeout=60) == (b"", None) and rank.returncode == -9
        finally:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
