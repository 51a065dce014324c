"""The page of a run, or of several beside each other: one HTML file that fetches nothing. Pure but for the clock.

What is told of a run is escaped, and its credentials are hidden; the page's own policy forbids it to load anything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from colonnade.drawing import chart
from colonnade.drawing.document import document, foot, notes, tile
from colonnade.drawing.html import Html, joined, table, tag
from colonnade.drawing.scale import length_of_time, percent, short
from colonnade.launch.restart_policy import NO_RESTART
from colonnade.report import gantt, happened, heat, memory, settings, sweep
from colonnade.report.charts import charts, final, places
from colonnade.report.record import Record, can_be_shown
from colonnade.report.sweep import SweepRecord
from colonnade.train.divergence import NO_ROLLBACK, has_returned
from colonnade.train.interrupt import STOPPED

STATES = {
    "finished": "finished",
    "stopped early": "finished early",
    STOPPED: "stopped",
    "diverged": "diverged",
    NO_RESTART: "ended by a fault",
}
"""What the newest telling event says of a run; before any of these it is under way."""
GOES_ON = ("started", "resumed")
"""Events behind which it is so again, beside those that `has_returned` tells."""
AT_WORK = 900.0
"""[seconds] A run that has written nothing for longer is said to be silent."""


def page(runs: Sequence[Record], *, refresh: int = 0) -> str:
    """The page. `refresh`: seconds after which a browser reads it again; 0: never."""
    axes = chart.scales([places(run) for run in runs])
    radios = joined(_radio(axis, checked=number == 0) for number, axis in enumerate(axes))
    labels = (tag("label", words, for_=f"x-{axis}") for axis, words in chart.AXES.items() if axis in axes)
    bar = tag("nav", tag("b", "by"), *labels) if len(axes) > 1 else Html()
    body = [
        *_top(runs),
        bar,
        *_notes(runs),
        _all_charts(runs, axes),
        *(_run(run, alone=len(runs) == 1) for run in runs),
    ]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return document(title, joined([radios, tag("main", *body, foot())]), refresh=refresh)


def sweep_page(found: SweepRecord) -> str:
    """The page of a sweep."""
    return document(found.name, tag("main", sweep.drawn(found), foot()))


def _radio(axis: str, *, checked: bool) -> Html:
    return Html(f'<input type="radio" name="x" id="x-{axis}"{" checked" * checked}>')


def _top(runs: Sequence[Record]) -> list[Html]:
    if len(runs) == 1:
        return [_head(runs[0]), tag("div", *_tiles(runs[0]), class_="tiles")]
    names = (
        tag("li", tag("i", class_=f"key c{number % 8}"), tag("b", run.name), " ", _state(run))
        for number, run in enumerate(runs)
    )
    return [tag("header", tag("h1", f"{len(runs)} runs")), tag("ul", *names, class_="runs"), _comparison(runs)]


def _head(run: Record) -> Html:
    setup = run.setup
    words = [setup.get("layout"), setup.get("precision"), setup.get("device_name") or setup.get("device")]
    if can_be_shown(setup.get("parameters")):
        words.insert(0, f"{short(setup['parameters'])} parameters")
    about = " · ".join(str(word) for word in words if word)
    head = tag("h1", run.name, " ", tag("span", _state(run), class_=f"state {state_of(run)}"))
    done, planned = (run.steps[-1] if len(run.steps) else 0), run.planned
    progress = Html()
    if planned:
        words_of = f"step {done:,.0f} of {planned:,}"
        progress = tag("div", tag("i", style=f"width:{100 * done / planned:.2f}%"), class_="progress", title=words_of)
    return tag("header", head, tag("p", about, class_="quiet"), progress)


def state_of(run: Record) -> str:
    """One of STATES' keys, or 'running'."""
    state = "running"
    for event in run.events:
        name = event["event"]
        if name in GOES_ON or has_returned(event):
            state = "running"
        elif name == NO_ROLLBACK:
            state = "diverged"
        elif name == NO_RESTART:
            state = name if state == "running" else state  # else that is why
        elif name in STATES and event.get("then") != "roll_back":  # what has diverged may return by itself
            state = state if (state, name) == ("stopped early", "finished") else name  # which both have last
    return state.replace(" ", "-")


