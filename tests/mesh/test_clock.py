"""Spans of time: each is left, and what it takes is its own or that of one within."""

from types import SimpleNamespace

import pytest

from colonnade.mesh import clock as module
from colonnade.mesh.clock import Clock, own_seconds


def test_spans_that_an_error_leaves_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes behind is in the span that it stands in; without one nothing is written."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = Clock()
    with clock.within("step", "1"):
        now[0] = 1.0
        with pytest.raises(ZeroDivisionError), clock.within("action", "F0"), clock.within("unit", "a"):
            now[0] = 3.0
            _ = 1 / 0
        with clock.within("action", "B0"):
            now[0] = 7.0
        now[0] = 8.0
    with clock.within("action", "none is timed"):
        now[0] = 20.0
    clock.end()
    assert [(span.name, span.parent, span.start, span.end) for span in clock.spans] == [
        ("1", -1, 0.0, 8.0), ("F0", 0, 1.0, 3.0), ("a", 1, 1.0, 3.0), ("B0", 0, 3.0, 7.0)
    ]  # fmt: skip
    assert own_seconds(clock.spans) == [2.0, 0.0, 2.0, 4.0]
    with clock.within("step", "2"):
        now[0] = 21.0
    assert (clock.spans[-1].parent, clock.spans[-1].seconds) == (-1, 1.0)


def test_a_device_has_done_what_it_was_asked_for_where_a_span_begins_and_where_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it was asked for before is not in the span, and what it is asked for within is; else it is left alone."""
    now, asked = [0.0], [0.0]

    def settle() -> None:
        now[0], asked[0] = now[0] + asked[0], 0.0

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = Clock(settle)
    asked[0] = 5.0
    with clock.within("action", "none is timed"):
        assert asked == [5.0]
    with clock.within("step", "1"):
        asked[0] = 1.0
        with clock.within("unit", "a"):
            asked[0] = 2.0
        asked[0] = 4.0
    assert [(span.name, span.start, span.end) for span in clock.spans] == [("1", 5.0, 12.0), ("a", 6.0, 8.0)]
    assert own_seconds(clock.spans) == [5.0, 2.0]
