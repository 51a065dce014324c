"""What a search found, in words and for JSON; why it found nothing; and the best layout as a configuration."""

from collections.abc import Sequence
from pathlib import Path

from colonnade.config.load import to_toml
from colonnade.config.numbers import amount
from colonnade.config.schema import Config
from colonnade.errors import LayoutError
from colonnade.outputs import json_of, write_output
from colonnade.planner import estimate_report
from colonnade.planner.estimate_report import duration, in_words
from colonnade.planner.hardware import Hardware
from colonnade.planner.ranks import table
from colonnade.planner.search import Candidate, Confirmed, Search, layout_in_words, too_much

SHOWN = 12
"""Layouts of the front that are printed."""


def refuse_empty(found: Search, num_ranks: int) -> None:
    """Raises LayoutError where nothing fits: which constraint has emptied the search, and by how much."""
    if found.fitting:
        return
    if found.least is None:
        reasons = "; ".join(f"{reason} ({count:,} layouts)" for reason, count in often_refused(found))
        raise LayoutError(
            f"Of {found.tried:,} layouts of {num_ranks:,} ranks none can be: {reasons or 'none has whole sizes'}. Use "
            "another number of --ranks, one whose parts divide train.global_batch_size and the heads, or another batch."
        )
    raise LayoutError(
        f"Of {found.tried:,} layouts of {num_ranks:,} ranks none fits into {amount(int(found.limit))}: memory is what "
        f"none has. {too_much(found.least, found.least.memory, found.limit)}"
    )


def as_text(found: Search, best: Confirmed, hardware: Hardware, output: Path | None) -> str:
    """The layouts that no other beats in time and memory, and the best, as the real program has it."""
    rows = [["step", "memory", "layout", "most of it"]]
    front = found.front
    for each in front[:SHOWN]:
        rows.append([duration(each.seconds), amount(each.memory), layout_in_words(each), in_words(each.bound)])
    more = [f"… and {len(front) - SHOWN} more, slower with less memory"] * (len(front) > SHOWN)
    lines = [
        f"{found.tried:,} layouts on {hardware.name}: {len(found.fitting):,} fit into {amount(int(found.limit))}, "
        f"{found.num_refused:,} cannot be, {found.num_too_large:,} take more.",
        *(f"  {count:,}: {reason}" for reason, count in often_refused(found)),
        "",
        "those that no other beats in both time and memory, put together from what units cost:",
        "",
        *table(rows, left=(2, 3)),
        *more,
        "",
        f"the best of {best.looked_at} that were run on paper: {layout_in_words(best.candidate)}",
        "",
        estimate_report.as_text(best.estimate),
    ]
    written = [] if output is None else ["", f"Its configuration is in {output}."]
    return "\n".join(lines + written)


def as_json(found: Search, best: Confirmed) -> str:
    """The same; seconds and bytes."""
    return json_of(
        {
            "tried": found.tried,
            "fitting": len(found.fitting),
            "refused": found.refused,
            "limit_bytes": found.limit,
            "precision": best.candidate.config.train.precision,
            "front": [_as_json(each) for each in found.front],
            "best": {**_as_json(best.candidate), "estimate": estimate_report.as_json(best.estimate)},
        }
    )


def write(config: Config, path: Path) -> None:
    """The configuration file of the best layout; makes its folder."""
    write_output(path, f"# Written by `colonnade plan --search`.\n\n{to_toml(config)}".encode())


def _as_json(each: Candidate) -> dict[str, object]:
    return {**each.chosen, "seconds_per_step": each.seconds, "memory_bytes": each.memory, "bound_by": each.bound}


def often_refused(found: Search) -> Sequence[tuple[str, int]]:
    return sorted(found.refused.items(), key=lambda each: -each[1])
