"""Thermometers as heat maps: a row a unit of the model, a column a share of the steps. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy as np

from colonnade.config.numbers import is_number
from colonnade.drawing.html import Html, joined, tag, void
from colonnade.drawing.scale import LOG_FROM, short
from colonnade.drawing.thin import Floats
from colonnade.report.pictures import indices, png

COLUMNS = 240
MOST_ROWS = 400
FIRST = ("rms", "maximum", "norm", "ratio")
"""What is shown at once; the rest is a click away."""
LOWEST = ("minimum",)
"""Of steps that share a column the lowest counts here, elsewhere the highest."""
NAMES = {
    "rms": "RMS",
    "zeros": "share of zeros",
    "non_finite": "not finite",
    "near_limit": "share near the format's limit",
    "ratio": "update ÷ weight",
}
Place = tuple[str, str, str]  # activations, site, statistic


@dataclass(frozen=True)
class Heat:
    """One thermometer of every unit over the steps."""

    site: str
    statistic: str
    units: Sequence[str]
    table: Floats
    """[units, columns]; NaN where nothing was measured."""
    first: int
    last: int
    """Steps of the first and the last measurement."""

    @property
    def constant(self) -> float | None:
        """What it is everywhere, if it is the same."""
        there = self.table[np.isfinite(self.table)]
        return float(there[0]) if len(there) and np.all(there == there[0]) else None


def heats(lines: Sequence[Mapping[str, Any]]) -> list[Heat]:
    """Every thermometer of thermometers.jsonl, in the order in which they come."""
    found: dict[Place, dict[str, list[tuple[int, float]]]] = {}
    for line in lines:
        for place, unit, value in _numbers(line):
            found.setdefault(place, {}).setdefault(unit, []).append((int(line["step"]), value))
    if not found:
        return []
    steps = [int(line["step"]) for line in lines]
    first, last, columns = min(steps), max(steps), min(COLUMNS, len(set(steps)))
    return [
        Heat(site, statistic, list(units), _table(statistic, units, first, last, columns), first, last)
        for (_, site, statistic), units in found.items()
    ]


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[Place, str, float]]:
    """Each number of a measured step: which thermometer, of which unit."""
    for unit, sites in _dict(line.get("activations")).items():
        for site, statistics in _dict(sites).items():
            if isinstance(statistics, dict):
                for name, value in statistics.items():
                    if _is_number(value):
                        yield ("activations", site, name), unit, float(value)
            elif _is_number(statistics):
                yield ("activations", "output", site), unit, float(statistics)
    for unit, statistics in _dict(line.get("gradients")).items():
        for name, value in _dict(statistics).items():
            if _is_number(value):
                yield ("gradients", "gradients", name), unit, float(value)
    for unit, value in _dict(line.get("updates")).items():
        if _is_number(value):
            yield ("updates", "updates", "ratio"), unit, float(value)


class Thinned:
    """Lines of thermometers.jsonl of which about `most` are held: of more, equally many beside each other are one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._held, self._newest = list[dict[str, Any]](), list[dict[str, Any]]()
        self._count, self._each = 0, 1

    def append(self, line: dict[str, Any]) -> None:
        """The next line."""
        if self._count == self._most * self._each:
            pairs = zip_longest(self._held[::2], self._held[1::2])
            self._held = [one if other is None else _together(one, other) for one, other in pairs]
            self._each *= 2
        at = self._count // self._each
        self._held[at:] = [reduce(_together, [*self._held[at:], line])]
        self._newest = [line] if self._each > 1 else []
        self._count += 1

    @property
    def lines(self) -> list[dict[str, Any]]:
        """In their order, each with the step of its first; behind them the newest, with its own."""
        return [*self._held, *self._newest]


def _together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**_both(one, other), "step": one["step"]}


def _both(one: Any, other: Any, name: str = "") -> Any:
    """Of each number of two lines the one that counts where they share a column."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {each: _both(one.get(each), other.get(each), each) for each in {**one, **other}}
    numbers = [each for each in (one, other) if is_number(each)]
    choose = min if name in LOWEST else max
    return choose(numbers) if numbers else other if one is None else one


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    """Also one that is not finite, which is a gap."""
    return isinstance(value, float) or is_number(value)


def _table(
    statistic: str, units: Mapping[str, Sequence[tuple[int, float]]], first: int, last: int, columns: int
) -> Floats:
    table = np.full((min(len(units), MOST_ROWS), columns), math.nan)
    choose = np.fmin if statistic in LOWEST else np.fmax
    for row, numbers in zip(table, units.values(), strict=False):
        for step, value in numbers:
            column = min(columns - 1, (step - first) * columns // max(1, last - first))
            row[column] = choose(row[column], value if math.isfinite(value) else math.nan)
    return table


def drawn(lines: Sequence[Mapping[str, Any]]) -> Html:
    """All thermometers, by site; what is most telling first."""
    sites: dict[str, list[Heat]] = {}
    for heat in heats(lines):
        sites.setdefault(heat.site, []).append(heat)
    return joined(_site(site, group) for site, group in sites.items())


def _site(site: str, group: Sequence[Heat]) -> Html:
    still = [heat for heat in group if heat.constant is not None]
    moving = [heat for heat in group if heat.constant is None and np.isfinite(heat.table).any()]
    moving.sort(key=lambda heat: FIRST.index(heat.statistic) if heat.statistic in FIRST else len(FIRST))
    shown = [heat for heat in moving if heat.statistic in FIRST] or moving[:2]
    others = [heat for heat in moving if heat not in shown]
    parts = [tag("h3", _words(site)), tag("div", *map(_figure, shown), class_="two")]
    if others:
        names = ", ".join(_words(heat.statistic) for heat in others)
        parts.append(tag("details", tag("summary", f"more: {names}"), tag("div", *map(_figure, others), class_="two")))
    if still:
        alike = ", ".join(f"{_words(heat.statistic)} {short(heat.constant or 0.0)}" for heat in still)
        parts.append(tag("p", f"The same in every unit and step: {alike}.", class_="quiet"))
    return tag("section", *parts, class_="site")


def _figure(heat: Heat) -> Html:
    there = heat.table[np.isfinite(heat.table)]
    low, high = float(there.min()), float(there.max())
    log = low > 0 and high / low > LOG_FROM
    table = np.log10(heat.table) if log else heat.table
    cells = indices(table, math.log10(low) if log else low, math.log10(high) if log else high)
    rows = len(cells)
    every = max(1, -(-rows // 12))
    names = (
        tag("span", unit, style=f"top:{100 * (row + 0.5) / rows:.2f}%")
        for row, unit in enumerate(heat.units[:rows])
        if row % every == 0
    )
    image = tag(
        "div",
        void("img", alt=_words(heat.statistic), src=png(cells), style=f"height:{max(72, min(360, 15 * rows))}px"),
        class_="map",
        data_low=f"{low:.6g}",
        data_high=f"{high:.6g}",
        data_log="1" if log else None,
        data_first=heat.first,
        data_last=heat.last,
        data_rows="\n".join(heat.units[:rows]),
    )
    bar = tag("span", short(low), tag("i", class_="ramp"), short(high), " log" if log else "", class_="legend")
    return tag(
        "figure",
        tag("figcaption", tag("b", _words(heat.statistic)), bar),
        tag(
            "div",
            tag("div", *names, class_="up"),
            image,
            tag("div", tag("span", f"step {heat.first:,}"), tag("em", f"{heat.last:,}"), class_="across ends"),
            class_="plot",
        ),
        class_="heat",
    )


def _words(name: str) -> str:
    return NAMES.get(name, name.replace("_", " "))
