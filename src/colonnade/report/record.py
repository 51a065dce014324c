"""A run as its folder tells it: every file is read as far as it can be, and what could not be read is a note.

A run may be under way while this reads, killed in the middle of a line, or older than some of the files.
"""

import json
import math
import time
import tomllib
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from colonnade.config.numbers import counted, is_number
from colonnade.drawing.thin import Floats
from colonnade.errors import ConfigError, hidden
from colonnade.report.growing import Growing
from colonnade.report.heat import Thinned
from colonnade.train.lines import step_in
from colonnade.train.monitor import METRICS
from colonnade.train.run_folder import was_asked_to_change

EVENTS, THERMOMETERS, CONFIG = "events.jsonl", "thermometers.jsonl", "config.toml"
PREDICTION, COMPARISON, PROFILE = "prediction.json", "comparison.json", "profile.json"
LARGEST = 64 << 20  # bytes of a file that is read at once
LARGEST_SHOWN = 1e300
MOST_MEASURED = 2_000  # lines of thermometers that are held: of more, each stands for equally many


def can_be_shown(value: Any) -> bool:
    """Whether a value from a file is a number whose distance from others is one too."""
    return is_number(value) and abs(value) < LARGEST_SHOWN


@dataclass(frozen=True)
class Record:
    """One run."""

    folder: Path
    columns: Mapping[str, Floats]
    """metrics.jsonl by name, a number a step; NaN where a step has none."""
    events: list[dict[str, Any]]
    thermometers: list[dict[str, Any]]
    prediction: dict[str, Any]
    comparison: dict[str, Any]
    profile: dict[str, Any]
    config: dict[str, Any]
    """Empty where it cannot be read."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, or is not shown."""
    seconds_since: float = 0.0
    """How long ago the run wrote something."""
    called: str = ""
    """Where it stands beside others: what tells it from them."""

    @property
    def name(self) -> str:
        return self.called or names_of([self.folder])[0]

    @property
    def steps(self) -> Floats:
        return self.columns["step"]

    @cached_property
    def hours(self) -> Floats:
        """Hours of training after each step: the sum of what steps took, without what came between."""
        seconds = self.columns.get("seconds", np.full(len(self.steps), math.nan))
        return np.cumsum(np.nan_to_num(seconds)) / 3600

    @cached_property
    def setup(self) -> dict[str, Any]:
        """What the newest start said of itself."""
        return next((event for event in reversed(self.events) if event["event"] == "setup"), {})

    @cached_property
    def planned(self) -> int:
        """The step that the run ends with: train.steps, behind all changes of it, or its last, where that is above it;
        0 where that is not known.
        """
        done = int(self.steps[-1]) if len(self.steps) else 0
        if was_asked_to_change(self.folder):
            from colonnade.train.change_requests import began_with, from_now_on, read_decided

            with suppress(ConfigError):
                began = began_with(self.folder, read_decided(self.folder))
                return max(done, from_now_on(began, done, self.folder)[-1].train.steps)
        train = self.config.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        return max(done, steps) if type(steps) is int else 0


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many of them as tell it from the others."""
    paths = [folder.resolve() for folder in folders]

    def parts_of(path: Path) -> int:
        others = [other for other in paths if other != path]
        counts = range(1, len(path.parts))
        return next((n for n in counts if all(each.parts[-n:] != path.parts[-n:] for each in others)), len(path.parts))

    return [str(Path(*path.parts[-parts_of(path) :])) for path in paths]


def read_run(folder: Path, otherwise: str = "") -> Record:
    """The run in a folder. ConfigError where there is none; `otherwise` is what else may be named."""
    return RunReader(folder, otherwise).read()


class RunReader:
    """Reads a run again and again while it goes on, of files that grow no line twice."""

    def __init__(self, folder: Path, otherwise: str = "", *, thermometers: bool = True) -> None:
        """ConfigError where there is no run; `otherwise` is what else may be named. `thermometers`: whether they are
        read.
        """
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder: name the folder of a run (run.folder of its configuration).")
        if not any((folder / name).exists() for name in (METRICS, EVENTS, CONFIG)):
            raise ConfigError(
                f"{folder} is no folder of a run: there is no {METRICS}, {EVENTS} or {CONFIG} in it. Name the "
                f"run.folder of a configuration that was trained{otherwise}."
            )
        self.folder, self._has_thermometers = folder, thermometers
        self._metrics, self._columns = Growing(folder / METRICS), _Columns()
        self._happened, self._events = Growing(folder / EVENTS), list[dict[str, Any]]()
        self._measured, self._thermometers = Growing(folder / THERMOMETERS), Thinned(MOST_MEASURED)

    def read(self) -> Record:
        """The run as it is now."""
        folder, notes = self.folder, list[str]()
        columns = self._read_columns(notes)
        for event in self._happened.new(notes, self._events.clear):
            if isinstance(event.get("event"), str):
                self._events.append({**hidden(event), "time": _number(event.get("time"))})
        return Record(
            folder=folder,
            columns=columns,
            events=list(self._events),
            thermometers=self._read_thermometers(notes) if self._has_thermometers else [],
            prediction=_json(folder / PREDICTION, notes),
            comparison=_json(folder / COMPARISON, notes),
            profile=_json(folder / PROFILE, notes),
            config=_toml(folder / CONFIG, notes),
            notes=notes,
            seconds_since=_since(folder),
        )

    def _read_columns(self, notes: list[str]) -> dict[str, Floats]:
        path, columns = self._metrics.path, self._columns
        for line in self._metrics.new(notes, columns.clear):
            if step_in(line):
                columns.append(line)
        if not columns.lines:
            notes.append(f"{path.name} has no step yet." if path.exists() else f"There is no {path.name}.")
        found, twice = columns.by_step()
        if twice:
            notes.append(f"{path.name} has {counted(twice, 'step')} twice; what was written last is shown.")
        return found

    def _read_thermometers(self, notes: list[str]) -> list[dict[str, Any]]:
        for line in self._measured.new(notes, self._thermometers.clear):
            if step_in(line):
                self._thermometers.append(line)
        return sorted(self._thermometers.lines, key=step_in)


def _since(folder: Path) -> float:
    written = [path.stat().st_mtime for name in (METRICS, EVENTS) if (path := folder / name).exists()]
    return max(0.0, time.time() - max(written, default=0.0))


class _Columns:
    """The numbers of metrics.jsonl by name, a line each."""

    def __init__(self) -> None:
        self._found: dict[str, array[float]] = {}
        self.lines = 0

    def clear(self) -> None:
        self._found, self.lines = {}, 0

    def append(self, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if can_be_shown(value):
                column = self._found.setdefault(name, array("d"))
                if len(column) < self.lines:
                    column.extend([math.nan] * (self.lines - len(column)))
                column.append(value)
        self.lines += 1

    def by_step(self) -> tuple[dict[str, Floats], int]:
        """In the order of steps, each step once: the last line of it counts. And how many came before it."""
        columns = {"step": np.empty(0)}
        for name, column in self._found.items():
            column.extend([math.nan] * (self.lines - len(column)))
            columns[name] = np.array(column, dtype=np.float64)
        steps, last = np.unique(columns["step"][::-1], return_index=True)
        rows = self.lines - 1 - last
        return {name: column[rows] for name, column in columns.items()}, self.lines - len(steps)


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST:
            notes.append(f"{path.name} is larger than {LARGEST >> 20} MB and left out.")
            return {}
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
        return {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        notes.append(f"{path.name} is damaged: it is no JSON object.")
        return {}
    return content


def _toml(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content: dict[str, Any] = hidden(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        notes.append(f"There is no {path.name}.")
        return {}
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
        return {}
    except (ValueError, RecursionError):
        notes.append(f"{path.name} is damaged: it is no TOML.")
        return {}
    return content


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, bool) or is_number(value) else None
