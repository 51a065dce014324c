"""How far a conversion is."""

import pytest

from colonnade.convert.progress import Progress


def test_what_is_told_of_it_is_no_part_of_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines are on standard error, some seconds apart."""
    times = iter([0.0, 1.0, 10.0, 11.0])
    progress = Progress("are read", 4_000_000, clock=lambda: next(times))
    for _ in range(3):
        progress.advance(1_000_000)
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors == "  are read 2.00 MB of 4.00 MB, 200 kB/s, 0:00:10 left\n"
