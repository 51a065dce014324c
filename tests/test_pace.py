"""How long something will take, told every few seconds."""

from datetime import timedelta

import pytest

from colonnade.convert.progress import Progress
from colonnade.pace import Pace, Reading, say_aside


def test_it_is_told_every_few_seconds_and_from_the_rate_of_all_that_is_done() -> None:
    times = iter([10.0, 12.0, 16.0, 17.0, 22.0])
    pace = Pace(1000, clock=lambda: next(times))
    told = [pace.advance(100) for _ in range(4)]
    assert told == [
        None,
        Reading(200, 200 / 6, timedelta(seconds=24)),
        None,
        Reading(400, 400 / 12, timedelta(seconds=18)),
    ]


def test_nothing_is_told_before_anything_is_done() -> None:
    times = iter([0.0, 10.0, 20.0])
    pace = Pace(1000, clock=lambda: next(times))
    assert [pace.advance(0), pace.advance(100)] == [None, Reading(100, 5.0, timedelta(seconds=180))]


def test_more_time_than_can_be_told_is_the_most() -> None:
    times = iter([0.0, 1e6])
    assert Pace(2**63, clock=lambda: next(times)).advance(1) == Reading(1, 1e-6, timedelta(days=999_999_999))


def test_a_conversion_tells_bytes() -> None:
    said: list[str] = []
    times = iter([0.0, 10.0])
    Progress("converted", 4_000_000_000, clock=lambda: next(times), say=said.append).advance(1_000_000_000)
    assert said == ["  converted 1.00 GB of 4.00 GB, 100 MB/s, 0:00:30 left"]


def test_how_far_it_is_stands_beside_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    say_aside("half of it")
    assert capsys.readouterr() == ("", "half of it\n")
