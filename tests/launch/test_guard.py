"""The guard ends what a killed supervisor has started, and nothing else."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from colonnade.launch.guard import tidy
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
