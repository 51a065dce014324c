"""Events stand where they were, on every axis, and at their time."""

import re
import time
from pathlib import Path

import pytest

from colonnade.report.happened import listed, marks
from colonnade.report.page import page
from colonnade.report.record import read_run
from tests.report import written


def test_an_event_stands_on_each_axis_where_its_step_does(tmp_path: Path) -> None:
    """Also before the first step, and between two."""
    folder = written.run(tmp_path / "r")
    lines = [{"step": step, "tokens": 100 * step, "seconds": 3600.0} for step in (2, 4)]
    (folder / "metrics.jsonl").write_text(written.lines(lines))
    events = [{"event": "started"}, {"event": "saved", "step": 2}, {"event": "resumed", "step": 3}]
    (folder / "events.jsonl").write_text(written.lines(events))
    assert [mark.places for mark in marks(read_run(folder))] == [
        {"step": 0.0, "hours": 0.0, "tokens": 0.0},
        {"step": 2.0, "hours": 1.0, "tokens": 200.0},
        {"step": 3.0, "hours": 1.5, "tokens": 300.0},
    ]


def test_of_many_events_the_newest_are_drawn_through_the_charts(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=300)
    events = [{"event": "resumed", "step": step} for step in range(1, 301)]
    (folder / "events.jsonl").write_text(written.lines(events))
    by_step = page([read_run(folder)]).split("<svg")[1]
    places = re.findall(r'class="mark resumed" d="M([\d.]+)', by_step)
    assert len(places) == 200 and (places[0], places[-1]) == (f"{1000 * 101 / 300:.1f}", "1000.0")


def test_times_are_those_of_utc_wherever_a_page_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written.run(tmp_path / "r")
    (folder / "events.jsonl").write_text(written.lines([{"event": "saved", "time": 1e9, "step": 1}]))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "EST5")
        time.tzset()
        found = listed(read_run(folder))
    time.tzset()
    assert re.findall(r'class="when">(.*?)<', found) == ["2001-09-09 01:46:40"]
