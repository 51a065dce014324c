"""`colonnade watch`: a run in the terminal while it goes on. Reads its folder, and disturbs nothing."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from colonnade.drawing.scale import length_of_time, percent, short
from colonnade.drawing.thin import thin
from colonnade.errors import ConfigError
from colonnade.report.charts import final
from colonnade.report.happened import details, steps_of
from colonnade.report.page import STATES, seconds_left, state_of
from colonnade.report.record import Record, RunReader
from colonnade.report.sweep import is_sweep
from colonnade.terminal import Console, Group, Live, Panel, ProgressBar, Table, Text

BARS = "▁▂▃▄▅▆▇█"
EVENTS_SHOWN = 6
MOST_SECONDS = 1e6  # between two looks


def watch(folder: Path, *, every: float, once: bool = False, console: Console | None = None) -> None:
    """Show the run until it ends, or until Ctrl-C. `once`: as it is now."""
    if not every < MOST_SECONDS:
        raise ConfigError(f"--every {every} is no time between two looks. Give seconds, like 2.")
    if is_sweep(folder):
        raise ConfigError(
            f"{folder} is the folder of a sweep, and one run is shown. Name a run's folder in it, or draw the sweep "
            f"with `colonnade report {folder}`."
        )
    console = console or Console()
    reader = RunReader(folder, thermometers=False)
    run = reader.read()
    if once:
        console.print(_shown(run, console.width))
        return
    try:
        with Live(_shown(run, console.width), console=console, auto_refresh=False) as live:
            while state_of(run) == "running":
                time.sleep(every)
                run = reader.read()
                live.update(_shown(run, console.width), refresh=True)
    except KeyboardInterrupt:
        return  # whoever watches has seen enough; the run goes on


def _shown(run: Record, width: int) -> Panel:
    done = float(run.steps[-1]) if len(run.steps) else 0.0
    total = run.planned or max(1.0, done)
    parts: list[Table | Text] = [_bar(done, total), _numbers(run)]
    parts += _lines(run, max(20, min(width, 120) - 34))
    events = [
        Text(f"{event['event']:<12} step {step:,.0f}  {details(event)}"[: max(40, width - 6)])
        for event, step in zip(run.events, steps_of(run.events), strict=True)
        if event["event"] != "setup" and step == step
    ][-EVENTS_SHOWN:]
    notes = [Text(note, style="yellow") for note in run.notes]
    state = state_of(run)
    words = STATES.get(state.replace("-", " "), "under way, or ended without a word")
    return Panel(Group(*parts, Text(), *events, *notes), title=Text(f"{run.name}: {words}"), title_align="left")


def _bar(done: float, total: float) -> Table:
    table = Table.grid(expand=True)  # a bar alone does not end its line
    table.add_row(ProgressBar(total=total, completed=done))
    return table


def _numbers(run: Record) -> Table:
    numbers = final(run)
    table = Table.grid(padding=(0, 3))
    cells: list[tuple[str, str]] = []
    if len(run.steps):
        left = seconds_left(run)
        cells = [
            ("step", f"{run.steps[-1]:,.0f} of {run.planned:,}" if run.planned else f"{run.steps[-1]:,.0f}"),
            ("left", "–" if left is None else length_of_time(left)),
        ]
    known: Sequence[tuple[str, str, Callable[[float], str]]] = (
        ("loss", "loss", lambda x: f"{x:.4f}"),
        ("validation_loss", "best validation", lambda x: f"{x:.4f}"),
        ("tokens_per_second", "tokens/s", short),
        ("mfu", "MFU", percent),
    )
    cells += [(words, show(numbers[name])) for name, words, show in known if name in numbers]
    table.add_row(*(Text(name, style="dim") for name, _ in cells))
    table.add_row(*(Text(value, style="bold") for _, value in cells))
    return table


def _lines(run: Record, width: int) -> list[Table]:
    table = Table.grid(padding=(0, 1))
    for name, words in (("loss", "loss"), ("grad_norm", "gradient norm"), ("tokens_per_second", "tokens/s")):
        points = thin(run.columns.get(name, np.array([])), width)
        if len(points.rows):
            ends = f"{short(float(points.low.min()))} – {short(float(points.high.max()))}"
            table.add_row(Text(words, style="dim"), Text(spark(points.mean.tolist())), Text(ends, style="dim"))
    return [table]


def spark(values: Sequence[float]) -> str:
    """A line of bars: the lowest of the values lowest."""
    low, high = min(values), max(values)
    return "".join(BARS[round((value - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for value in values)
