"""Events of a run on the charts' axes. Pure.

An event with a step stands there. One without stands where the run was at its time: between the events around it whose
step is known.
"""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from colonnade.drawing.chart import Mark
from colonnade.drawing.html import Html, table, tag
from colonnade.drawing.scale import short
from colonnade.launch.restart_policy import NO_RESTART
from colonnade.report.record import Record
from colonnade.train.divergence import NO_ROLLBACK
from colonnade.train.interrupt import STOPPED

SIGNS = {
    "started": "started",
    "resumed": "resumed",
    "saved": "saved",
    "uploaded": "saved",
    "best": "best",
    STOPPED: "interrupted",
    "diverged": "trouble",
    NO_ROLLBACK: "trouble",
    NO_RESTART: "trouble",
    "rolled back": "rolled-back",
    "finished": "finished",
    "stopped early": "finished",
    "changed": "changed",
}
"""Classes of signs by event; others are `other`."""
WORDS = {"rolled-back": "rolled back", "trouble": "diverged, failed", "finished": "ended"}
QUIET = frozenset({"setup", "evaluated"})
"""Not on the axis: they say what a run is, not what befell it."""
MINOR = frozenset({"saved", "uploaded", "best", "started", "finished"})
"""On the axis alone, not as lines through the charts."""
TROUBLE = frozenset({"failed", "fault", "lost", "damaged", "differ"})
"""Words in the names of events that tell of trouble."""
MOST_ROWS = 500


def sign(event: Mapping[str, Any]) -> str:
    """The class of an event's sign."""
    name = event["event"]
    if name in SIGNS:
        return SIGNS[name]
    return "trouble" if TROUBLE & set(name.split()) else "other"


def steps_of(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """The step of each event: its own, or by its time between those of others; NaN where nothing is known."""
    own = [_own_step(event) for event in events]
    known = [
        (event["time"], step) for event, step in zip(events, own, strict=True) if event["time"] and step is not None
    ]
    times, steps = zip(*sorted(known), strict=True) if known else ((), ())
    return [
        step if step is not None else _between(event["time"], times, steps)
        for event, step in zip(events, own, strict=True)
    ]


def _own_step(event: Mapping[str, Any]) -> float | None:
    if event["event"] == "started":
        return 0.0
    step = event.get("to") if event["event"] == "rolled back" else event.get("step")
    return float(step) if type(step) is int and 0 <= step < 2**53 else None


def _between(time: float | None, times: Sequence[float], steps: Sequence[float]) -> float:
    return float(np.interp(time, times, steps)) if time and times else math.nan


def marks(run: Record) -> list[Mark]:
    """What befell the run, for every horizontal axis that its steps have."""
    shown = [
        (event, step)
        for event, step in zip(run.events, steps_of(run.events), strict=True)
        if event["event"] not in QUIET and math.isfinite(step)
    ]
    places = _places(run, [step for _, step in shown])
    return [Mark(sign(event), _words(event, step), at) for (event, step), at in zip(shown, places, strict=True)]


def _words(event: Mapping[str, Any], step: float) -> str:
    about = details(event)
    return " ".join([event["event"], f"· step {step:,.0f}", *([f"· {about}"] if about else [])])


def _places(run: Record, steps: Sequence[float]) -> list[dict[str, float]]:
    """Where each of these steps is on each axis."""
    axes = {"step": list(steps)}
    if len(run.steps):
        known = np.concatenate([[0.0], run.steps])
        for name, values in (("hours", run.hours), ("tokens", run.columns.get("tokens"))):
            if values is not None:
                axes[name] = np.interp(steps, known, np.concatenate([[0.0], np.nan_to_num(values)])).tolist()
    return [dict(zip(axes, values, strict=True)) for values in zip(*axes.values(), strict=True)]


def details(event: Mapping[str, Any]) -> str:
    """What an event says besides its name, time and step."""
    parts = []
    for key, value in event.items():
        if key in ("event", "time", "step") or value in (None, "", [], {}):
            continue
        shown = short(value) if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        parts.append(f"{key.replace('_', ' ')} {shown}")
    return ", ".join(parts)


def listed(run: Record) -> Html:
    """All events, the newest first."""
    rows = [
        (
            tag("span", _when(event["time"]), class_="when"),
            f"{step:,.0f}" if math.isfinite(step) else "",
            _named(event),
            details(event),
        )
        for event, step in zip(run.events, steps_of(run.events), strict=True)
        if event["event"] != "setup"
    ]
    more = (
        f"{len(rows) - MOST_ROWS:,} older ones are left out; they are in events.jsonl." if len(rows) > MOST_ROWS else ""
    )
    shown = table(["time (UTC)", "step", "event", ""], reversed(rows[-MOST_ROWS:]), numbers=[1])
    return tag("div", shown, tag("p", more, class_="quiet") if more else "")


def _named(event: Mapping[str, Any]) -> Html:
    return tag("span", tag("i", class_=f"sign {sign(event)}"), " ", event["event"], class_="named")


def _when(time: float | None) -> str:
    if time is None or not 0 <= time < 4e9:
        return ""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")


def legend(found: Sequence[Mark]) -> Html:
    """What the signs on the axis are."""
    kinds = dict.fromkeys(mark.kind for mark in found)
    keys = (tag("span", tag("i", class_=f"sign {kind}"), WORDS.get(kind, kind)) for kind in kinds)
    return tag("p", *keys, class_="legend signs-legend") if kinds else Html()
