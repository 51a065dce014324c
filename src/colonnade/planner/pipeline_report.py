"""A pipeline's plan in words: a table of its stages, its bubble beside theory; the same for JSON; and its picture."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from colonnade.config.numbers import counted
from colonnade.outputs import write_output
from colonnade.pipeline import draw
from colonnade.planner.pipeline import PipelinePlan

COLUMNS = ("stage", "parameters", "of mean", "work of mean", "busy", "activations", "units")
TIME = "F: forward, B: backward, W: weight gradients; time 1: a micro-batch's forward through a stage of mean work"
WORTH_A_WORD = 0.01
"""[share of the time] A bubble that other cuts would make smaller by so much is pointed out."""


def as_text(plan: PipelinePlan, *, picture: bool = False, width: int = 120) -> str:
    """What each stage holds, does and keeps; with `picture`, its schedule in at most about `width` columns."""
    drawn = ["", TIME, "", draw.text(plan.simulation, width=width)] if picture else []
    return "\n".join([heading(plan), "", *_table(_rows(plan)), "", *_bubble(plan), *drawn])


def as_json(plan: PipelinePlan) -> dict[str, Any]:
    """The same, ready for JSON. Shares are 0 … 1; times are in forwards of an average stage."""
    return {
        "schedule": plan.schedule,
        "num_stages": len(plan.stages),
        "virtual_stages": plan.virtual_stages,
        "num_microbatches": plan.num_microbatches,
        "bubble": plan.bubble,
        "bubble_of_equal_stages": plan.theory,
        "cuts_by_work": list(plan.cuts_by_work),
        "bubble_by_work": plan.bubble_by_work,
        "makespan": plan.simulation.makespan,
        "stages": [
            {
                "stage": number,
                "chunks": [list(units) for units in stage.chunks],
                "parameters": stage.parameters,
                "parameters_of_mean": of_mean,
                "work_of_mean": work_of_mean,
                "busy": stage.busy,
                "peak_activations": stage.peak,
            }
            for number, (stage, of_mean, work_of_mean) in enumerate(
                zip(plan.stages, _parameters_of_mean(plan), _work_of_mean(plan), strict=True)
            )
        ],
    }


def write_picture(plan: PipelinePlan, path: Path) -> None:
    """Draw the schedule into an SVG file; makes its folder."""
    write_output(path, draw.svg(plan.simulation, title=heading(plan)).encode())


def heading(plan: PipelinePlan) -> str:
    """The schedule and its numbers."""
    virtual = f" × {plan.virtual_stages} virtual stages" if plan.virtual_stages > 1 else ""
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    return (
        f"{plan.schedule}: {stages}{virtual}, {counted(plan.num_microbatches, 'micro-batch', 'micro-batches')} a step"
    )


def unit_ranges(units: Sequence[str]) -> str:
    """['embedding', 'blocks.0', 'blocks.1'] -> 'embedding, blocks 0–1'."""
    words = []
    for kind, group in groupby(units, lambda unit: unit.partition(".")[0]):
        numbers = [unit.partition(".")[2] for unit in group]
        words.append(f"{kind} {'–'.join(dict.fromkeys((numbers[0], numbers[-1])))}".strip())
    return ", ".join(words)


def _rows(plan: PipelinePlan) -> list[tuple[str, ...]]:
    return [
        (
            str(number),
            f"{stage.parameters:,}",
            f"{of_mean:.2f}",
            f"{work_of_mean:.2f}",
            f"{stage.busy:.1%}",
            str(stage.peak),
            " | ".join(unit_ranges(units) for units in stage.chunks),
        )
        for number, (stage, of_mean, work_of_mean) in enumerate(
            zip(plan.stages, _parameters_of_mean(plan), _work_of_mean(plan), strict=True)
        )
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Numbers to the right of their columns, the last column to its left."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)][:-1]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in (COLUMNS, *rows)
    ]


def _bubble(plan: PipelinePlan) -> list[str]:
    """How much waiting there is, and what would be less."""
    lines = [
        f"bubble: stages wait {plan.bubble:.1%} of the time; {plan.theory:.1%} if all had the same work",
        f"activations: most micro-batches{' × chunks' * (plan.virtual_stages > 1)} that live at once on the stage",
    ]
    if plan.bubble - plan.bubble_by_work >= WORTH_A_WORD:
        cuts = ",".join(map(str, plan.cuts_by_work))
        lines.append(f"less waiting: parallel.cuts=[{cuts}] evens out the work, {plan.bubble_by_work:.1%}")
    return lines


def _parameters_of_mean(plan: PipelinePlan) -> list[float]:
    return _of_mean([stage.parameters for stage in plan.stages])


def _work_of_mean(plan: PipelinePlan) -> list[float]:
    return _of_mean([stage.work for stage in plan.stages])


def _of_mean(values: Sequence[float]) -> list[float]:
    return [value * len(values) / sum(values) for value in values]
