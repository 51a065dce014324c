"""Dots on two axes, with curves through them. Needs no script: of each dot a browser shows its name. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from colonnade.drawing.chart import HEIGHT, WIDTH, frame
from colonnade.drawing.html import Html, tag
from colonnade.drawing.scale import Scale

Words = Callable[[float], str]
Place = tuple[float, float]


class Dot(NamedTuple):
    """A thing at a place."""

    x: float
    y: float
    name: str
    """What is said of it under the pointer."""
    colour: str
    """A class of the page's: c0 … c7, or quiet."""


class Curve(NamedTuple):
    """A line from place to place."""

    places: Sequence[Place]
    colour: str


def drawn(
    title: str,
    about: str,
    dots: Sequence[Dot],
    curves: Sequence[Curve],
    *,
    across: tuple[str, Scale, Words],
    up: tuple[Scale, Words],
    legend: Mapping[str, str],
) -> Html:
    """The figure. `across`: the name of the horizontal axis, its scale, and how its numbers are written; `up`: the same
    of the vertical one; `legend`: what is drawn in which colour.
    """
    name, horizontal, words = across
    lines = [_curve(each, horizontal, up[0]) for each in curves]
    marks = [_dot(each, horizontal, up[0]) for each in dots]
    keys = (tag("span", tag("i", class_=f"key {colour}"), what) for what, colour in legend.items())
    head = tag("figcaption", tag("b", title), f" {about}", tag("span", *keys, class_="legend"))
    plot = frame(title, [*lines, *marks], ("", name), horizontal, up[0], (words, up[1]))
    return tag("figure", head, plot, class_="scatter")


def _curve(curve: Curve, across: Scale, up: Scale) -> Html:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (_place(at, across, up) for at in curve.places))
    return Html(f'<path class="line {curve.colour}" d="M{path}"/>')


def _dot(dot: Dot, across: Scale, up: Scale) -> Html:
    x, y = _place((dot.x, dot.y), across, up)
    return tag("path", tag("title", dot.name), class_=f"dots {dot.colour}", d=f"M{x:.1f} {y:.1f}h0")


def _place(at: Place, across: Scale, up: Scale) -> Place:
    return WIDTH * across.at(at[0]), HEIGHT * (1 - up.at(at[1]))
