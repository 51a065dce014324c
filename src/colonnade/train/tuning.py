"""The runs of a sweep, one after the other or side by side, and what came of them.

    run.folder/NAME.toml                the configuration of a point
    run.folder/NAME/                    its run
    run.folder/NAME.weights.json        the weights that it began with (`sweep_weights`)
    run.folder/NAME.log                 what it said, where several run side by side
    run.folder/summary.json, .csv       every point; of each setting median, lowest and highest over the seeds; the best

A point that has ended is not run again, unless its run is gone; one that was interrupted goes on, and one that failed
is tried again. All have the data.revision of the first that began. Where points have ended with another configuration
than they would have now, or with other content of the files that it names, the sweep does not go on.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from colonnade.atomic import write_whole
from colonnade.checkpoint.names import checkpoints_in
from colonnade.config.defaults import in_words, kept_revision, put
from colonnade.config.describe import as_toml
from colonnade.config.load import TomlTable, read
from colonnade.config.numbers import counted
from colonnade.errors import ColonnadeError, ConfigError, hidden, mistake
from colonnade.launch import launch
from colonnade.lock import locked
from colonnade.outputs import json_of
from colonnade.train import run_folder
from colonnade.train.best import LOSS, best_of, evaluations
from colonnade.train.data_record import other_files
from colonnade.train.divergence import ROLLED_BACK, has_returned
from colonnade.train.lines import objects_in
from colonnade.train.score_names import no_such_score
from colonnade.train.side_by_side import Run, Share, is_interrupted, last_line, process_of, run_side_by_side
from colonnade.train.sweep import SEED, SUMMARY, SUMMARY_TABLE, Point, Sweep, changed, less_is_better
from colonnade.train.sweep_weights import KEYS, Weights, as_begun, named_weights, where_gone, with_checkpoint

FINISHED, STOPPED, DIVERGED, FAILED = "finished", "stopped early", "diverged", "failed"
COUNTED = (FINISHED, STOPPED)
"""States of a point whose scores count: the others were not trained to their end."""
ENDED = (*COUNTED, DIVERGED)
"""States of a point that is not run again."""
SCORES = ("accuracy", "spearman", "f1", "matthews")
"""In the order of preference, where [sweep] names none. Of all of them more is better."""


@dataclass(frozen=True)
class Outcome:
    """What came of a point."""

    point: Point
    state: str
    reason: str = ""
    """Why it failed."""
    step: int | None = None
    """Of its best checkpoint, or of the best evaluation where none has one."""
    scores: Mapping[str, float] | None = None
    """Of the validation set at that step, by name."""
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """As the summary has it."""
        return {
            "point": self.point.name,
            **self.point.told,
            "state": self.state,
            "reason": self.reason,
            "step": self.step,
            **(self.scores or {}),
            "seconds": round(self.seconds, 1),
        }


def run_points(sweep: Sweep, run: Run, check: Callable[[Path], object] = lambda path: None) -> int:
    """Run every point that has not ended, and write the summary before them and after each. Returns the exit status: 0;
    1 where a point failed or diverged; that of the point where one was interrupted.

    `run` is called in a process of its own where points run side by side. `check`: of a configuration file, raises a
    ColonnadeError for one that cannot run; all are checked before the first is run.
    """
    if launch.is_rank():
        raise ConfigError(
            "`colonnade finetune` starts the ranks of each point itself, and was started by a launcher of ranks. Start "
            "it once, alone; under torchrun `colonnade train` runs a single configuration."
        )
    sweep = replace(sweep, points=[replace(each, content=with_checkpoint(each.content)) for each in sweep.points])
    sweep.folder.mkdir(parents=True, exist_ok=True)
    weights = Weights()
    with locked(sweep.folder, "colonnade finetune", instead="set another run.folder"):
        sweep = _of_one_revision(sweep)
        done = _ended(sweep)
        _check_alike(sweep, done, weights)
        left = [(number, point) for number, point in enumerate(sweep.points, 1) if point.name not in done]
        _check_all([point for _, point in left], sweep.folder, check)
        if not (sweep.folder / SUMMARY).exists():
            _write(sweep, [])  # for reports of a sweep of which no point has ended
        status = (_one_by_one if sweep.at_once == 1 else _side_by_side)(sweep, left, done, run, weights)
        if status:
            following = next(number for number, point in enumerate(sweep.points, 1) if point.name not in done)
            print(f"Interrupted. The same command goes on with point {following}.", flush=True)
            return status
        outcomes = [done[point.name] for point in sweep.points]
        _write(sweep, outcomes)
        print(summary_of(sweep, outcomes), flush=True)
        _check_alike(sweep, done, weights)
        return int(any(outcome.state in (DIVERGED, FAILED) for outcome in outcomes))


def _of_one_revision(sweep: Sweep) -> Sweep:
    """A sweep of which the first point that has begun says the data.revision of all, where that is not the newest."""
    first = next(filter(run_folder.was_trained, (sweep.folder / point.name for point in sweep.points)), None)
    if first is None:
        return sweep
    if said := in_words(kept_revision(sweep.points[0].content, first), str(first)):
        print(said, flush=True)
    points = [replace(point, content=_with_revision(point.content, first)) for point in sweep.points]
    return replace(sweep, points=points)


def _with_revision(content: TomlTable, run: Path) -> TomlTable:
    """A configuration with the data.revision of a run that has begun, where that is not the newest."""
    own = {name: dict(value) if isinstance(value, dict) else value for name, value in content.items()}
    put(own, kept_revision(content, run))
    return own


def _one_by_one(
    sweep: Sweep, left: Sequence[tuple[int, Point]], done: dict[str, Outcome], run: Run, weights: Weights
) -> int:
    """Run points here, and add what came of them. Returns the status of one that was interrupted, else 0."""
    for number, point in left:
        weights.begin(point.content, sweep.folder / point.name)
        print(f"Point {number} of {len(sweep.points)}: {_words(point)}", flush=True)
        began, before, reason = time.perf_counter(), len(_events(sweep.folder / point.name)), ""
        try:
            status = run(sweep.folder / f"{point.name}.toml", Share(0, 1))
            reason = f"exit status {status}" if status else ""
        except Exception as error:
            message = mistake(error)
            if message is None:
                raise
            status, reason = 2, message
            print(f"colonnade: {message}", flush=True)
        goes_on = is_interrupted(status)
        if goes_on and all(each["event"] != FINISHED for each in _events(sweep.folder / point.name)[before:]):
            return status
        _add(sweep, point, done, reason="" if goes_on else reason, seconds=time.perf_counter() - began)
        if goes_on and len(done) < len(sweep.points):  # it could finish, and no other is begun
            return status
    return 0


def _side_by_side(
    sweep: Sweep, left: Sequence[tuple[int, Point]], done: dict[str, Outcome], run: Run, weights: Weights
) -> int:
    """The same with several points at once, each with a log of its own."""

    def log(point: Point) -> Path:
        return sweep.folder / f"{point.name}.log"

    def start(item: tuple[int, Point], share: Share) -> BaseProcess:
        number, point = item
        weights.begin(point.content, sweep.folder / point.name)
        print(f"Point {number} of {len(sweep.points)}: {_words(point)} -> {log(point)}", flush=True)
        return process_of(run, sweep.folder / f"{point.name}.toml", share, log(point))

    def ended(item: tuple[int, Point], status: int, seconds: float) -> None:
        number, point = item
        if is_interrupted(status):
            return
        reason = f"exit status {status}: {last_line(log(point))}" if status else ""
        _add(sweep, point, done, reason=reason, seconds=seconds)
        outcome = done[point.name]
        score = score_of(sweep, [outcome])
        found = f", {score} {outcome.scores[score]:.4f}" if outcome.scores and score in outcome.scores else ""
        print(f"Point {number} of {len(sweep.points)}: {outcome.state}{found}", flush=True)

    return run_side_by_side(left, sweep.at_once, start=start, ended=ended)


def _add(sweep: Sweep, point: Point, done: dict[str, Outcome], *, reason: str, seconds: float) -> None:
    done[point.name] = outcome_of(sweep.folder / point.name, point, reason=reason, seconds=seconds)
    _write(sweep, [done[each.name] for each in sweep.points if each.name in done])


def _check_all(points: Sequence[Point], folder: Path, check: Callable[[Path], object]) -> None:
    """Write the configurations, and check them. ConfigError with what is wrong, once, and with the points that it is
    wrong with.
    """
    wrong: dict[str, list[str]] = {}
    for point in points:
        config = folder / f"{point.name}.toml"
        has_credentials = hidden(point.content) != point.content
        write_whole(config, toml_of(point.content).encode(), private=has_credentials)
        try:
            check(config)
        except ColonnadeError as error:
            wrong.setdefault(str(error).replace(f"{config}: ", ""), []).append(point.name)
    if wrong:
        lines = [f"{message}\n  in {_some(names, len(points))}" for message, names in wrong.items()]
        raise ConfigError("\n".join([f"{folder}: the sweep cannot run, and none of its points was started", *lines]))


def _check_alike(sweep: Sweep, done: Collection[str], weights: Weights) -> None:
    """ConfigError where points were made of something else than they would be now: their scores would stand beside
    those of this.
    """
    found: dict[str, list[str]] = {}
    begun = [point for point in sweep.points if (sweep.folder / f"{point.name}.toml").exists()]
    for point in begun:
        run = sweep.folder / point.name
        if point.name not in done and not checkpoints_in(run_folder.checkpoints(run)):
            continue  # begins anew
        of = _differences if point.name in done else _other_weights
        for line in [*of(sweep.folder, point), *weights.other(point.content, run)]:
            found.setdefault(line, []).append(point.name)
    if found:
        lines = [f"  {line}\n    in {_some(names, len(begun))}" for line, names in found.items()]
        raise ConfigError(
            f"run.folder = {str(sweep.folder)!r} has points that ended with another configuration, or began with other "
            "files, than they would now:\n"
            + "\n".join(lines)
            + "\nTheir scores would stand beside those of other runs. Set another run.folder, change them back, or "
            "remove the folders of these points: they are run anew."
        )


def _differences(folder: Path, point: Point) -> list[str]:
    """In what a point that has ended differs from what it would be now."""
    run = folder / point.name
    began = _with_revision(as_begun(read(folder / f"{point.name}.toml"), run), run)
    lines = changed(began, where_gone(point.content, began))  # what is gone is told where a run begins from it
    saved = list(checkpoints_in(run_folder.checkpoints(run)).values())
    with suppress(ColonnadeError, OSError):  # a damaged checkpoint does not tell
        lines += other_files(saved[-1]) if saved else []
    return lines


def _other_weights(folder: Path, point: Point) -> list[str]:
    """Of a point that goes on, whether it began with another checkpoint of a run than it would begin with now: its run
    looks after the rest.
    """
    began = as_begun(read(folder / f"{point.name}.toml"), folder / point.name)
    pairs = {key: (named_weights(began, key), named_weights(point.content, key)) for key in KEYS}
    return [
        f"{key}: {as_toml(was)} -> {as_toml(now)}"
        for key, (was, now) in pairs.items()
        if was is not None and now is not None and was != now and Path(was).parent == Path(now).parent
    ]


def _some(names: Sequence[str], total: int) -> str:
    """Names of points, the first few of many."""
    if len(names) == total:
        return "all points" if total > 1 else f"the point {names[0]}"
    more = f" and {counted(len(names) - 3, 'other')}" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def outcome_of(run: Path, point: Point, *, reason: str, seconds: float) -> Outcome:
    """What came of a run, as its folder says it. `reason`: why it failed, if it did."""
    told = _events(run)
    begins = (at for at, event in enumerate(told) if event["event"] in ("setup", ROLLED_BACK) or has_returned(event))
    last = [event["event"] for event in told[max(begins, default=0) :]]  # since its last start or return
    state = FINISHED
    if reason:
        state = DIVERGED if DIVERGED in last else FAILED
    elif STOPPED in last:
        state = STOPPED
    found = evaluations(run)
    saved = best_of(run, list(checkpoints_in(run_folder.checkpoints(run))))
    if saved is not None:
        found.setdefault(saved.step, {LOSS: saved.validation_loss})  # told by an event alone
    finite = {step: each[LOSS] for step, each in found.items() if math.isfinite(each[LOSS])}
    step = saved.step if saved is not None else min(finite, key=lambda each: (finite[each], each), default=None)
    scores = None if step is None else {name.removeprefix("validation_"): n for name, n in found[step].items()}
    return Outcome(point, state, reason, step, scores, seconds)


def _events(run: Path) -> list[dict[str, Any]]:
    return [line for line in objects_in(run / "events.jsonl") if "event" in line]


def _ended(sweep: Sweep) -> dict[str, Outcome]:
    """Points that the summary of an earlier start knows as ended, and whose runs are there."""
    path = sweep.folder / SUMMARY
    if not path.exists():
        return {}
    try:
        records = {each["point"]: each for each in json.loads(path.read_text(encoding="utf-8"))["points"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no summary of a sweep ({error}). Remove it: the runs beside it are taken as they are."
        ) from error
    return {
        point.name: outcome_of(
            sweep.folder / point.name,
            point,
            reason=records[point.name]["reason"],
            seconds=records[point.name]["seconds"],
        )
        for point in sweep.points
        if records.get(point.name, {}).get("state") in ENDED and _events(sweep.folder / point.name)
    }


@dataclass(frozen=True)
class Setting:
    """Points that differ in their seeds alone."""

    values: Mapping[str, Any]
    points: int
    """That have ended well and have a score."""
    median: float
    lowest: float
    highest: float

    def record(self, score: str) -> dict[str, Any]:
        """As the summary has it."""
        numbers = {"median": self.median, "lowest": self.lowest, "highest": self.highest}
        return {**self.values, "points": self.points, "score": score, **numbers}


def settings_of(outcomes: Iterable[Outcome], score: str) -> list[Setting]:
    """The settings with a score, the best first."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        number = (outcome.scores or {}).get(score, math.nan)
        if not math.isnan(number) and outcome.state in COUNTED:
            groups.setdefault(outcome.point.setting, []).append(outcome)
    found = []
    for group in groups.values():
        numbers = [outcome.scores[score] for outcome in group if outcome.scores is not None]
        values = {key: value for key, value in group[0].point.told.items() if key != SEED}
        found.append(Setting(values, len(numbers), statistics.median(numbers), min(numbers), max(numbers)))
    return sorted(found, key=lambda each: each.median if less_is_better(score) else -each.median)


