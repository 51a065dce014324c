"""Bars: what stands beside each other in time, or adds up to a whole; a row each. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from colonnade.drawing.html import Html, joined, tag
from colonnade.drawing.scale import length_of_time, percent

KINDS = {"F": "forward", "B": "backward", "W": "weight gradients", "optimizer": "optimizer", "wait": "waits"}
"""Kinds of actions in words; of each, the page has a colour."""
ROOM = 0.018
"""[share of a bar] From here on a box has room for its name."""


class Box(NamedTuple):
    """A piece of a bar."""

    start: float
    """[share of the bar]"""
    width: float
    """[share of the bar]"""
    colour: str
    """A class of the page's: p0 … p9 for work, w0 … w3 for waiting, rest, kF …"""
    about: str
    """What is said of it under the pointer."""
    name: str = ""


class Span(NamedTuple):
    """An action from its start to its end."""

    kind: str
    """One of KINDS, or another word."""
    name: str
    """Short enough to stand in its box; empty: it has none."""
    start: float
    """[s]"""
    end: float
    """[s]"""


def bar(boxes: Iterable[Box]) -> Html:
    """Boxes beside each other; names where there is room."""
    rects, names = [], []
    for start, width, colour, about, name in boxes:
        rects.append(
            tag("rect", tag("title", about), x=f"{1000 * start:.2f}", y="0", width=f"{1000 * width:.2f}", height="10",
                class_=colour)
        )  # fmt: skip
        if name and width > ROOM:
            names.append(tag("b", name, style=f"left:{100 * (start + width / 2):.2f}%"))
    return tag("div", tag("svg", *rects, viewBox="0 0 1000 10", preserveAspectRatio="none"), *names, class_="bar")


def stacked(
    parts: Mapping[str, float], colours: Mapping[str, str], words: Callable[[float], str], *, whole: float | None = None
) -> Html:
    """Parts of a whole behind each other. `whole`: what the bar's length stands for; None: their sum."""
    total = sum(parts.values())
    length, at, boxes = whole or total or 1.0, 0.0, []
    for name, size in parts.items():
        share = max(0.0, size) / length
        of_all = percent(max(0.0, size) / (total or 1.0))
        boxes.append(Box(at, share, colours[name], f"{name}: {words(size)}, {of_all}"))
        at += share
    return bar(boxes)


def row(name: object, inside: Html) -> Html:
    """A bar with its name before it."""
    return tag("div", tag("span", name, title=name), inside, class_="row")


def legend(colours: Mapping[str, str]) -> Html:
    """What each colour is."""
    keys = (tag("span", tag("i", class_=f"key {colour}"), name) for name, colour in colours.items())
    return tag("span", *keys, class_="legend")


def figure(title: str, about: str, colours: Mapping[str, str], rows: Iterable[object], *below: object) -> Html:
    """Rows of bars with a title and what the colours are."""
    head = tag("figcaption", tag("b", title), f" {about}", legend(colours))
    return tag("figure", head, *rows, *below, class_="gantt")


def across(highest: float, words: Callable[[float], str]) -> Html:
    """Numbers under bars whose length stands for `highest`."""
    ticks = (
        tag("span", words(highest * share / 4) if share else "0", style=f"left:{25 * share}%") for share in range(5)
    )
    return row("", tag("div", *ticks, class_="across"))


def gantt(
    title: str,
    about: str,
    rows: Iterable[tuple[object, Sequence[Span]]],
    until: float,
    *,
    words: Callable[[float], str] = length_of_time,
    note: str = "",
) -> Html:
    """A row for each of those who act, from 0 to `until`. `words`: how times are written; `note`: a sentence below."""
    found = list(rows)
    kinds = dict.fromkeys(span.kind for _, spans in found for span in spans)
    colours = {KINDS.get(kind, kind): f"k{kind}" for kind in kinds} | {"idle": "idle"}
    bars = [row(name, bar(_box(span, until, words) for span in spans)) for name, spans in found]
    below = tag("p", note, class_="quiet") if note else ""
    return figure(title, about, colours, bars, joined([across(until, words), below]))


def _box(span: Span, until: float, words: Callable[[float], str]) -> Box:
    number = span.name[1:]
    about = f"{KINDS.get(span.kind, span.kind)} {number} {words(span.end - span.start)}"
    return Box(span.start / until, (span.end - span.start) / until, f"k{span.kind}", about, span.name)
