"""What `verify` tells: a table for people, one object for programs. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from colonnade.verify.layouts import LeftOut

if TYPE_CHECKING:
    from colonnade.verify.compare import Verdict

RATIO = "difference / bound"
"""A column: the largest ratio of a number's difference to how far that number may be off."""


@dataclass(frozen=True)
class Report:
    """All that was found."""

    steps: int
    precision: str
    tolerance: str
    """What counts as equal, in words."""
    shrunk: Mapping[str, Sequence[int]]
    """Keys of [model], before and after."""
    layouts: "Sequence[Verdict]"
    left_out: Sequence[LeftOut]
    init_from_not_read: str | None
    """train.init_from, where it is set: the weights that are compared are drawn."""

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.layouts)

    @property
    def is_exact(self) -> bool:
        """Whether all numbers have one bound, so that the largest difference alone shows what is equal."""
        return self.precision == "fp64"


def as_json(report: Report) -> dict[str, Any]:
    """{"layouts": [{"layout": "tp=2", "max_relative_difference": 1e-15, "first_difference": null, "ok": true, …}]}"""
    return asdict(report)


def as_text(report: Report) -> str:
    """The table, with what is equal above it and what was left out below."""
    names = ["layout", *(each.layout for each in report.layouts), *(each.layout for each in report.left_out)]
    width = max(map(len, names))
    return "\n".join(
        [
            *shrunk_lines(report.shrunk),
            *drawn_lines(report.init_from_not_read),
            f"{_count(report.steps, 'step')} in {report.precision}; equal is {report.tolerance}",
            "",
            f"  {'layout':{width}}  ranks  largest difference{'' if report.is_exact else f'  {RATIO}'}",
            *(_line(verdict, width, is_exact=report.is_exact) for verdict in report.layouts),
            *(f"  {each.layout:{width}}  left out: {each.reason}" for each in report.left_out),
            "",
            _summary(report),
        ]
    )


def shrunk_lines(shrunk: Mapping[str, Sequence[int]]) -> list[str]:
    """What was made smaller, in a line, where anything was."""
    changes = ", ".join(f"{key} {before:,} → {after:,}" for key, (before, after) in shrunk.items())
    return [f"shrunk: {changes}"] if changes else []


def drawn_lines(init_from: str | None) -> list[str]:
    """That the run's first weights are others than those compared, in a line, where they are."""
    return [] if init_from is None else [f"weights are drawn: train.init_from = {init_from!r} is not read"]


def _line(verdict: "Verdict", width: int, *, is_exact: bool) -> str:
    largest = verdict.max_relative_difference
    worst = f"{'none' if largest is None else f'{largest:.1e}':>7}"
    if not is_exact:
        worst = f"{worst:{len('largest difference')}}  {_ratio(verdict.max_ratio_to_bound):{len(RATIO)}}"
    outcome = "equal" if verdict.ok else "DIFFERS, first in the " + str(verdict.first_difference)
    if verdict.furthest is None and not verdict.ok:
        outcome = f"DIFFERS: {verdict.first_difference}"
    return f"  {verdict.layout:{width}}  {verdict.num_ranks:5}  {worst}  {outcome}"


def _ratio(ratio: float | None) -> str:
    """Rounded up: what differs is above 1.00."""
    if ratio is None:
        return "none"
    return f"{ratio:.1e}" if ratio >= 1000 else f"{math.ceil(ratio * 100) / 100:.2f}"


def _summary(report: Report) -> str:
    equal = sum(verdict.ok for verdict in report.layouts)
    return f"{equal} of {_count(len(report.layouts), 'layout')} equal to the serial run."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
