"""Line charts that need no script: a stretched drawing of lines, and texts beside it that stay as large as they are.

Each chart is drawn once for every horizontal axis; the page shows one of these at a time. The numbers of the points go
with it for whoever points at them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from colonnade.drawing.html import Html, data, joined, tag
from colonnade.drawing.scale import Scale, axis_of, percent, scale_of, short
from colonnade.drawing.thin import Floats, Thin, thin

AXES = {"step": "steps", "tokens": "tokens", "hours": "hours of training"}
"""Horizontal axes, by the names of `Series.places`."""
BANDS_UP_TO = 3  # series: of more, bands would hide the lines
WIDTH = HEIGHT = 1000.0  # of the drawing, which is stretched to where it is shown


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str
    values: Floats
    places: Mapping[str, Floats]
    """Where each number is, by horizontal axis."""
    colour: int
    """Its number among the page's colours."""
    dots: bool = False
    """A few numbers far apart: each is marked."""
    is_filled: bool = False
    """The area below it is coloured."""


@dataclass(frozen=True)
class Mark:
    """What happened at a place of the horizontal axes, drawn through the chart."""

    kind: str
    words: str
    places: Mapping[str, float]


@dataclass(frozen=True)
class Chart:
    """Lines over one vertical axis."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    is_share: bool = False
    may_be_log: bool = True
    """Whether the vertical axis may be logarithmic, where its numbers are far apart."""
    from_zero: bool = False
    """Whether the vertical axis always begins at 0."""
    in_words: Callable[[float], str] | None = None
    """How its numbers are written along the axis; None: short."""

    @property
    def words(self) -> Callable[[float], str]:
        return self.in_words or (percent if self.is_share else short)


def scales(places: Sequence[Mapping[str, Floats]]) -> dict[str, Scale]:
    """Horizontal axes that all charts share, from where each run is; none for what no run has."""
    found = {}
    for axis in AXES:
        highest = max((float(np.nanmax(each[axis], initial=0.0)) for each in places if axis in each), default=0.0)
        if highest > 0:
            found[axis] = axis_of(highest)
    return found


def drawn(
    chart: Chart,
    axes: Mapping[str, Scale],
    marks: Sequence[Mark] = (),
    *,
    below: Html | str = "",
    names: Mapping[str, str] = AXES,
) -> Html:
    """The chart as a figure; a note where there is nothing to draw. `below`: stands under each drawing. `names`: what
    the axes are.
    """
    thinned = [(series, thin(series.values)) for series in chart.series]
    thinned = [(series, points) for series, points in thinned if len(points.rows)]
    unit = f" {chart.unit}" if chart.unit else ""
    if not thinned or not axes:
        head = tag("figcaption", tag("b", chart.title), unit)
        return tag("figure", head, tag("p", "No numbers yet.", class_="quiet"), class_="chart")
    ends = [float(end(part)) for _, points in thinned for part, end in _ends(points, len(thinned))]
    scale = scale_of([*ends, *[0.0] * chart.from_zero], may_be_log=chart.may_be_log)
    plots = [_plot(chart, thinned, (axis, names[axis]), axes[axis], scale, marks) for axis in axes]
    head = tag("figcaption", tag("b", chart.title), unit, " logarithmic" if scale.log else "", _legend(thinned))
    return tag("figure", head, *plots, below, data(_numbers(chart, thinned, axes, names)), class_="chart")


def _ends(points: Thin, num_series: int) -> Iterator[tuple[Floats, Callable[[Floats], float]]]:
    """What a vertical axis has room for."""
    shown = (points.low, points.high) if num_series <= BANDS_UP_TO else (points.mean, points.mean)
    yield shown[0], np.min
    yield shown[1], np.max


def _legend(thinned: Sequence[tuple[Series, Thin]]) -> Html:
    keys = [tag("span", tag("i", class_=f"key c{series.colour % 8}"), series.name) for series, _ in thinned]
    return tag("span", *keys, class_="legend") if len(thinned) > 1 else Html()


def _plot(
    chart: Chart,
    thinned: Sequence[tuple[Series, Thin]],
    axis: tuple[str, str],
    across: Scale,
    up: Scale,
    marks: Sequence[Mark],
) -> Html:
    """One drawing over one axis: its key and its name."""
    key, _ = axis
    lines = [
        *(_marked(mark, across.at(mark.places[key])) for mark in marks if key in mark.places),
        *(part for series, points in thinned for part in _series(series, points, key, across, up, len(thinned))),
    ]
    return frame(chart.title, lines, axis, across, up, (short, chart.words))


def frame(
    title: str,
    lines: Sequence[Html],
    axis: tuple[str, str],
    across: Scale,
    up: Scale,
    words: tuple[Callable[[float], str], Callable[[float], str]],
) -> Html:
    """What is drawn, within its axes. `axis`: the key (empty: none) and the name of the horizontal one; `words`: how
    numbers are written along it, and along the vertical one.
    """
    key, name = axis
    rows, columns = up.ticks(5), across.ticks(6)
    grid = (_line(0, HEIGHT * (1 - up.at(tick)), WIDTH, HEIGHT * (1 - up.at(tick)), "grid") for tick in rows)
    svg = tag(
        "svg",
        *grid,
        *lines,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title} by {name}",
    )
    left = (_label(words[1](tick), "top", 1 - up.at(tick)) for tick in rows)
    under = (_label(words[0](tick), "left", across.at(tick)) for tick in columns)
    return tag(
        "div",
        tag("div", *left, class_="up"),
        tag("div", svg, class_="area", data_axis=key or None),
        tag("div", *under, tag("em", name), class_="across"),
        class_=f"plot by-{key}" if key else "plot",
    )


def _label(words: str, side: str, share: float) -> Html:
    return tag("span", words, style=f"{side}:{100 * share:.2f}%")


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    return Html(f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')


def _marked(mark: Mark, share: float) -> Html:
    x = WIDTH * share
    return Html(f'<path class="mark {mark.kind}" d="M{x:.1f} 0V{HEIGHT:g}"/>')


def _series(series: Series, points: Thin, axis: str, across: Scale, up: Scale, num_series: int) -> Iterator[Html]:
    places = series.places.get(axis)
    if places is None:
        return
    x = [WIDTH * across.at(float(place)) for place in np.nan_to_num(places[points.rows])]
    path = [HEIGHT * (1 - up.at(float(value))) for value in points.mean]
    if points.each > 1 and num_series <= BANDS_UP_TO:
        high = [HEIGHT * (1 - up.at(float(value))) for value in points.high]
        low = [HEIGHT * (1 - up.at(float(value))) for value in points.low]
        around = _path([*x, *reversed(x)], [*high, *reversed(low)])
        yield Html(f'<path class="band c{series.colour % 8}" d="{around}Z"/>')
    if series.is_filled:
        yield Html(
            f'<path class="band c{series.colour % 8}" d="{_path([*x, x[-1], x[0]], [*path, HEIGHT, HEIGHT])}Z"/>'
        )
    yield Html(f'<path class="line c{series.colour % 8}" d="{_path(x, path)}"/>')
    if series.dots or len(x) == 1:
        spots = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(x, path, strict=True))
        yield Html(f'<path class="dots c{series.colour % 8}" d="{spots}"/>')


def _path(x: Sequence[float], y: Sequence[float]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _numbers(
    chart: Chart, thinned: Sequence[tuple[Series, Thin]], axes: Mapping[str, Scale], names: Mapping[str, str]
) -> dict[str, object]:
    """The points for the page's script."""
    return {
        "share": chart.is_share,
        "axes": {axis: {"high": scale.high, "name": names[axis]} for axis, scale in axes.items()},
        "series": [
            {
                "name": series.name,
                "colour": series.colour % 8,
                "x": {axis: _few(series.places[axis][points.rows]) for axis in axes if axis in series.places},
                "y": _few(points.mean),
                **({"low": _few(points.low), "high": _few(points.high)} if points.each > 1 else {}),
            }
            for series, points in thinned
        ],
    }


