"""The page of `benchmarks.finetuned`: a section a table, every seed's scores, and what is beyond their spread."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.hardware import machine_name

RESULTS = Path(__file__).parent / "results"


class Run(NamedTuple):
    """One seed: scores of the rows kept apart, by name, before the first step and after the last."""

    seed: int
    before: dict[str, float]
    after: dict[str, float]
    seconds: float


class Table(NamedTuple):
    """What a command found."""

    title: str
    what: str
    """Rows, lengths and rates, in sentences."""
    how: str
    """Schedule and dropout."""
    shown: tuple[str, ...]
    """The scores that the table has, by name."""
    unit: dict[str, float]
    """What a score is multiplied by to be shown: 100 of shares."""
    runs: dict[str, list[Run]]
    """By what they began from."""


def record(name: str, found: Mapping[str, Any]) -> None:
    """Put a table beside those of the day, and write the page anew."""
    today = datetime.now(UTC).date().isoformat()
    file = RESULTS / f"finetuned-{today}-{machine_name()}.json"
    there = json.loads(file.read_text()) if file.exists() else {}
    runs = {begun: [run._asdict() for run in group] for begun, group in found["runs"].items()}
    there[name] = {**found, "runs": runs}
    file.write_text(json.dumps(there, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(today, there))
    print(page(today, there))


def page(today: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """In Markdown."""
    hardware = next(iter(tables.values()))["hardware"]
    lines = [
        f"# Fine-tuning over seeds, {today}, {hardware['cpu']}, {hardware['cores']} cores",
        "",
        "One rank of one thread on a machine that did other work besides: seconds are of whole runs, evaluations "
        "included, and no measure of speed. Scores are of rows kept apart, before the first step and after the last; "
        "they choose nothing, and settings were not tuned. A gain is **beyond the spread** where the lowest seed of "
        "the one is above the highest of the other (of losses the other way round).",
        "",
        "Published weights may have read what is kept apart here: all-MiniLM-L6-v2 learned from pairs of sentences of "
        "MNLI, Quora's questions and SQuAD's training set. Its gains are those of a model that knows such texts.",
    ]
    return "\n".join([*lines, *(line for table in tables.values() for line in section(table)), ""])


def section(table: Mapping[str, Any]) -> Iterable[str]:
    """A heading, what was done, and a line for each seed; then medians, and what is gained."""
    settings, hardware = table["settings"], table["hardware"]
    yield from ("", f"## {table['title']}", "")
    yield (
        f"{table['what']} {settings['steps']} steps of {settings['batch']} samples of {settings['length']} tokens, "
        f"AdamW at {settings['rate']:g} with {table['how']}, {settings['precision']}. Commit "
        f"{hardware['commit']}; torch {hardware['torch']}; `{table['command']}`."
    )
    shown = table["shown"]
    heads = [f"{name} {when}" for name in shown for when in ("before", "after")]
    yield from ("", f"| begins from | seed | {' | '.join(heads)} | seconds |", "|---" * (len(heads) + 3) + "|")
    for begun, runs in table["runs"].items():
        for run in runs:
            yield f"| {begun} | {run['seed']} | {' | '.join(cells(table, run))} | {run['seconds']:.0f} |"
    yield ""
    for name in shown:
        yield from gains(table, name)


def cells(table: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    return [written(table, name, run[when][name]) for name in table["shown"] for when in ("before", "after")]


def written(table: Mapping[str, Any], name: str, score: float) -> str:
    """A share or a percentage as percent, a loss as it is."""
    if name == "loss":
        return f"{score:.4f}"
    return f"{score * table['unit'].get(name, 1.0):.1f} %"


def gains(table: Mapping[str, Any], name: str) -> Iterable[str]:
    """A line for each beginning: median, lowest and highest after the last step, and each beside what it is held to:
    the second beginning where there are two, else the same runs before their first step.
    """
    groups = {begun: [run["after"][name] for run in runs] for begun, runs in table["runs"].items()}
    if len(groups) == 1:
        ((_, runs),) = table["runs"].items()
        groups |= {"before the first step": [run["before"][name] for run in runs]}
    told = [
        f"{begun} {written(table, name, median(scores))} ({written(table, name, min(scores))} to "
        f"{written(table, name, max(scores))})"
        for begun, scores in groups.items()
    ]
    yield f"- {name}, median and spread: {'; '.join(told)}. {verdict(name, *groups.values())}"


def verdict(name: str, ours: Sequence[float], held_to: Sequence[float]) -> str:
    """Whether every seed of the one is better than every seed of the other."""
    sign = -1 if name == "loss" else 1
    best = max(sign * score for score in held_to)
    if min(sign * score for score in ours) > best:
        return "The gain is beyond the spread."
    return "**The gain is within the spread.**"
