"""`colonnade plan --html`: a plan as one HTML file that fetches nothing. Pure but for the clock and the file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from colonnade.architecture.parts import trained_architecture
from colonnade.config.load import to_toml
from colonnade.config.schema import Config
from colonnade.drawing.document import document, foot, notes, tile
from colonnade.drawing.html import Html, joined, tag
from colonnade.drawing.scale import bytes_in_words, length_of_time, percent, short
from colonnade.mesh.layout import Layout
from colonnade.outputs import write_output
from colonnade.planner import page_memory, page_search, page_time, pipeline_report
from colonnade.planner.estimate import Estimate, stage_kinds
from colonnade.planner.estimate_report import in_words
from colonnade.planner.paper import Walk, walk
from colonnade.planner.pipeline import PipelinePlan, plan_pipeline
from colonnade.planner.ranks import RankPlan, largest, plan_run
from colonnade.planner.search import Confirmed, Search
from colonnade.planner.teacher import has_live_teacher

MOST_CHARTS = 5
"""Kinds of stages of which memory over time is drawn."""


@dataclass(frozen=True)
class Plan:
    """What a page shows."""

    config: Config
    precision: str
    """In words."""
    pipeline: PipelinePlan
    ranks: RankPlan
    walks: Mapping[int, Walk]
    """Of one stage of each kind."""
    estimate: Estimate | None = None
    """Its time; None: no machine is known."""
    search: tuple[Search, Confirmed] | None = None
    """Of what it is the best."""


def walks_of(config: Config, vocab_size: int) -> dict[int, Walk]:
    """Of one stage of each kind, where no machine is known."""
    parallel = config.parallel
    layout = Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    kinds = stage_kinds(trained_architecture(config, vocab_size), parallel)
    return {stage: walk(config, vocab_size, layout.rank_at(pp=stage, dp=0, tp=0)) for stage in dict.fromkeys(kinds)}


def of_search(found: Search, best: Confirmed, vocab_size: int, precision: str) -> Plan:
    """The best layout of a search, beside the others."""
    config, timed = best.candidate.config, best.estimate
    pipeline = plan_pipeline(
        config.model,
        config.parallel,
        num_microbatches=config.train.num_microbatches(config.parallel.dp),
        vocab_size=vocab_size,
        architecture=trained_architecture(config, vocab_size),
    )
    ranks = timed.ranks or plan_run(config, vocab_size)
    return Plan(config, precision, pipeline, ranks, timed.walks, timed, (found, best))


def write(plan: Plan, path: Path) -> None:
    """Write the page; makes its folder."""
    write_output(path, page(plan).encode())


def page(plan: Plan) -> str:
    """The page."""
    found = plan.estimate
    name = Path(plan.config.run.folder).name
    parts = [_head(plan, name), tag("div", *_tiles(plan), class_="tiles"), *notes(_notes(plan))]
    if plan.search is not None:
        search, best = plan.search
        parts += [tag("h2", "Search"), page_search.drawn(search, best.candidate)]
    if found is not None:
        parts += [tag("h2", "Where a step goes"), page_time.parts(found)]
    parts += [tag("h2", "Pipeline"), _pipeline(plan), tag("h2", "Memory"), *_courses(plan)]
    parts.append(page_memory.by_kind(plan.ranks, found.hardware["device.memory"] if found else None))
    parts += [tag("h2", "Traffic"), page_memory.traffic(plan.ranks)]
    if found is not None:
        parts += [tag("h2", "Operators"), page_time.roofline(found, busiest(found))]
    text = tag("details", tag("summary", "the configuration"), tag("pre", to_toml(plan.config)))
    parts += [tag("h2", "Configuration"), text, foot()]
    return document(f"Plan of {name}", tag("main", *parts))


def busiest(found: Estimate) -> int:
    """The stage of those walked that works longest."""
    return max(found.played, key=lambda stage: found.played[stage].total)


def _head(plan: Plan, name: str) -> Html:
    ranks = plan.ranks
    words = [
        f"{short(ranks.parameters)} parameters",
        f"{ranks.layout.num_ranks:,} ranks ({ranks.layout})",
        plan.precision,
        *([plan.estimate.hardware.name] if plan.estimate else []),
    ]
    return tag("header", tag("h1", f"Plan of {name}"), tag("p", " · ".join(words), class_="quiet"))


def _tiles(plan: Plan) -> Iterator[Html]:
    found, memory = plan.estimate, largest(plan.ranks).memory.total
    if found is None:
        yield tile("memory of a rank", bytes_in_words(memory), "at most")
        yield tile("stages wait", percent(plan.pipeline.bubble), f"{percent(plan.pipeline.theory)} if all were equal")
        yield tile("a step", f"{plan.config.train.global_batch_size:,}", "samples")
        return
    fits = "fits" if found.room >= 0 else "does not fit"
    device = bytes_in_words(found.hardware["device.memory"])
    yield tile("a step", length_of_time(found.seconds_per_step), f"{found.tokens_per_step:,} tokens")
    yield tile("tokens per second", f"{found.tokens_per_second:,.0f}", "of all ranks")
    yield tile("MFU", percent(found.mfu), f"of {found.peak / 1e12:,.4g} TFLOP/s")
    yield tile("memory of a rank", bytes_in_words(found.memory), f"{fits} into {device}")
    yield tile("the run", length_of_time(found.days * 86400), f"{found.steps:,} steps, without failures")
    failures = length_of_time(found.days_with_failures * 86400)
    yield tile("with failures", failures, f"{percent(found.failures.lost)} of the time is lost")
    yield tile("costs", f"${found.dollars:,.0f}", f"${found.hardware['cost.device_hour']:g} a device and hour")


def _notes(plan: Plan) -> Iterator[str]:
    """What bounds it."""
    found = plan.estimate
    if has_live_teacher(plan.config) and not plan.ranks.without_teacher:
        times = "times and in " if found is not None else ""
        yield f"The teacher is in {times}memory by kind; memory over the step is the student's."
    if found is None:
        yield "No machine was named, so times are unknown. With --hardware the page has them."
        return
    share = found.spent[found.bound] / sum(found.spent.values())
    yield f"Bound by {in_words(found.bound)}: {percent(share)} of a step on the stage that works longest."
    if found.room < 0:
        yield f"It does not fit: {bytes_in_words(-found.room)} more than a device has."


def _pipeline(plan: Plan) -> Html:
    shown, found = plan.pipeline, plan.estimate
    if found is None:
        about = f"{pipeline_report.heading(shown)}; stages wait {percent(shown.bubble)}"
        note = "Time 1 is a micro-batch's forward through a stage of mean work."
        return page_time.pipeline(shown.simulation, about=about, words=lambda time: f"{time:.3g}", note=note)
    waits = f"stages wait {percent(found.simulation.bubble)} of {length_of_time(found.simulation.makespan)}"
    return page_time.pipeline(found.simulation, about=f"{pipeline_report.heading(shown)}; {waits}")


def _courses(plan: Plan) -> Iterator[Html]:
    """Memory over time of the stages that take most; the first is the largest picture."""
    found = plan.estimate
    figures = []
    for stage, each in sorted(plan.walks.items(), key=lambda item: -item[1].peak.bytes)[:MOST_CHARTS]:
        spans, cost, axis = None, None, "operators and collectives of a step"
        if found is not None:
            spans, cost, axis = _spans(found, stage), found.cost, "seconds of a step"
        course = page_memory.course(each, spans, cost)
        limit = found.hardware["device.memory"] if found else None
        name = f"rank {each.rank}" + (f", stage {stage}" if len(plan.ranks.kinds) > 1 else "")
        figures.append(page_memory.over_time(name, each, course, axis=axis, limit=limit))
    yield tag("div", joined(figures), class_="charts")


def _spans(found: Estimate, stage: int) -> list[tuple[float, float]]:
    """[s] From when to when each section of a stage's walk is at work."""
    seconds = found.played[stage].seconds
    if len(found.simulation.events) == 1:
        return list(pairwise(accumulate(seconds, initial=0.0)))
    events, before = found.simulation.events[stage], seconds[0]
    actions = [(before + event.start, before + event.end) for event in events]
    return [(0.0, before), *actions, (actions[-1][1], actions[-1][1] + seconds[-1])]
