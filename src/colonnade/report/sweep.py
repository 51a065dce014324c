"""A sweep as a table: of each setting median and spread over the seeds, with the paper's figures beside them.

Reads the sweep's folder: summary.json, which is written after each point, and the points' own configurations.
"""

import csv
import io
import json
import math
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from colonnade.config.describe import as_toml
from colonnade.config.numbers import counted
from colonnade.drawing.document import notes
from colonnade.drawing.html import Html, joined, table, tag
from colonnade.drawing.scale import length_of_time, scale_of, short
from colonnade.errors import ConfigError, hidden
from colonnade.report.published import PUBLISHED, SOURCE, Published
from colonnade.report.record import can_be_shown
from colonnade.train.sweep import SEED, SUMMARY, less_is_better
from colonnade.train.tuning import COUNTED, DIVERGED, FAILED

_OWN = frozenset({"point", "state", "reason", "step", "seconds"})


@dataclass(frozen=True)
class Spread:
    """A score of the points of one setting."""

    numbers: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.numbers)

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds; NaN of one alone."""
        return statistics.stdev(self.numbers) if len(self.numbers) > 1 else math.nan


@dataclass(frozen=True)
class Group:
    """Points that differ in their seeds alone."""

    values: Mapping[str, Any]
    scores: Mapping[str, Spread]
    points: Sequence[str]

    @property
    def words(self) -> str:
        return ", ".join(f"{key} = {as_toml(value)}" for key, value in self.values.items()) or "all"


@dataclass(frozen=True)
class SweepRecord:
    """A sweep as its folder tells it."""

    folder: Path
    points: list[dict[str, Any]]
    """As in summary.json."""
    score: str
    """By which settings are ordered."""
    task: str | None
    """A name among PUBLISHED; None: not one of the paper's, or not known."""
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @cached_property
    def score_names(self) -> list[str]:
        names = dict.fromkeys(name for point in self.points for name in point if is_score(name))
        return sorted(names, key=lambda name: name != self.score)

    @cached_property
    def groups(self) -> list[Group]:
        """The settings, the best first."""
        found: dict[str, list[dict[str, Any]]] = {}
        for point in self.points:
            if point["state"] in COUNTED and can_be_shown(point.get(self.score)):
                found.setdefault(json.dumps(_values(point), sort_keys=True), []).append(point)
        groups = [
            Group(
                _values(points[0]),
                {
                    name: Spread([float(each[name]) for each in points if can_be_shown(each.get(name))])
                    for name in self.score_names
                    if any(can_be_shown(each.get(name)) for each in points)
                },
                [each["point"] for each in points],
            )
            for points in found.values()
        ]
        sign = 1 if less_is_better(self.score) else -1
        return sorted(groups, key=lambda group: sign * group.scores[self.score].median)

    @property
    def published(self) -> tuple[Published, ...]:
        return PUBLISHED.get(self.task or "", ())


def is_sweep(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def is_score(name: str) -> bool:
    """Whether a column of the summary is a score."""
    return name not in _OWN and not _is_key(name)


def _is_key(name: str) -> bool:
    """Keys have a dot. Scores have one at most behind a `/`, in the name of a data set: `loss/web.v1`."""
    return "." in name.partition("/")[0]


def _values(point: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in point.items() if _is_key(key) and key != SEED}


def read_sweep_folder(folder: Path, task: str | None = None) -> SweepRecord:
    """ConfigError where its summary cannot be read, or the task is not one of the paper's."""
    if task is not None and task not in PUBLISHED:
        raise ConfigError(f"--task {task}: the paper has no figures of it. It has those of {', '.join(PUBLISHED)}.")
    path = folder / SUMMARY
    try:
        content = hidden(json.loads(path.read_text(encoding="utf-8")))
        points = [dict(each) for each in content["points"] if isinstance(each["point"], str) and each["state"]]
        settings = content.get("settings") or [{}]
        score = settings[0].get("score")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no summary of a sweep ({type(error).__name__}). Remove it, and run `colonnade finetune` "
            "again: the runs beside it are taken as they are."
        ) from error
    found = SweepRecord(folder, points, "", None)
    names = found.score_names
    score = score if isinstance(score, str) and score in names else (names or ["loss"])[0]
    notes = []
    if not points:
        notes.append("No point of the sweep has ended yet.")
    if task is None and points:
        task = task_of(folder, points[0]["point"])
    return SweepRecord(folder, points, score, task, notes)


