"""What a terminal shows beside numbers, and how long it waits."""

import math
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from colonnade.errors import ConfigError
from colonnade.report.watch import spark, watch
from tests.report import written


def test_a_line_of_bars_is_as_high_as_its_numbers() -> None:
    assert spark([1.0, 2.0, 3.0, 1.5]) == "▁▅█▃" and spark([4.0, 4.0]) == "▁▁"


def test_what_could_not_be_read_is_said(tmp_path: Path) -> None:
    folder, terminal = written.run(tmp_path / "r", steps=3), StringIO()
    (folder / "config.toml").unlink()
    watch(folder, every=1, once=True, console=Console(file=terminal, width=100))
    assert "There is no config.toml." in terminal.getvalue()


@pytest.mark.parametrize("every", [math.nan, math.inf, 1e6])
def test_a_wait_without_an_end_is_refused(tmp_path: Path, every: float) -> None:
    with pytest.raises(ConfigError, match="is no time between two looks"):
        watch(written.run(tmp_path / "r", steps=3), every=every)
