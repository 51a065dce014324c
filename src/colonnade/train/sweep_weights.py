"""From which weights the points of a sweep begin, and which teach them: of a run that is named those of one checkpoint,
and of every point the same content.

    run.folder/NAME.weights.json    of which content they were when the point began, by file (`base.content_of`)

A run that is named may go on beside a sweep, or between two starts of it: then its newest checkpoint is another one. A
published folder may be overwritten.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from colonnade.atomic import write_whole
from colonnade.checkpoint.names import checkpoints_in
from colonnade.config.load import TomlTable
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.train.base import content_of, of_same_files
from colonnade.train.lines import object_in, objects_in
from colonnade.train.newest import INITIALIZED, checkpoint_at
from colonnade.train.run_folder import checkpoints

INIT_FROM = "train.init_from"
KEYS = {INIT_FROM: "begin from the weights", "distillation.teacher": "learn from the teacher"}
"""What names weights, and what a point does with them."""


class Weights:
    """What lies where configurations name weights; read once as long as its files keep their sizes and times."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[list[tuple[str, int, int]], dict[str, str]]] = {}

    def begin(self, content: TomlTable, run: Path) -> None:
        """Write down of which content the weights of a run that begins now are. ConfigError where they are gone."""
        _check_there(content, run)
        if (found := self._found(content)) and not checkpoints_in(checkpoints(run)):
            write_whole(_kept(run), json.dumps(found, indent=1).encode())

    def other(self, content: TomlTable, run: Path) -> list[str]:
        """A line for each key whose weights had other content when the run began."""
        before = _recorded(run)
        if not before:
            return []  # without a look at what lies there, which may be large
        return [
            f"{what}: other content"
            for what, files in self._found(content).items()
            if what in before and of_same_files(before[what], files) != files
        ]

    def _found(self, content: TomlTable) -> dict[str, dict[str, str]]:
        """Digests by file, of each key and the place that it names."""
        found = {}
        for key in KEYS:
            if (named := named_weights(content, key)) is not None:
                with suppress(ColonnadeError, OSError):  # told by the run that reads it
                    found[f"{key} ({Path(named)})"] = self._content(Path(named))
        return found

    def _content(self, path: Path) -> dict[str, str]:
        there = sorted((file.name, file.stat()) for file in path.iterdir() if file.exists())  # no links to what is gone
        stamp = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in there]
        if path not in self._read or self._read[path][0] != stamp:
            self._read[path] = stamp, content_of(path)
        return self._read[path][1]


def named_weights(content: TomlTable, key: str) -> str | None:
    """What a key of `KEYS` is in a configuration, if it is a text."""
    section, _, name = key.partition(".")
    table = content.get(section)
    named = table.get(name) if isinstance(table, dict) else None
    return named if isinstance(named, str) else None


def with_checkpoint(content: TomlTable) -> TomlTable:
    """A configuration with the checkpoint in the place of each run whose newest it is now."""
    for key in KEYS:
        named, found = named_weights(content, key), None
        with suppress(ColonnadeError, OSError):  # a damaged one: told by the run that begins from it
            found = None if named is None else checkpoint_at(Path(named))
        content = content if found is None else _with(content, key, str(found))
    return content


def as_begun(content: TomlTable, run: Path) -> TomlTable:
    """A configuration with the weights that its run began from, as its events tell."""
    began = [event.get("source") for event in objects_in(run / "events.jsonl") if event.get("event") == INITIALIZED]
    source = next((each for each in reversed(began) if isinstance(each, str)), None)
    named = named_weights(content, INIT_FROM)
    if named is None or source is None or Path(source) == Path(named):  # however the name is written
        return with_checkpoint(content)
    return _with(with_checkpoint(content), INIT_FROM, source)


def where_gone(content: TomlTable, began: TomlTable) -> TomlTable:
    """A configuration with what its run began with in the place of weights that are gone."""
    for key in KEYS:
        named, before = named_weights(content, key), named_weights(began, key)
        if named is not None and before is not None and not os.path.exists(named):
            content = _with(content, key, before)
    return content


def _check_there(content: TomlTable, run: Path) -> None:
    """ConfigError where a run would find its weights gone from where they lay. One that goes on has begun from its."""
    has_begun = bool(checkpoints_in(checkpoints(run)))
    for key, does in KEYS.items():
        named = named_weights(content, key)
        if named is None or Path(named).exists() or not Path(named).parent.is_dir() or (has_begun and key == INIT_FROM):
            continue
        raise ConfigError(
            f"{key} = {named!r} is gone: point {run.name} cannot {does} of the others. Put it back, and the same "
            f"command goes on; or set another run.folder, and {key} to a checkpoint that stays: a copy, or one that "
            "checkpoint.keep_every spares."
        )


def _kept(run: Path) -> Path:
    return run.with_name(f"{run.name}.weights.json")


def _recorded(run: Path) -> dict[str, dict[str, str]]:
    """What `begin` wrote down; nothing where that is no such table."""
    kept = _kept(run)
    found = (object_in(kept.read_bytes()) or {}) if kept.exists() else {}
    return {what: files for what, files in found.items() if isinstance(files, dict)}


def _with(content: TomlTable, key: str, weights: str) -> TomlTable:
    section, _, name = key.partition(".")
    return {**content, section: {**content[section], name: weights}}
