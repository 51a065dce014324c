"""Memory and traffic of a plan as pictures: over a step, and by kind on each kind of rank. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from colonnade.drawing import bars, chart
from colonnade.drawing.chart import Chart, Series
from colonnade.drawing.html import Html, joined, table, tag
from colonnade.drawing.scale import axis_of, bytes_in_words
from colonnade.drawing.thin import MOST
from colonnade.planner.cost import Cost
from colonnade.planner.operators import Section
from colonnade.planner.paper import Walk
from colonnade.planner.ranks import RankPlan, stages_in_words
from colonnade.planner.timeline import Clock

NEAR = 4.0
"""The device's memory is drawn where a rank takes more than one part in so many of it."""
KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations", "operators")
AXIS = "place"


class Course(NamedTuple):
    """What is alive on a rank over a step."""

    places: Sequence[float]
    """Rising: [s] from the step's start, or the number of operators and collectives before."""
    sizes: Sequence[int]
    """[bytes] In all, from each place on."""
    end: float


def course(walk: Walk, spans: Sequence[tuple[float, float]] | None, cost: Cost | None) -> Course:
    """Of a walk. `spans`: [s] from when to when each section is at work, with the machine's `cost`; None: by events."""
    always = walk.memory.parameters + walk.memory.gradients + walk.memory.optimizer
    clock, places, sizes, done = Clock(cost) if cost else None, [0.0], [always], 0.0
    for number, section in enumerate(walk.sections):
        within = _within(section, clock)
        start, end = spans[number] if spans else (done, done + within[-1])
        stretch = (end - start) / within[-1] if within[-1] else 0.0
        places += [start + stretch * at for at in within[:-1]]
        sizes += [always + size for _, size in section.alive]
        done = max(done, end)
    return Course(places, sizes, done)


def _within(section: Section, clock: Clock | None) -> list[float]:
    """When each change of what is alive comes, from the section's start; its end: [s], or events with no clock."""
    cuts = [*(at for at, _ in section.alive), len(section.events)]
    if clock is None:
        return [float(at) for at in cuts]
    found, passed, before = [], 0.0, 0
    for at in cuts:
        passed += clock.play(section.events[before:at])
        before = at
        found.append(passed)
    return found


def over_time(name: str, walk: Walk, found: Course, *, axis: str, limit: float | None) -> Html:
    """A chart of what a rank holds. `limit`: [bytes] of its device, None where it is not known."""
    places, sizes = np.array([*found.places, found.end]), np.array([*found.sizes, found.sizes[-1]], dtype=np.float64)
    lines = [Series(name, sizes, {AXIS: places}, 0, is_filled=True)]
    always = walk.memory.parameters + walk.memory.gradients + walk.memory.optimizer
    ends = np.array([0.0, found.end])
    lines.append(Series("always there", np.full(2, float(always)), {AXIS: ends}, 2))
    if limit is not None and walk.peak.bytes * NEAR > limit:
        lines.append(Series("the device's memory", np.full(2, limit), {AXIS: ends}, 5))
    when = str(walk.peak.action) if walk.peak.action else "outside of the schedule"
    most = f"at most {bytes_in_words(walk.peak.bytes)}, in {when}"
    drawn = Chart(f"Memory of {name}", lines, most, may_be_log=False, from_zero=True, in_words=bytes_in_words)
    each = -(-len(sizes) // MOST)
    note = f"A point of the line is the mean of up to {each:,} changes; the band reaches their highest." * (each > 1)
    below = tag("p", note, class_="quiet") if note else ""
    return chart.drawn(drawn, {AXIS: axis_of(found.end)}, names={AXIS: axis}, below=below)


def by_kind(plan: RankPlan, limit: float | None) -> Html:
    """A bar and a line of numbers for each kind of rank."""
    most = max(kind.memory.total for kind in plan.kinds)
    length = max(most, limit) if limit is not None and most * NEAR > limit else float(most)
    colours = {name: f"p{number}" for number, name in enumerate(KINDS)}
    rows, numbers = [], []
    hosted = any(kind.memory.host for kind in plan.kinds)
    for kind in plan.kinds:
        sizes = asdict(kind.memory)
        parts = {name: float(sizes[name]) for name in KINDS}
        rows.append(bars.row(_ranks(kind.stages), bars.stacked(parts, colours, bytes_in_words, whole=length)))
        shown = [*map(bytes_in_words, parts.values()), bytes_in_words(kind.memory.total)]
        numbers.append([stages_in_words(kind.stages), f"{kind.num_ranks:,}", *shown])
        numbers[-1] += [bytes_in_words(kind.memory.host)] * hosted
    head = ["stage", "ranks", *KINDS, "in all", *["CPU memory"] * hosted]
    about = f"as if every peak came at one moment, {plan.not_counted}"
    bar = bars.figure("Memory by kind", about, colours, rows, bars.across(length, bytes_in_words))
    return joined([bar, table(head, numbers, numbers=range(1, len(head)))])


def traffic(plan: RankPlan) -> Html:
    """What each kind of rank puts in or receives in a step."""
    flows = [(kind.stages, _by_axis(kind.traffic)) for kind in plan.kinds]
    names = list(dict.fromkeys(name for _, sent in flows for name in sent))
    if not names:
        return tag("p", "Ranks send nothing.", class_="quiet")
    colours = {name: f"p{number % 10}" for number, name in enumerate(names)}
    length = max(sum(size for _, size in sent.values()) for _, sent in flows) or 1.0
    rows = (
        bars.row(
            _ranks(stages),
            bars.stacked(
                {name: float(size) for name, (_, size) in sent.items()}, colours, bytes_in_words, whole=length
            ),
        )
        for stages, sent in flows
    )
    about = "what a rank puts in, or receives, in a step"
    bar = bars.figure("Traffic by axis", about, colours, rows, bars.across(length, bytes_in_words))
    return joined([bar, table(["stage", "axis and operation", "times", "in all"], _flows(flows), numbers=(2, 3))])


def _by_axis(sent: Mapping[tuple[str, str], tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """(count, bytes) by axis and operation, in their order."""
    return dict(sorted((f"{axis} {operation}", each) for (operation, axis), each in sent.items()))


def _flows(flows: Sequence[tuple[tuple[int, ...], Mapping[str, tuple[int, int]]]]) -> Iterator[list[object]]:
    for stages, sent in flows:
        for name, (count, size) in sent.items():
            yield [stages_in_words(stages), name, f"{count:,}", bytes_in_words(size)]


def _ranks(stages: Sequence[int]) -> str:
    return f"stage {stages_in_words(stages)}"
