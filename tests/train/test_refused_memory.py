"""What memory this process has and may have, as the system tells it."""

import resource
from pathlib import Path

import pytest
import torch

from colonnade.config.numbers import amount
from colonnade.train import refused_memory
from colonnade.train.refused_memory import there

CPU, GIB = torch.device("cpu"), 1 << 30


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In place of /proc, and without a limit."""
    monkeypatch.setattr(refused_memory, "Path", lambda name: tmp_path / Path(name).name)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path


def test_kilobytes_of_the_system_are_of_1024_bytes(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (system / "meminfo").write_text(f"MemTotal:  {8 << 20} kB\nHugePages_Total:  3\nMemAvailable:  {3 << 20} kB\n")
    (system / "status").write_text(f"Name:\tpython\nVmSize:\t  {2 << 20} kB\nThreads:\t4\n")
    of_all = f"This machine has {amount(3 * GIB)} free of {amount(8 * GIB)}."
    assert there(CPU) == [of_all]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 * GIB, resource.RLIM_INFINITY))
    own = f"This process may have {amount(4 * GIB)} of address space (ulimit -v)"
    assert there(CPU) == [f"{own}, and has {amount(2 * GIB)}.", of_all]
    (system / "status").unlink()
    assert there(CPU) == [f"{own}.", of_all]


def test_a_system_that_tells_nothing_is_no_error(system: Path) -> None:
    assert there(CPU) == []
    (system / "meminfo").write_text("MemTotal:  100 kB\n")
    assert there(CPU) == []
