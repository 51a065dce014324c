"""What was measured of a machine, in one small file: made where there is none, and what was measured last counts."""

from pathlib import Path

import pytest

from colonnade.train import remembered
from colonnade.train.remembered import recall, remember


def test_the_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    """As on the first use of a machine, whose users have no caches yet."""
    folder = tmp_path / ".cache" / "colonnade"
    assert recall(folder, "a") is None
    remember(folder, "a", {"forward": {"blas": 1.5}})
    assert recall(folder, "a") == {"forward": {"blas": 1.5}} and recall(folder, "b") is None
    remember(None, "a", {})
    assert recall(None, "a") is None


def test_what_is_measured_anew_takes_the_place_of_what_was_and_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three that are kept."""
    monkeypatch.setattr(remembered, "MOST", 3)
    for number in range(3):
        remember(tmp_path, str(number), {"output": {"blas": 1.0}})
    remember(tmp_path, "0", {"output": {"blas": 2.0}})
    remember(tmp_path, "last", {"output": {"blas": 3.0}})
    assert recall(tmp_path, "0") == {"output": {"blas": 2.0}} and recall(tmp_path, "1") is None
    assert recall(tmp_path, "2") and recall(tmp_path, "last") == {"output": {"blas": 3.0}}
