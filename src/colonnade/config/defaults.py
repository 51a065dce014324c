"""Values that keys had by default before, and what is said to a run that began with them.

A run keeps what it began with: where its folder's config.toml has a key with the default of then, and the
configuration that the run goes on with does not mention the key, the folder's value stays.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from colonnade.config.describe import as_toml

TomlTable = dict[str, Any]

BEFORE: Mapping[str, object] = MappingProxyType(
    {
        "model.dropout": 0.1,
        "model.attention_dropout": 0.1,
        "train.evaluate_every": 0,
        "optim.min_learning_rate": 0.0,
        "optim.warmup_steps": 0,
        "optim.weight_decay": 0.01,
        "optim.beta2": 0.999,
        "checkpoint.every": 0,
    }
)
"""Defaults that are others now."""
REVISION = 2
"""data.revision of a run that begins."""
TINY_SEQ_LENGTH = 64
"""model.seq_length of the preset `tiny` before."""


def kept_from_run(content: TomlTable, folder: Path) -> dict[str, object]:
    """Full name and value of each key that the run in `folder` keeps, as it is not in `content` (TOML as read)."""
    written = _written(folder)
    kept = {
        name: before
        for name, before in BEFORE.items()
        if not has(content, name) and _at(written, name) == before and type(_at(written, name)) is type(before)
    }
    model = content.get("model")
    tiny = isinstance(model, dict) and model.get("preset") == "tiny" and "seq_length" not in model
    if tiny and _at(written, "model.seq_length") == TINY_SEQ_LENGTH:
        kept["model.seq_length"] = TINY_SEQ_LENGTH
    if not has(content, "train.precision") and isinstance(_at(written, "train.precision"), str):
        kept["train.precision"] = _at(written, "train.precision")  # the run may go on where another is chosen
    return kept | kept_revision(content, folder)


def kept_revision(content: TomlTable, folder: Path) -> dict[str, object]:
    """The same of data.revision alone, which the points of a sweep have in common."""
    written = _written(folder)
    revision = _at(written, "data.revision") or 1  # the first runs do not say it
    is_kept = isinstance(written.get("data"), dict) and not has(content, "data.revision") and revision != REVISION
    return {"data.revision": revision} if is_kept else {}


def put(content: TomlTable, values: Mapping[str, object]) -> None:
    """Give keys of `content` these values, in place."""
    for name, value in values.items():
        section, key = name.split(".")
        there = content.setdefault(section, {})
        if isinstance(there, dict):
            there[key] = value


def in_words(kept: Mapping[str, object], folder: str) -> str:
    """What to say of kept values; '' where there is nothing that one would not expect."""
    shown = {name: value for name, value in kept.items() if name != "train.precision"}
    if not shown:
        return ""
    values = ", ".join(f"{name} = {as_toml(value)}" for name, value in shown.items())
    return f"Kept from {folder}/config.toml, as the defaults were when the run began: {values}."


def _written(folder: Path) -> TomlTable:
    """What the run's folder has; nothing where there is none, or none that can be read: others will say so."""
    try:
        return tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def has(content: TomlTable, name: str) -> bool:
    """Whether a file or an override gives a value to `section.key`."""
    section, key = name.split(".")
    return isinstance(content.get(section), dict) and key in content[section]


def _at(content: TomlTable, name: str) -> object:
    section, key = name.split(".")
    there = content.get(section)
    return there.get(key) if isinstance(there, dict) else None
