"""The compiled kernels, for tests: compiled once a session, loaded into each process that asks."""

import fcntl
from pathlib import Path

import pytest

from colonnade.kernels import compiled
from colonnade.train.machine import processor

MISSING = ("there is no C++ compiler", "torch has no kernel")


def load(folder: Path) -> None:
    """Into this process; skips the test, by name, where a machine cannot have them, and fails where it should."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # one of the test processes compiles, the others wait for it
        why = compiled.prepare(folder, processor())
    if why.startswith(MISSING):
        pytest.skip(f"no compiled kernels: {why}")
    assert why == ""


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """One for all processes of a session of tests."""
    base = factory.getbasetemp()
    return (base.parent if base.name.startswith("popen-") else base) / "compiled"
