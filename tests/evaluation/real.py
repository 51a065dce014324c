"""Test sets and GPT-2's vocabulary, where they are on this machine."""

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def real_file(name: str) -> Path:
    """A file of `DATA`; where it is absent the test is skipped."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path
