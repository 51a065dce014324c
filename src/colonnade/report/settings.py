"""The configuration of a run: what was set, what changed on the way, and in what several runs differ. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colonnade.config.describe import all_keys, as_toml
from colonnade.drawing.html import Html, joined, table, tag
from colonnade.report.happened import steps_of
from colonnade.report.record import Record

_DEEP = 8


def drawn(run: Record) -> Html:
    """Keys that are not at their defaults, changes, and all keys."""
    flat = keys_of(run.config)
    known = all_keys()
    own = [(name, value) for name, value in flat.items() if name not in known or value != _default(name)]
    parts = [
        table(["key", "value", "default"], ((name, _toml(value), _shown_default(name)) for name, value in own)),
        _changes(run),
        tag(
            "details",
            tag("summary", f"all {len(flat)} keys"),
            table(["key", "value"], ((n, _toml(v)) for n, v in flat.items())),
        ),
    ]
    return tag("div", *parts)


def keys_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Values by whole key."""
    return dict(_flat(content))


def _flat(content: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict) and depth < _DEEP and f"{prefix}{name}" not in all_keys():
            yield from _flat(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _default(name: str) -> Any:
    key = all_keys()[name]
    value = None if key.required else key.default
    return list(value) if isinstance(value, tuple) else value


def _shown_default(name: str) -> str:
    return _toml(_default(name)) if name in all_keys() else ""


def _toml(value: Any) -> str:
    try:
        return "" if value is None else as_toml(value)
    except (TypeError, ValueError, AssertionError):
        return str(value)


def _changes(run: Record) -> Html:
    """What a run went on with that it had not begun with."""
    rows = [(f"{step:,.0f}", line) for step, line in _changed(run)]
    if not rows:
        return tag("p", "Nothing was changed on the way.", class_="quiet")
    return joined([tag("h3", "Changes on the way"), table(["behind step", "change"], rows, numbers=[0])])


def _changed(run: Record) -> Iterator[tuple[float, str]]:
    """The step of each change on the way, and what it changed, like 'train.steps: 100 -> 200'."""
    for event, step in zip(run.events, steps_of(run.events), strict=True):
        changed = event.get("changed")
        for line in changed if isinstance(changed, list) else [changed] if changed else []:
            yield step, line if isinstance(line, str) else _toml(line)


def differences(runs: Sequence[Record]) -> Html:
    """Keys that are not the same in all runs from their beginning to their end."""
    flats = [_with_changes(run) for run in runs]
    names = dict.fromkeys(name for flat in flats for name in flat if name != "run.folder")
    rows = [
        (name, *(flat.get(name, "") for flat in flats))
        for name in names
        if any(flat.get(name) != flats[0].get(name) for flat in flats)
    ]
    if not rows:
        return tag("p", "Their configurations are the same.", class_="quiet")
    return joined([tag("h2", "What differs"), table(["key", *(run.name for run in runs)], rows)])


def _with_changes(run: Record) -> dict[str, str]:
    """What a run had by whole key; of one that was changed on the way, its changes."""
    found: dict[str, list[str]] = {}
    for step, line in _changed(run):
        name, colon, values = line.partition(": ")
        if colon and name in all_keys():
            found.setdefault(name, []).append(f"{values} behind step {step:,.0f}")
    changes = {name: "; ".join(dict.fromkeys(each)) for name, each in found.items()}
    return {name: _toml(value) for name, value in keys_of(run.config).items()} | changes