def task_of(folder: Path, point: str) -> str | None:
    """The paper's task of a point, as the token file of its examples says; None: another, or not known."""
    try:
        data = tomllib.loads((folder / f"{point}.toml").read_text(encoding="utf-8"))["data"]
        prefix = data.get("validation") or data["train"]
        name = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))["examples"]["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return name if name in PUBLISHED else None


def as_csv(sweep: SweepRecord) -> str:
    """A line a setting, then a line for each of the paper's figures."""
    keys = list(dict.fromkeys(key for group in sweep.groups for key in group.values))
    numbers = [f"{name} {what}" for name in sweep.score_names for what in ("median", "lowest", "highest", "deviation")]
    text = io.StringIO()
    rows = csv.DictWriter(text, ["source", *keys, "runs", *numbers], lineterminator="\n", restval="")
    rows.writeheader()
    for group in sweep.groups:
        line: dict[str, Any] = {"source": "this sweep", **{key: as_toml(value) for key, value in group.values.items()}}
        line["runs"] = len(group.points)
        for name, spread in group.scores.items():
            line |= {f"{name} median": spread.median, f"{name} lowest": min(spread.numbers)}
            line |= {f"{name} highest": max(spread.numbers)}
            line |= {} if math.isnan(spread.deviation) else {f"{name} deviation": spread.deviation}
        rows.writerow(line)
    for each in sweep.published:
        figures = {f"{name} median": figure for name, figure in each.figures.items() if f"{name} median" in numbers}
        if figures:
            rows.writerow({"source": f"{each.model}{f' ({each.note})' if each.note else ''}, Megatron-LM", **figures})
    return text.getvalue()


def drawn(sweep: SweepRecord) -> Html:
    """The body of the page."""
    states: dict[str, int] = {}
    for point in sweep.points:
        states[str(point["state"])] = states.get(str(point["state"]), 0) + 1
    about = ", ".join(f"{count} {state}" for state, count in states.items())
    head = tag(
        "header", tag("h1", sweep.name), tag("p", f"{counted(len(sweep.points), 'point')}: {about}", class_="quiet")
    )
    parts = [head, *notes(sweep.notes)]
    if sweep.groups:
        parts += [tag("h2", "Settings", tag("small", f" by the median of {_words(sweep.score)}")), _strips(sweep)]
        parts.append(_settings(sweep))
    if sweep.published:
        parts += [tag("h2", "Published", tag("small", f" {SOURCE}")), _published(sweep)]
    parts += [tag("h2", "Points"), _points(sweep)]
    return joined(parts)


def _strips(sweep: SweepRecord) -> Html:
    """A row a setting: a dot a run, a bar at the median; lines where the paper's models are."""
    ours = [number for group in sweep.groups for number in group.scores[sweep.score].numbers]
    theirs = [each for each in sweep.published if sweep.score in each.figures]
    scale = scale_of([*ours, *(each.figures[sweep.score] for each in theirs)], may_be_log=False, from_zero=False)
    rows = [
        tag(
            "div",
            tag("span", group.words, title=group.words),
            tag(
                "div",
                *(_at("i", scale.at(number), "dot", short(number)) for number in group.scores[sweep.score].numbers),
                _at("i", scale.at(group.scores[sweep.score].median), "median", "median"),
                *(_at("i", scale.at(each.figures[sweep.score]), "theirs", _model(each)) for each in theirs),
                class_="strip",
            ),
            class_="row",
        )
        for group in sweep.groups
    ]
    ticks = (tag("span", short(tick), style=f"left:{100 * scale.at(tick):.2f}%") for tick in scale.ticks(5))
    keys = [tag("span", tag("i", class_="dot"), "a run"), tag("span", tag("i", class_="median"), "median")]
    keys += [tag("span", tag("i", class_="theirs"), "the paper's models")] if theirs else []
    head = tag("figcaption", tag("b", _words(sweep.score)), tag("span", *keys, class_="legend"))
    return tag("figure", head, *rows, tag("div", tag("span"), tag("div", *ticks, class_="across"), class_="row"),
               class_="gantt strips")  # fmt: skip


def _at(name: str, share: float, kind: str, words: str) -> Html:
    return tag(name, title=words, class_=kind, style=f"left:{100 * share:.2f}%")


def _settings(sweep: SweepRecord) -> Html:
    keys = list(dict.fromkeys(key for group in sweep.groups for key in group.values))
    head = [
        *keys,
        "runs",
        *(_words(name) for name in sweep.score_names),
        f"{_words(sweep.score)}: lowest to highest",
        "deviation",
    ]
    rows = []
    for group in sweep.groups:
        spread = group.scores[sweep.score]
        medians = (f"{group.scores[name].median:.4f}" if name in group.scores else "" for name in sweep.score_names)
        between = f"{min(spread.numbers):.4f} to {max(spread.numbers):.4f}" if len(spread.numbers) > 1 else ""
        deviation = f"{spread.deviation:.4f}" if len(spread.numbers) > 1 else ""
        values = (as_toml(group.values[key]) if key in group.values else "" for key in keys)
        rows.append([*values, str(len(group.points)), *medians, between, deviation])
    return table(head, rows, numbers=range(len(keys), len(head)))


def _published(sweep: SweepRecord) -> Html:
    names = list(dict.fromkeys(name for each in sweep.published for name in each.figures))
    rows = [
        [each.model, each.note, *(f"{each.figures[name]:.4f}" if name in each.figures else "" for name in names)]
        for each in sweep.published
    ]
    best = sweep.groups[:1]
    rows += [
        [f"this sweep: {group.words}", f"median of {counted(len(group.points), 'run')}",
         *(f"{group.scores[name].median:.4f}" if name in group.scores else "" for name in names)]
        for group in best
    ]  # fmt: skip
    return table(["model", "", *map(_words, names)], rows, numbers=range(2, 2 + len(names)))


def _points(sweep: SweepRecord) -> Html:
    return table(
        ["point", "state", "step", *map(_words, sweep.score_names), "time", "reason"],
        _rows(sweep),
        numbers=range(2, 4 + len(sweep.score_names)),
    )


def _rows(sweep: SweepRecord) -> Iterator[list[object]]:
    for point in sweep.points:
        state = tag("span", str(point["state"]), class_="bad" if point["state"] in (DIVERGED, FAILED) else "")
        scores = (f"{point[name]:.4f}" if can_be_shown(point.get(name)) else "" for name in sweep.score_names)
        step = f"{point['step']:,}" if isinstance(point.get("step"), int) else ""
        seconds = length_of_time(float(point["seconds"])) if can_be_shown(point.get("seconds")) else ""
        yield [point["point"], state, step, *scores, seconds, str(point.get("reason") or "")]


def _model(each: Published) -> str:
    return f"{each.model}{f', {each.note}' if each.note else ''}"


def _words(name: str) -> str:
    return name.replace("_", " ")
