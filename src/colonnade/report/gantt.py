"""A profiled step as pictures: the pipeline's chart, and where each rank's time goes. Pure.

profile.json is written by `train/profile.py`; what is not as it says is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colonnade.report.html import Html, table, tag
from colonnade.report.scale import length_of_time, percent

MOST_ACTIONS = 4000
MOST_RANKS = 32
KINDS = {"F": "forward", "B": "backward", "W": "weight gradients", "optimizer": "optimizer", "wait": "waits"}


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
    rows = [row for row in _list(gantt.get("rows")) if isinstance(row, dict)][:MOST_RANKS]
    kinds, room, bars = [], MOST_ACTIONS, []
    for row in rows:
        actions = [each for each in _list(row.get("actions")) if _is_action(each)]
        kinds += [each["kind"] for each in actions]
        bars.append(tag("div", tag("span", row.get("name", "?")), _row(actions[:room], seconds), class_="row"))
        room -= min(room, len(actions))
    keys = (tag("span", tag("i", class_=f"key k{kind}"), KINDS.get(kind, kind)) for kind in dict.fromkeys(kinds))
    head = tag(
        "figcaption",
        tag("b", f"Step {gantt.get('step', '?')}"),
        f" {length_of_time(seconds)}",
        tag("span", *keys, tag("span", tag("i", class_="key idle"), "idle"), class_="legend"),
    )
    times = (
        tag("span", length_of_time(seconds * share / 4) if share else "0", style=f"left:{25 * share}%")
        for share in range(5)
    )
    cut = tag("p", f"The first {MOST_ACTIONS:,} actions alone are drawn.", class_="quiet") if not room else ""
    return tag(
        "figure",
        head,
        *bars,
        tag("div", tag("span"), tag("div", *times, class_="across"), class_="row"),
        cut,
        class_="gantt",
    )


def _row(actions: Sequence[Mapping[str, Any]], seconds: float) -> Html:
    boxes, names = [], []
    for each in actions:
        start, width = each["start"] / seconds, (each["end"] - each["start"]) / seconds
        kind, words = each["kind"], _name(each)
        number = words[1:] if len(kind) == 1 else ""
        about = f"{KINDS.get(kind, kind)} {number} {length_of_time(each['end'] - each['start'])}"
        boxes.append(
            tag("rect", tag("title", about), x=f"{1000 * start:.2f}", y="0", width=f"{1000 * width:.2f}", height="10",
                class_=f"k{kind}")
        )  # fmt: skip
        if width > 0.018 and len(kind) == 1:
            names.append(tag("b", words, style=f"left:{100 * (start + width / 2):.2f}%"))
    svg = tag("svg", *boxes, viewBox="0 0 1000 10", preserveAspectRatio="none")
    return tag("div", svg, *names, class_="bar")


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
    bars = [
        tag("div", tag("span", rank.get("name", "?")), _stack(_parts(rank), colour), class_="row")
        for rank in ranks[:MOST_RANKS]
    ]
    keys = (tag("span", tag("i", class_=f"key {colour[name]}"), name) for name in names)
    head = tag(
        "figcaption", tag("b", "Where a step goes"), " mean of the profiled steps", tag("span", *keys, class_="legend")
    )
    rows = [[name, *(_share(_parts(rank), name) for rank in ranks[:MOST_RANKS])] for name in names]
    whole = ["the step", *(length_of_time(sum(_parts(rank).values())) for rank in ranks[:MOST_RANKS])]
    shown = table(["", *(rank.get("name", "?") for rank in ranks[:MOST_RANKS])], [*rows, whole],
                  numbers=range(1, len(ranks) + 1))  # fmt: skip
    return tag(
        "figure", head, *bars, tag("details", tag("summary", "as numbers"), shown), _units(ranks[0]), class_="gantt"
    )


def _colours(names: Sequence[str]) -> dict[str, str]:
    """The classes of parts: colours for work, greys for waiting."""
    waits = [name for name in names if name.startswith("wait")]
    others = [name for name in names if name not in waits and name != "rest"]
    found = {name: f"p{number % 9}" for number, name in enumerate(others)}
    return found | {name: f"w{number % 4}" for number, name in enumerate(waits)} | {"rest": "rest"}


def _stack(parts: Mapping[str, float], colour: Mapping[str, str]) -> Html:
    total, at, boxes = sum(parts.values()) or 1.0, 0.0, []
    for name, seconds in parts.items():
        width = 1000 * max(0.0, seconds) / total
        about = f"{name}: {length_of_time(seconds)}, {percent(seconds / total)}"
        boxes.append(tag("rect", tag("title", about), x=f"{at:.2f}", y="0", width=f"{width:.2f}", height="10",
                         class_=colour[name]))  # fmt: skip
        at += width
    return tag("div", tag("svg", *boxes, viewBox="0 0 1000 10", preserveAspectRatio="none"), class_="bar")


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