def score_of(sweep: Sweep, outcomes: Iterable[Outcome]) -> str:
    """The name of the score that decides. ConfigError for one that no evaluation has found."""
    there = dict.fromkeys(name for outcome in outcomes for name in outcome.scores or {})
    if sweep.score is not None and there and sweep.score not in there:
        raise ConfigError(no_such_score(sweep.score, there))
    return sweep.score or next((name for name in SCORES if name in there), "loss")


def _write(sweep: Sweep, outcomes: Sequence[Outcome]) -> None:
    score = score_of(sweep, outcomes)
    records = [outcome.record() for outcome in outcomes]
    settings = [setting.record(score) for setting in settings_of(outcomes, score)]
    content = {"points": records, "settings": settings, "best": settings[0] if settings else None}
    write_whole(sweep.folder / SUMMARY, (json_of(content, indent=2) + "\n").encode())
    columns = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(records)
    write_whole(sweep.folder / SUMMARY_TABLE, text.getvalue().encode())


def summary_of(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    """What came of a sweep, in lines for people."""
    score = score_of(sweep, outcomes)
    states = {state: sum(outcome.state == state for outcome in outcomes) for state in (*ENDED, FAILED)}
    lines = [
        f"{counted(len(outcomes), 'point')}: "
        + ", ".join(f"{count} {state}" for state, count in states.items() if count)
    ]
    for setting in settings_of(outcomes, score):
        values = ", ".join(f"{key} = {as_toml(value)}" for key, value in setting.values.items()) or "all"
        spread = f" ({setting.lowest:.4f} to {setting.highest:.4f})" if setting.points > 1 else ""
        lines.append(f"  {score} {setting.median:.4f}{spread}, {counted(setting.points, 'run')}: {values}")
    lines += [
        f"  {each.state}: {each.point.name}: {each.reason}" for each in outcomes if each.state in (DIVERGED, FAILED)
    ]
    return "\n".join([*lines, f"Every point is in {sweep.folder / SUMMARY_TABLE}; the best setting stands first here."])


def toml_of(content: TomlTable) -> str:
    """A configuration's content as TOML."""
    return "\n".join(_lines(content, ""))


def _lines(content: TomlTable, prefix: str) -> list[str]:
    inner = {key: value for key, value in content.items() if isinstance(value, dict)}
    own = [f"{as_toml_key(key)} = {as_toml(value)}" for key, value in content.items() if key not in inner]
    head = [f"[{prefix.removesuffix('.')}]"] if prefix else []
    rest = [line for key, value in inner.items() for line in _lines(value, f"{prefix}{as_toml_key(key)}.")]
    return [*head, *own, *rest]


def as_toml_key(key: str) -> str:
    """A key as TOML reads it: in quotes where it has more than letters and digits of ASCII."""
    return key if key.isascii() and key.replace("_", "").replace("-", "").isalnum() else as_toml(key)


def _words(point: Point) -> str:
    return ", ".join(f"{key} = {as_toml(value)}" for key, value in point.told.items())
