"""Events stand where they were, on every axis, and at their time."""

import re
import time
from pathlib import Path

import numpy as np
import pytest

from colonnade.report.happened import legend, listed, marks, sign, steps_of
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


def test_the_axes_of_a_run_are_made_once_for_all_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of months both are many."""
    folder = written.run(tmp_path / "r")
    (folder / "events.jsonl").write_text(written.lines([{"event": "saved", "step": step} for step in range(1, 30)]))
    run, made, concatenate = read_run(folder), list[object](), np.concatenate
    monkeypatch.setattr(np, "concatenate", lambda *arrays: (made.append(arrays), concatenate(*arrays))[1])
    assert [mark.places["step"] for mark in marks(run)] == [*range(1, 30)] and len(made) <= 3


def test_a_step_without_a_number_of_tokens_has_none_behind_it(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    (folder / "metrics.jsonl").write_text(written.lines([{"step": 1}, {"step": 2, "tokens": 200}]))
    (folder / "events.jsonl").write_text(written.lines([{"event": "saved", "step": step} for step in (1, 2)]))
    assert [mark.places["tokens"] for mark in marks(read_run(folder))] == [0.0, 200.0]


def test_an_event_that_says_what_a_run_is_is_on_no_axis_and_an_evaluation_is_listed(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    events = [{"event": name, "step": 3, "time": 1e9} for name in ("setup", "evaluated", "saved")]
    (folder / "events.jsonl").write_text(written.lines(events))
    run = read_run(folder)
    assert [mark.kind for mark in marks(run)] == ["saved"]
    assert re.findall(r'class="sign \w+"></i> (\w+)<', listed(run)) == ["saved", "evaluated"]


@pytest.mark.parametrize(
    ("sign_of", "names"),
    [
        ("started", ["started"]),
        ("resumed", ["resumed"]),
        ("saved", ["saved", "uploaded"]),
        ("best", ["best"]),
        ("interrupted", ["interrupted"]),
        ("rolled-back", ["rolled back"]),
        ("finished", ["finished", "stopped early"]),
        ("changed", ["changed"]),
        ("trouble", ["diverged", "no rollback", "fault", "no restart", "copies differ", "save failed"]),
        ("trouble", ["damaged checkpoint", "damaged copy in memory", "damaged upload"]),
        ("trouble", ["upload failed", "upload lost to another"]),
        ("other", ["change refused", "initialized", "other data", "profiled", "fetched", "recovered"]),
        ("other", ["restart", "fewer ranks", "all ranks", "no copies in memory", "slow rank", "rank well again"]),
        ("other", ["upload works again", "upload unfinished"]),
    ],
)
def test_each_event_that_a_run_writes_has_the_sign_of_what_it_tells(sign_of: str, names: list[str]) -> None:
    assert {name: sign({"event": name}) for name in names} == dict.fromkeys(names, sign_of)


def test_times_that_go_back_do_not_move_what_stands_between_them() -> None:
    """As those of a machine whose clock was set, or of another machine."""
    saved = [{"event": "saved", "time": time, "step": step} for step, time in ((30, 300.0), (10, 100.0))]
    assert steps_of([*saved, {"event": "rank lost", "time": 200.0}]) == [30.0, 10.0, 20.0]


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


def test_a_time_or_a_step_that_there_is_not_is_not_shown(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    events = [{"event": "saved", "time": time, "step": -1} for time in (-1.0, 4e9, 1e300)]
    (folder / "events.jsonl").write_text(written.lines([*events, {"event": "saved", "step": 2**60}]))
    run = read_run(folder)
    assert re.findall(r'class="when">(.*?)<', listed(run)) == [""] * 4 and marks(run) == []


def test_each_kind_of_sign_is_named_once_in_words(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    names = ("saved", "rolled back", "saved", "rank lost", "diverged", "stopped early", "moved")
    (folder / "events.jsonl").write_text(written.lines([{"event": name, "step": 3, "to": 2} for name in names]))
    found = re.findall(r'class="sign ([\w-]+)"></i>([^<]*)<', legend(marks(read_run(folder))))
    assert found == [
        ("saved", "saved"),
        ("rolled-back", "rolled back"),
        ("trouble", "diverged, failed"),
        ("finished", "ended"),
        ("other", "other"),
    ]
    assert legend([]) == ""
