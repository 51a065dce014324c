"""Time of a plan as pictures: the pipeline, what a step goes to, and operators under the device's roof. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from colonnade.drawing import bars, scatter
from colonnade.drawing.bars import Span
from colonnade.drawing.html import Html, joined, table, tag
from colonnade.drawing.scale import length_of_time, percent, scale_of, short
from colonnade.drawing.scatter import Curve, Dot
from colonnade.pipeline.simulate import Simulation
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import Estimate
from colonnade.planner.estimate_report import in_words
from colonnade.planner.operators import Operator

MOST_ACTIONS, MOST_OF_A_STAGE = 2400, 72
"""That are drawn: of all stages, and of each, so that one can see them."""
MOST_STAGES = 64
MOST_OPERATORS = 25
"""Kinds of operators in the table; of dots there are MOST_DOTS."""
MOST_DOTS = 400


def pipeline(
    simulation: Simulation, *, about: str, words: Callable[[float], str] = length_of_time, note: str = ""
) -> Html:
    """Each stage's actions over the step, or the step's start where there are too many. `words`: how times are written,
    `note`: a sentence below.
    """
    stages = simulation.events[:MOST_STAGES]
    each = max(1, min(MOST_OF_A_STAGE, MOST_ACTIONS // len(stages)))
    until = min((events[each].start for events in stages if len(events) > each), default=simulation.makespan)
    rows = [
        (
            f"stage {stage}",
            [
                Span(event.action.kind, str(event.action), event.start, min(event.end, until))
                for event in events
                if event.start < until
            ],
        )
        for stage, events in enumerate(stages)
    ]
    cut = [note] if note else []
    if until < simulation.makespan:
        cut.append(f"The first {percent(until / simulation.makespan)} of the schedule is drawn; it goes on like this.")
    if len(simulation.events) > MOST_STAGES:
        cut.append(f"The first {MOST_STAGES} of {len(simulation.events)} stages are drawn.")
    return bars.gantt("Pipeline", about, rows, until, words=words, note=" ".join(cut))


def parts(found: Estimate) -> Html:
    """What each kind of stage spends a step on."""
    whole = found.seconds_per_step
    rows: dict[str, dict[str, float]] = {}
    for stage, played in found.played.items():
        taught = {what: seconds for what, seconds in found.spent.items() if what == "teacher"}
        spent = {what: seconds for what, seconds in {**played.spent, **taught}.items() if seconds > 0}
        waits = whole - sum(spent.values())
        rows[f"stage {stage}"] = {**spent, **({"rest": waits} if waits > 1e-3 * whole else {})}
    names = list(dict.fromkeys(name for each in rows.values() for name in each))
    names.sort(key=lambda name: (name == "rest", -max(each.get(name, 0.0) for each in rows.values())))
    colours = {name: "rest" if name == "rest" else f"p{number % 9}" for number, name in enumerate(names)}
    legend = {_in_words(name): colour for name, colour in colours.items()}
    bar = (
        bars.row(
            stage,
            bars.stacked(
                {_in_words(name): each[name] for name in names if name in each}, legend, length_of_time, whole=whole
            ),
        )
        for stage, each in rows.items()
    )
    numbers = ([_in_words(name), *(_share(each.get(name, 0.0), whole) for each in rows.values())] for name in names)
    figure = bars.figure("A step", length_of_time(whole), legend, bar, bars.across(whole, length_of_time))
    return joined([figure, table(["", *rows], numbers, numbers=range(1, len(rows) + 1))])


def _in_words(name: str) -> str:
    return "waiting for other stages and data, and checkpoints" if name == "rest" else in_words(name)


def _share(seconds: float, whole: float) -> str:
    return f"{length_of_time(seconds)} · {percent(seconds / whole)}" if seconds else ""


@dataclass(frozen=True)
class Alike:
    """Operators of a step with the same arithmetic and bytes."""

    operator: Operator
    count: int
    seconds: float
    """Of all of them."""

    @property
    def name(self) -> str:
        product = self.operator.product
        sizes = f" {product[0]} × [{product[1]}, {product[3]}] · [{product[3]}, {product[2]}]" if product else ""
        return f"{self.operator.name.strip('_')}{sizes}, {self.operator.dtype}"

    @property
    def rate(self) -> float:
        """[FLOP/s]"""
        return self.count * self.operator.flops / self.seconds

    @property
    def intensity(self) -> float:
        """[FLOPs a byte]"""
        return self.operator.flops / max(1, self.operator.bytes)


def alike(operators: Iterable[Operator], cost: Cost) -> list[Alike]:
    """Those that take most first."""
    counts: dict[Operator, int] = defaultdict(int)
    for each in operators:
        counts[each] += 1
    found = [Alike(each, count, count * cost.operator(each)) for each, count in counts.items()]
    return sorted(found, key=lambda each: -each.seconds)


def roofline(found: Estimate, stage: int) -> Html:
    """Products of a stage under the roof of the device; and which operators take most."""
    cost = found.cost
    every = alike(found.walks[stage].operators, cost)
    dots = [each for each in every if each.operator.flops and each.seconds > 0][:MOST_DOTS]
    peak, bandwidth = found.peak, cost.bandwidth
    picture = _roof(dots, peak / cost.crowding, bandwidth, stage) if dots else ""
    total = sum(each.seconds for each in every)
    rows = (
        [
            each.name,
            f"{each.count:,}",
            length_of_time(each.seconds),
            percent(each.seconds / total),
            _bound(each.operator, cost),
            f"{short(each.rate)}FLOP/s" if each.operator.flops else "",
            f"{short(each.count * each.operator.bytes / each.seconds)}B/s",
        ]
        for each in every[:MOST_OPERATORS]
    )
    head = ["operator", "times", "in all", "of operators", "waits for", "arithmetic", "memory"]
    more = len(every) - MOST_OPERATORS
    note = tag("p", f"… and {more:,} more kinds of operators that take less.", class_="quiet") if more > 0 else ""
    return joined([picture, table(head, rows, numbers=(1, 2, 3, 5, 6)), note])


def _bound(operator: Operator, cost: Cost) -> str:
    arithmetic, movement = cost.arithmetic(operator), cost.movement(operator)
    if cost.operator(operator) > 2 * max(arithmetic, movement):
        return "its start"
    return "arithmetic" if arithmetic >= movement else "memory"


def _roof(dots: Sequence[Alike], peak: float, bandwidth: float, stage: int) -> Html:
    ridge = peak / bandwidth
    across = scale_of([*(each.intensity for each in dots), ridge * 4, ridge / 40], may_be_log=True)
    up = scale_of([*(each.rate for each in dots), peak, across.low * bandwidth], may_be_log=True)
    roof = Curve([(across.low, across.low * bandwidth), (ridge, peak), (across.high, peak)], "c7")
    whole = sum(each.seconds for each in dots)
    marks = [
        Dot(each.intensity, each.rate, f"{each.name}\n{each.count:,} times, {percent(each.seconds / whole)} of these",
            "c1" if each.intensity < ridge else "c0")
        for each in dots
    ]  # fmt: skip
    legend = {"more arithmetic than memory": "c0", "more memory than arithmetic": "c1", "the device's roof": "c7"}
    return scatter.drawn(
        "Roofline", f"FLOP/s of each kind of product and attention, stage {stage}", marks, [roof],
        across=("FLOPs a byte", across, short), up=(up, short), legend=legend,
    )  # fmt: skip
