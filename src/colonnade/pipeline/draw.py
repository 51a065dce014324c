"""A simulated schedule as a picture: text for a terminal, SVG for a page. Pure.

    time    0     2     4     6            time runs to the right; a row is a stage
    stage 0 │F0 F1 ···B0─── B1─── │        F: forward of micro-batches 0 and 1, B: backward, W: weight gradients
    stage 1 │···F0 B0─── F1 B1─── ···│     · : the stage waits

An action is as wide as it lasts. With virtual stages, F0.1 is the forward of micro-batch 0 in the stage's chunk 1.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from colonnade.pipeline.schedule import Action, Kind
from colonnade.pipeline.simulate import Event, Simulation

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weight gradients"}
COLOURS = {"F": ("#8fb8de", "#d9e8f6"), "B": ("#f5b971", "#fde6c8"), "W": ("#94cc8a", "#dcf0d8")}
"""By kind: of a stage's first chunk, and of its last."""


@dataclass(frozen=True)
class Scale:
    """Time to places on the picture."""

    per_time: float
    """[columns or pixels] What one unit of time takes."""
    tick: float
    """[time] Between two numbers on the ruler: 1, 2 or 5 times a power of ten."""

    def at(self, time: float) -> int:
        return round(time * self.per_time)

    def ticks(self, start: float, end: float) -> Iterator[float]:
        """The times on the ruler from `start` to before `end`."""
        first = round(start / self.tick)
        yield from (number * self.tick for number in range(first, math.ceil(end / self.tick - 1e-9)))


def label(action: Action, virtual_stages: int) -> str:
    """'F12', and 'F12.1' where a stage has several chunks."""
    return f"{action.kind}{action.microbatch}" + (f".{action.chunk}" if virtual_stages > 1 else "")


def text(simulation: Simulation, *, width: int = 120, panels: int = 4) -> str:
    """Lines of at most `width` columns, about.

    A schedule that is wider goes on in panels below each other; of more than `panels`, the middle ones are left out.
    """
    virtual_stages = _virtual_stages(simulation)
    scale = _scale(simulation, 1 + max(len(label(event.action, virtual_stages)) for event in _all(simulation)), 6)
    length = scale.at(simulation.makespan)
    rows = [_row(events, scale, virtual_stages).ljust(length, "·") for events in simulation.events]
    margin = len(f"stage {len(rows) - 1} ")
    panel_time = scale.tick * max(1, int((width - margin - 2) / (scale.per_time * scale.tick)))
    starts = [number * panel_time for number in range(int(simulation.makespan / panel_time - 1e-9) + 1)]
    half = panels // 2
    drawn = [_panel(rows, scale, start, min(start + panel_time, simulation.makespan), margin) for start in starts]
    if len(starts) > panels:
        drawn[half:-half] = [f"… time {starts[half]:g} to {starts[-half]:g} is left out …"]
    return "\n\n".join(drawn)


def _fitting(action: Action, virtual_stages: int, width: int) -> str:
    """The longest name of an action that its columns hold: 'F12.1', 'F12', 'F'."""
    names = [label(action, virtual_stages), label(action, 1), action.kind]
    return next((name for name in names if len(name) <= width), "")


def _row(events: Sequence[Event], scale: Scale, virtual_stages: int) -> str:
    """A stage's actions, each over the columns of its time."""
    parts, at = [], 0
    for event in events:
        start, end = scale.at(event.start), scale.at(event.end)
        name = _fitting(event.action, virtual_stages, end - start)
        parts += ["·" * (start - at), name.ljust(end - start - 1, "─").ljust(end - start)]
        at = end
    return "".join(parts)


def _panel(rows: Sequence[str], scale: Scale, start: float, end: float, margin: int) -> str:
    """The ruler and all rows from one time to another."""
    first, last = scale.at(start), scale.at(end)
    ruler = "time".ljust(margin + 1)
    for time in scale.ticks(start, end):
        ruler = ruler.ljust(margin + 1 + scale.at(time) - first) + f"{time:g}"
    lines = [f"stage {stage} ".ljust(margin) + f"│{row[first:last]}│" for stage, row in enumerate(rows)]
    return "\n".join([ruler, *lines])


ROW, BOX, MARGIN = 30, 24, 64  # pixels: from stage to stage, height of an action, left of the first
WIDEST = 4000  # pixels


