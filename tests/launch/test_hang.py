"""The real command, one of whose ranks is killed or stopped in the middle of a step: all end, and say why."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiny
from tests.commands import environment, ranks_of

LAYOUT = ["parallel.tp=2", "parallel.dp=2"]
ENDLESS = ["train.steps=100000", "train.evaluate_every=0", "checkpoint.every=0", "restarts.limit=0"]
WAITS = re.compile(
    r"^(rank \d \[pp0 dp\d tp\d\] waits|ranks [\d, and]+ wait) in \w+ over \w+.*\(step \d+, [\d.-]+ s.*\); rank \d .*$",
    re.M,
)
DID = re.compile(r"^The last operations of (rank \d)|^  The same but for times: (.*)\.$", re.M)


def of_ranks(found: list[str]) -> list[int]:
    """The ranks that are named, in words, alone or with others."""
    return sorted(int(rank) for text in found for rank in re.findall(r"\b\d\b", text.partition("[")[0]))


def trouble(folder: Path, number: int, *overrides: str) -> tuple[int, str, float]:
    """Send rank 2 a signal in the fifth step or later; (exit status, errors, seconds until all was over)."""
    config = tiny.write_config(tiny.make(folder / "corpus"), folder)
    command = [sys.executable, "-m", "colonnade", "train", str(config), *LAYOUT, *ENDLESS, *overrides]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, end = folder / "run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)
    ranks = ranks_of(process.pid)
    assert ranks.keys() == {0, 1, 2, 3}
    begin = time.monotonic()
    os.kill(ranks[2], number)
    try:
        _, errors = process.communicate(timeout=90)
    finally:
        process.terminate()  # one that has not ended, and would go on behind the tests
    assert not [rank for rank in ranks.values() if Path(f"/proc/{rank}").exists()]
    return process.returncode, errors, time.monotonic() - begin


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks through Linux's /proc")
class TestTrain:
    @pytest.mark.slow
    def test_a_rank_that_is_killed(self, tmp_path: Path) -> None:
        status, errors, seconds = trouble(tmp_path, signal.SIGKILL, "train.timeout=300")
        assert status == 137 and seconds < 15
        assert re.match(r"rank 2 was killed by signal 9 \(SIGKILL\), perhaps out of memory\nranks? 0\b", errors)
        assert of_ranks([match[1] for match in WAITS.finditer(errors)]) == [0, 1, 3]
        assert re.search(r"; rank 2 \[pp0 dp1 tp0\] left step \d+ \(killed by signal 9 \(SIGKILL\)\)", errors)
        assert of_ranks([match[1] or match[2] for match in DID.finditer(errors)]) == [0, 1, 3]
        assert "Traceback" not in errors

    @pytest.mark.slow
    def test_a_rank_that_stands_still(self, tmp_path: Path) -> None:
        # where four programs share two cores, a rank has waited for more than 5 s in a step that was only slow
        status, errors, seconds = trouble(tmp_path, signal.SIGSTOP, "train.timeout=20")
        assert status == 75 and 20 < seconds < 50
        assert of_ranks([match[1] for match in WAITS.finditer(errors)]) == [0, 1, 3]
        assert re.search(r"; rank 2 \[pp0 dp1 tp0\] stands still in step \d+", errors)
        assert "The limit is train.timeout = 20 seconds." in errors and "Traceback" not in errors
