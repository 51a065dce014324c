"""What `verify` tells: a table for people, one object for programs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from colonnade.verify.layouts import LeftOut

if TYPE_CHECKING:
    from colonnade.verify.compare import Verdict


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

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.layouts)


def as_json(report: Report) -> dict[str, Any]:
    """{"layouts": [{"layout": "tp=2", "max_relative_difference": 1e-15, "first_difference": null, "ok": true, …}]}"""
    return asdict(report)


def as_text(report: Report) -> str:
    """The table, with what is equal above it and what was left out below."""
    names = [*(each.layout for each in report.layouts), *(each.layout for each in report.left_out)]
    width = max(map(len, names), default=0)
    return "\n".join(
        [
            *shrunk_lines(report.shrunk),
            f"{_count(report.steps, 'step')} in {report.precision}; equal is {report.tolerance}",
            "",
            f"  {'layout':{width}}  ranks  largest difference",
            *(_line(verdict, width) for verdict in report.layouts),
            *(f"  {each.layout:{width}}  left out: {each.reason}" for each in report.left_out),
            "",
            _summary(report),
        ]
    )


def shrunk_lines(shrunk: Mapping[str, Sequence[int]]) -> list[str]:
    """What was made smaller, in a line, where anything was."""
    changes = ", ".join(f"{key} {before:,} → {after:,}" for key, (before, after) in shrunk.items())
    return [f"shrunk: {changes}"] if changes else []


def _line(verdict: "Verdict", width: int) -> str:
    largest = verdict.max_relative_difference
    worst = "none" if largest is None else f"{largest:.1e}"
    outcome = "equal" if verdict.ok else "DIFFERS, first in the " + str(verdict.first_difference)
    if verdict.furthest is None and not verdict.ok:
        outcome = f"DIFFERS: {verdict.first_difference}"
    return f"  {verdict.layout:{width}}  {verdict.num_ranks:5}  {worst:>7}  {outcome}"


def _summary(report: Report) -> str:
    equal = sum(verdict.ok for verdict in report.layouts)
    return f"{equal} of {_count(len(report.layouts), 'layout')} equal to the serial run."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