def svg(simulation: Simulation, *, title: str) -> str:
    """A picture that stands alone: one box an action, its name in it and its times when pointed at."""
    virtual_stages = _virtual_stages(simulation)
    longest = max(len(label(event.action, virtual_stages)) for event in _all(simulation))
    scale = _scale(simulation, 8 + 7 * longest, 40, most=WIDEST / simulation.makespan)
    width = MARGIN + scale.at(simulation.makespan) + 16
    height = 40 + ROW * len(simulation.events) + 60
    boxes = (
        _box(event, stage, scale, virtual_stages) for stage, events in enumerate(simulation.events) for event in events
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            _words(8, 20, title, bold=True),
            *(_words(8, _top(stage) + 16, f"stage {stage}") for stage in range(len(simulation.events))),
            *(_track(stage, scale.at(simulation.makespan)) for stage in range(len(simulation.events))),
            *boxes,
            *_ruler(simulation, scale),
            *_legend(simulation, height),
            "</svg>\n",
        ]
    )


def _box(event: Event, stage: int, scale: Scale, virtual_stages: int) -> str:
    x, width = MARGIN + scale.at(event.start), scale.at(event.end) - scale.at(event.start)
    name = label(event.action, virtual_stages)
    written = _words(x + width / 2, _top(stage) + 16, name, middle=True) if 7 * len(name) <= width else ""
    about = f"{NAMES[event.action.kind]} of micro-batch {event.action.microbatch}, chunk {event.action.chunk}, stage "
    colour = _colour(event.action, virtual_stages)
    return (
        f'<g><title>{about}{stage}: {event.start:g} to {event.end:g}</title><rect x="{x}" y="{_top(stage)}" '
        f'width="{width}" height="{BOX}" fill="{colour}" stroke="white"/>{written}</g>'
    )


def _colour(action: Action, virtual_stages: int) -> str:
    """From the kind's first colour to its last, by chunk."""
    first, last = COLOURS[action.kind]
    share = action.chunk / max(1, virtual_stages - 1)
    parts = [(int(first[at : at + 2], 16), int(last[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in parts)


def _track(stage: int, width: int) -> str:
    """What shows where a stage waits."""
    return f'<rect x="{MARGIN}" y="{_top(stage)}" width="{width}" height="{BOX}" fill="#eeeeee"/>'


def _ruler(simulation: Simulation, scale: Scale) -> Iterator[str]:
    below = _top(len(simulation.events)) + 14
    for time in scale.ticks(0, simulation.makespan):
        yield _words(MARGIN + scale.at(time), below, f"{time:g}")


def _legend(simulation: Simulation, height: int) -> Iterator[str]:
    x = MARGIN
    for kind in dict.fromkeys(event.action.kind for event in _all(simulation)):
        yield f'<rect x="{x}" y="{height - 26}" width="14" height="14" fill="{COLOURS[kind][0]}"/>'
        yield _words(x + 20, height - 15, NAMES[kind])
        x += 40 + 7 * len(NAMES[kind])
    yield _words(x, height - 15, "grey: waiting" + (", paler: later chunk" if _virtual_stages(simulation) > 1 else ""))


def _words(x: float, y: float, words: str, *, bold: bool = False, middle: bool = False) -> str:
    style = ' font-weight="bold"' * bold + ' text-anchor="middle"' * middle
    return f'<text x="{x:g}" y="{y:g}"{style}>{escape(words)}</text>'


def _top(stage: int) -> int:
    return 36 + ROW * stage


def _scale(simulation: Simulation, room: int, between: int, *, most: float = float("inf")) -> Scale:
    """Shows short actions `room` wide, and numbers on the ruler at least `between` apart.

    Actions shorter than a tenth of the mean get less room than they need for their names.
    """
    durations = [event.end - event.start for event in _all(simulation)]
    mean = sum(durations) / len(durations)
    short = min(duration for duration in durations if duration >= mean / 10)
    per_time = min(room / short, most)
    tick = next(
        factor * 10.0**power
        for power in range(-9, 12)
        for factor in (1, 2, 5)
        if factor * 10.0**power * per_time >= between
    )
    return Scale(per_time, tick)


def _virtual_stages(simulation: Simulation) -> int:
    return 1 + max(event.action.chunk for event in _all(simulation))


def _all(simulation: Simulation) -> Iterator[Event]:
    return (event for events in simulation.events for event in events)
