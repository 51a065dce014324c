"""[sweep]: lists of values for keys of a configuration; every combination of them is a point, a run of its own.

[sweep]
optim.learning_rate = [1e-5, 2e-5]
train.seed = [1, 2, 3]                 2 × 3 points, of which those that differ in the seed alone are one setting
train.init_from = ["", "runs/books"]   "": without the key, where a configuration may be without it
score = "accuracy"                     which of the validation scores tells the better setting
at_once = 2                            how many points run side by side, each with a share of the machine
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

from colonnade.config.describe import all_keys, as_toml
from colonnade.config.load import TomlFile, TomlTable, read_with
from colonnade.config.problems import SWEEP
from colonnade.errors import ConfigError, hidden
from colonnade.storage import below

SECTION, SCORE, AT_ONCE, SEED = SWEEP, "score", "at_once", "train.seed"
SUMMARY, SUMMARY_TABLE = "summary.json", "summary.csv"
"""In the sweep's folder: what came of its points."""
SAME_RESULT = (
    *("parallel.", "restarts.", "run.", "tracking.", "thermometers.", "data.cache", "train.log_every"),
    *("train.threads", "train.device", "train.products", "train.timeout", "train.micro_batch_size"),
    *("checkpoint.memory_every", "checkpoint.asynchronous", "checkpoint.compare_copies_every"),
    *("checkpoint.unequal_copies", "checkpoint.retry_for", "checkpoint.upload_"),
)
"""How the keys begin that may differ between points that are compared: they tell how a run is made, not what it is, nor
which of its checkpoints are there to be the best.
"""
MOST_BYTES = 225
"""Of a point's name: file systems take 255, and while its configuration is written some stand behind it."""
UNSET = ""
"""A value of a list that stands for no value."""
_ENTRY = "[sweep] lists values of keys, like `optim.learning_rate = [1e-5, 2e-5]`"


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    values: Mapping[str, Any]
    """By key."""
    content: TomlTable
    """Of its configuration file."""

    @property
    def told(self) -> dict[str, Any]:
        """Its values as they are shown and written down: without credentials."""
        return {key: _told(value) for key, value in self.values.items()}

    @property
    def setting(self) -> tuple[str, ...]:
        """Its values but the seed, in words."""
        return tuple(f"{key} = {as_toml(value)}" for key, value in self.values.items() if key != SEED)


@dataclass(frozen=True)
class Sweep:
    """All runs, and where they are."""

    folder: Path
    """The base's run.folder: each point has a folder in it."""
    points: Sequence[Point]
    score: str | None
    """Which validation score tells the better setting; None: the first known one that there is."""
    at_once: int = 1
    """How many points run side by side."""


def read_sweep(path: Path | TomlFile, overrides: Sequence[str]) -> Sweep | None:
    """The sweep of a configuration file; None where it has no [sweep]. ConfigError where it cannot be one.

    What is wrong with the configurations of its points is told when they are read.
    """
    for override in overrides:
        section, _, name = override.partition("=")[0].partition(".")
        if section.strip() == SECTION and any(f"{key}.".startswith(f"{name.strip()}.") for key in all_keys()):
            raise ConfigError(f"{override}: the lists of [sweep] stand in the file. Write this one into {path}.")
    content, problems = read_with(path, overrides)
    if SECTION not in content:
        return None
    if problems:
        raise ConfigError("\n".join(problem.message for problem in problems))
    section = content.pop(SECTION)
    run = content.get("run")
    folder = run.get("folder") if isinstance(run, dict) else None
    if not isinstance(section, dict) or not isinstance(folder, str) or not folder:
        raise ConfigError(f"{path}: {_ENTRY}, and run.folder names where its runs are. Set both.")
    score = section.pop(SCORE, None)
    if score is not None and not isinstance(score, str):
        raise ConfigError(f"{path}: sweep.score = {as_toml(score)} is no name. Use accuracy, f1, matthews, … or loss.")
    at_once = section.pop(AT_ONCE, 1)
    if type(at_once) is not int or at_once < 1:
        raise ConfigError(f"{path}: sweep.at_once = {as_toml(at_once)} is no number of points. Use 1 or more.")
    lists = dict(_flat(section))
    _check(path, lists, content)
    _check_given(path, lists, overrides)
    combinations = product(*(values for values in lists.values()))
    points = [_point(content, folder, dict(zip(lists, values, strict=True))) for values in combinations]
    _check_names(path, points)
    return Sweep(Path(folder), points, score, at_once)


def sweep_instead(path: Path, named: str) -> str:
    """What to say where a path, which `named` says in words, is a sweep's folder and was to be a run's; empty where it
    is none.
    """
    if not (path / SUMMARY).is_file():
        return ""
    return (
        f"{named} is the folder of a sweep, and each of its points has a run of its own. Name the folder of one in it; "
        f"{path / SUMMARY_TABLE} tells their scores."
    )