def _few(values: Floats) -> list[float | None]:
    """Numbers with the digits that one would read."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def thinning(charts: Sequence[Chart]) -> str:
    """What a point of the charts is; nothing where each is one number."""
    each = max((thin(series.values).each for chart in charts for series in chart.series), default=1)
    band = "; the band behind a line goes from their lowest to their highest"
    return f"A point of a line is the mean of up to {each:,} steps{band}." if each > 1 else ""


def lane(marks: Sequence[Mark], axes: Mapping[str, Scale], *, most: int = 120) -> Html:
    """Events on the charts' horizontal axes. Of one kind, those that would cover each other are one sign."""
    return joined(_lane(marks, axis, scale, most) for axis, scale in axes.items())


def _lane(marks: Sequence[Mark], axis: str, scale: Scale, most: int) -> Html:
    groups: dict[tuple[str, int], list[Mark]] = {}
    for mark in marks:
        if axis in mark.places:
            groups.setdefault((mark.kind, round(most * scale.at(mark.places[axis]))), []).append(mark)
    signs = []
    for (kind, _), group in groups.items():
        words = "\n".join(
            [*(mark.words for mark in group[:12]), *([f"and {len(group) - 12} more"] * (len(group) > 12))]
        )
        share = min(1.0, max(0.0, scale.at(group[0].places[axis])))
        signs.append(tag("i", title=words, class_=f"sign {kind}", style=f"left:{100 * share:.2f}%"))
    return tag("div", tag("div", *signs, class_="signs"), class_=f"lane by-{axis}")