def seconds_left(run: Record) -> float | None:
    """How long the steps that are left of a run take if they are as long as its last 50; None of a run that does not go
    on, and where that is not known.
    """
    seconds = run.columns.get("seconds")
    if state_of(run) != "running" or seconds is None or not run.planned:
        return None
    return float(seconds[-50:].mean()) * (run.planned - float(run.steps[-1]))


def _state(run: Record) -> str:
    state = state_of(run)
    if state != "running":
        return STATES[state.replace("-", " ")]
    return "under way" if run.seconds_since < AT_WORK else f"silent for {length_of_time(run.seconds_since)}"


def _tiles(run: Record) -> list[Html]:
    numbers = final(run)
    tiles = []
    if len(run.steps):
        of = f"of {run.planned:,}" if run.planned else ""
        tiles.append(tile("step", f"{run.steps[-1]:,.0f}", of))
        left = seconds_left(run)
        note = "" if left is None else f"{length_of_time(left)} left"
        tiles.append(tile("training", length_of_time(float(run.hours[-1]) * 3600), note))
    if "loss" in numbers:
        tiles.append(tile("loss", f"{numbers['loss']:.4f}", "nats per token"))
    if "validation_loss" in numbers:
        tiles.append(
            tile("best validation", f"{numbers['validation_loss']:.4f}", f"at step {numbers['best_step']:,.0f}")
        )
    if "tokens" in numbers:
        tiles.append(tile("tokens", short(numbers["tokens"]), ""))
    if "tokens_per_second" in numbers:
        tiles.append(tile("tokens per second", f"{numbers['tokens_per_second']:,.0f}", "median of 50 steps"))
    if "mfu" in numbers:
        tiles.append(tile("MFU", percent(numbers["mfu"]), "of the devices' peak"))
    return tiles


def _notes(runs: Sequence[Record]) -> list[Html]:
    lines = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    lines += [str(note) for run in runs for note in _listed(run.setup.get("notes"))]
    return notes(lines)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _all_charts(runs: Sequence[Record], axes: Mapping[str, Any]) -> Html:
    marks = happened.marks(runs[0]) if len(runs) == 1 else []
    through = [mark for mark in marks if mark.kind not in happened.MINOR][-200:]
    shown = charts(runs)
    figures = [
        chart.drawn(
            each,
            axes,
            through,
            below=joined([chart.lane(marks, axes), happened.legend(marks)]) if number == 0 and axes else "",
        )
        for number, each in enumerate(shown)
    ]
    return joined([tag("div", *figures, class_="charts"), tag("p", chart.thinning(shown), class_="quiet")])


def _run(run: Record, *, alone: bool) -> Html:
    """What is shown of one run at a time."""
    parts = []
    if run.thermometers:
        parts += [tag("h2", "Thermometers"), heat.drawn(run.thermometers)]
    if shown := memory.drawn(run):
        parts += [tag("h2", "Memory and speed: predicted and measured"), shown]
    if run.profile:
        words = ", ".join(gantt.bounds(run.profile))
        parts += [tag("h2", "A profiled step", tag("small", f" {words}")), gantt.drawn(run.profile)]
    if run.events:
        parts += [tag("h2", "Events"), happened.listed(run)]
    if run.config:
        parts += [tag("h2", "Configuration"), settings.drawn(run)]
    if alone:
        return tag("div", *parts)
    return tag(
        "details", tag("summary", tag("b", run.name), ": thermometers, memory, profile, events, configuration"), *parts
    )


def _comparison(runs: Sequence[Record]) -> Html:
    """Last numbers of each run, and the keys in which they differ."""
    rows = []
    for run in runs:
        numbers = final(run)
        rows.append(
            [
                run.name,
                f"{run.steps[-1]:,.0f}" if len(run.steps) else "–",
                *(f"{numbers[name]:.4f}" if name in numbers else "–" for name in ("loss", "validation_loss")),
                *(short(numbers[name]) if name in numbers else "–" for name in ("tokens", "tokens_per_second")),
                percent(numbers["mfu"]) if "mfu" in numbers else "–",
                length_of_time(float(run.hours[-1]) * 3600) if len(run.steps) else "–",
            ]
        )
    head = ["run", "step", "loss", "best validation", "tokens", "tokens/s", "MFU", "training"]
    return joined([table(head, rows, numbers=range(1, 8)), settings.differences(runs)])