def changed(before: TomlTable, now: TomlTable) -> list[str]:
    """A line for each key in which two configurations of one point differ, 'train.steps: 100 -> 200', as far as that
    makes another run of it.
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    keys = [key for key in {**old, **new} if not key.startswith(SAME_RESULT)]
    words = {key: [as_toml(table[key]) if key in table else "unset" for table in (old, new)] for key in keys}
    return [f"{key}: {was} -> {is_}" for key, (was, is_) in words.items() if was != is_]


def less_is_better(score: str) -> bool:
    """Of losses (of parts and data sets too: `masked_loss`, `loss/NAME`) and what is computed from them."""
    name = score.partition("/")[0]
    return name in ("loss", "perplexity", "bits_per_byte") or name.endswith("_loss")


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by their whole keys, however TOML has nested them."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check(path: Path | TomlFile, lists: Mapping[str, Any], content: TomlTable) -> None:
    lines = [line for key, values in lists.items() for line in _wrong(key, values)]
    train = content.get("train", {})
    if not lists:
        lines.append("it lists nothing")
    if "train.epochs" in lists and ("train.steps" in lists or (isinstance(train, dict) and "steps" in train)):
        lines.append("train.epochs has no effect where train.steps is set. Leave train.steps out")
    if lines:
        raise ConfigError("\n".join([f"{path}: {_ENTRY}, and", *(f"  - {line}." for line in lines)]))


def _check_given(path: Path | TomlFile, lists: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """ConfigError where the command line gives a value to a key that has one of its list in each point."""
    for override in overrides:
        name = override.partition("=")[0].strip()
        for key, values in lists.items():
            if f"{name}.".startswith(f"{key}."):
                raise ConfigError(
                    f"{override} has no effect: {path} lists values of {key} in [sweep], {as_toml(values)}, and each "
                    "point has one of these. Leave it out, or change the list there."
                )


def _check_names(path: Path | TomlFile, points: Sequence[Point]) -> None:
    """ConfigError for a point of whose name there can be no file."""
    for point in points:
        if (size := len(point.name.encode())) > MOST_BYTES:
            key, value = max(point.told.items(), key=lambda each: len(_shown(each[1]).encode()))
            raise ConfigError(
                f"{path}: a point's folder is named by its values in [sweep], and one name would have {size} bytes, "
                f"more than {MOST_BYTES}. Shorten {key} = {as_toml(value)}: a file or a folder can have a link with a "
                "short name."
            )


def _wrong(key: str, values: Any) -> Iterator[str]:
    if key not in all_keys():
        near = get_close_matches(key, all_keys(), n=1)
        yield f"{key} is not a key{f': did you mean {near[0]}?' if near else ''}"
    elif key.startswith("run."):
        yield f"{key} is the same for all points, each of which has a folder in run.folder"
    elif not isinstance(values, list) or not values:
        yield f"{key} = {as_toml(values)} is no list of one value or more"
    elif len({as_toml(value) for value in values}) < len(values):
        yield f"{key} = {as_toml(values)} has a value twice"
    elif len({_shown(_told(value)) for value in values}) < len(values):
        yield f"{key} = {as_toml(values)} has values that are alike as names of folders. Write one in another way"


def _point(content: TomlTable, folder: str, values: dict[str, Any]) -> Point:
    name = _name({key: _told(value) for key, value in values.items()})
    if (before := _name(values)) != name and Path(folder, before).is_dir():
        name = before  # of a sweep that was begun when credentials stood in names
    own: TomlTable = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    for key, value in values.items():
        _put(own, key, value)
    own["run"] = {**own["run"], "folder": str(Path(folder) / name)}
    url = own.get("checkpoint", {}).get("upload_to") if isinstance(own.get("checkpoint"), dict) else None
    if isinstance(url, str):
        own["checkpoint"] = {**own["checkpoint"], "upload_to": below(url, name)}
    return Point(name, values, own)


def _name(values: Mapping[str, Any]) -> str:
    return "_".join(f"{key.rpartition('.')[2]}-{_shown(value)}" for key, value in values.items())


def _put(content: TomlTable, key: str, value: Any) -> None:
    """Give a key this value, in tables of its own; nothing where a section is none, which is told when it is read."""
    section, _, last = key.rpartition(".")
    place = content
    for part in section.split("."):
        inner = place.get(part, {})
        if not isinstance(inner, dict):
            return
        place[part] = dict(inner)
        place = place[part]
    place[last] = value
    if value == UNSET and all_keys()[key].default is None:
        del place[last]


def _told(value: Any) -> Any:
    """A value without credentials; where it has some, with digits that tell it from others."""
    shown = hidden(value)
    return value if shown == value else f"{shown} ({crc32(as_toml(value).encode()) & 0xFFFF:04x})"


def _shown(value: Any) -> str:
    """A value as part of a folder's name."""
    text = f"{value:g}" if isinstance(value, float) else str(value) or "unset"
    return "".join(each if each.isalnum() or each in ".+-" else "_" for each in text)
