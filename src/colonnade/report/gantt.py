"""A profiled step as pictures: the pipeline's chart, and where each rank's time goes. Pure.

profile.json is written by `train/profile.py`; what is not as it says is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colonnade.drawing import bars
from colonnade.drawing.bars import Span
from colonnade.drawing.html import Html, table, tag
from colonnade.drawing.scale import length_of_time, percent

MOST_ACTIONS = 4000
MOST_RANKS = 32


def drawn(profile: Mapping[str, Any]) -> Html:
    """Every part of the profile that is there."""
    parts = [part for part in (_gantt(profile), _shares(profile)) if part]
    if not parts:
        return tag("p", "profile.json has nothing that can be shown.", class_="quiet")
    return tag("div", *parts)


def _gantt(profile: Mapping[str, Any]) -> Html:
    gantt = profile.get("gantt")
    if not isinstance(gantt, dict) or not _is_positive(gantt.get("seconds")):
        return Html()
    seconds = float(gantt["seconds"])
    room, rows, is_whole = MOST_ACTIONS, [], True
    for row in [row for row in _list(gantt.get("rows")) if isinstance(row, dict)][:MOST_RANKS]:
        actions = [each for each in _list(row.get("actions")) if _is_action(each)]
        rows.append((row.get("name", "?"), [_span(each) for each in actions[:room]]))
        is_whole &= len(actions) <= room
        room -= min(room, len(actions))
    note = "" if is_whole else f"The first {MOST_ACTIONS:,} actions alone are drawn."
    return bars.gantt(f"Step {gantt.get('step', '?')}", length_of_time(seconds), rows, seconds, note=note)


def _span(action: Mapping[str, Any]) -> Span:
    kind = action["kind"]
    return Span(kind, _name(action) if len(kind) == 1 else "", action["start"], action["end"])


def _name(action: Mapping[str, Any]) -> str:
    chunk = f".{action['chunk']}" if action.get("chunk") else ""
    return f"{action['kind']}{action.get('microbatch', '')}{chunk}"


def _shares(profile: Mapping[str, Any]) -> Html:
    """A bar a rank, and the same as numbers."""
    ranks = [rank for rank in _list(profile.get("ranks")) if isinstance(rank, dict) and _parts(rank)]
    if not ranks:
        return Html()
    names = list(dict.fromkeys(name for rank in ranks for name in _parts(rank)))
    names.sort(key="rest".__eq__)
    colour = _colours(names)
    rows_of_bars = [
        bars.row(rank.get("name", "?"), bars.stacked(_parts(rank), colour, length_of_time))
        for rank in ranks[:MOST_RANKS]
    ]
    rows = [[name, *(_share(_parts(rank), name) for rank in ranks[:MOST_RANKS])] for name in names]
    whole = ["the step", *(length_of_time(sum(_parts(rank).values())) for rank in ranks[:MOST_RANKS])]
    shown = table(["", *(rank.get("name", "?") for rank in ranks[:MOST_RANKS])], [*rows, whole],
                  numbers=range(1, len(ranks) + 1))  # fmt: skip
    numbers = tag("details", tag("summary", "as numbers"), shown)
    return bars.figure(
        "Where a step goes", "mean of the profiled steps", colour, rows_of_bars, numbers, _units(ranks[0])
    )


def _colours(names: Sequence[str]) -> dict[str, str]:
    """The classes of parts: colours for work, greys for waiting."""
    waits = [name for name in names if name.startswith("wait")]
    others = [name for name in names if name not in waits and name != "rest"]
    found = {name: f"p{number % 9}" for number, name in enumerate(others)}
    return found | {name: f"w{number % 4}" for number, name in enumerate(waits)} | {"rest": "rest"}


def _share(parts: Mapping[str, float], name: str) -> str:
    seconds = parts.get(name, 0.0)
    return f"{length_of_time(seconds)} · {percent(seconds / (sum(parts.values()) or 1.0))}"


def _units(rank: Mapping[str, Any]) -> Html:
    """Compute of the first rank by unit of the model."""
    units = rank.get("units")
    if not isinstance(units, dict) or not units:
        return Html()
    kinds = list(dict.fromkeys(kind for each in units.values() if isinstance(each, dict) for kind in each))
    rows = [
        [unit, *(length_of_time(each[kind]) if _is_number(each.get(kind)) else "" for kind in kinds)]
        for unit, each in units.items()
        if isinstance(each, dict)
    ]
    name = f"compute by unit, {rank.get('name', '?')}"
    return tag("details", tag("summary", name), table(["unit", *kinds], rows, numbers=range(1, len(kinds) + 1)))


def _parts(rank: Mapping[str, Any]) -> dict[str, float]:
    parts = rank.get("parts")
    return {name: float(each) for name, each in parts.items() if _is_number(each)} if isinstance(parts, dict) else {}


def _is_action(each: Any) -> bool:
    numbers = isinstance(each, dict) and _is_number(each.get("start")) and _is_number(each.get("end"))
    return bool(
        numbers and isinstance(each.get("kind"), str) and each["kind"].isalpha() and each["end"] >= each["start"]
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def bounds(profile: Mapping[str, Any]) -> Iterator[str]:
    """Which steps were profiled, in words."""
    steps = profile.get("steps")
    if isinstance(steps, list) and len(steps) == 2:
        yield f"steps {steps[0]} to {steps[1]}"
