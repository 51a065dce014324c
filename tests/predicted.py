"""What the planner says of a run, asked once of each configuration: it would take a forked run half of its time."""

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colonnade.config.schema import Config
from colonnade.planner import comparison

NOTHING_FOLLOWS = {
    "run": {"folder"},
    "data": {"train", "validation", "test", "tokenizer"},
    "train": {"steps", "evaluate_every", "evaluate_samples"},
}
"""Keys that neither memory nor time of a step depend on: what the planner says is the same without them."""


def remember(folder: Path) -> None:
    """In a process that runs one command: take from this folder what another asked, and leave there what is new."""
    for name in ("predict", "prediction"):
        setattr(comparison, name, _remembered(folder / name, getattr(comparison, name)))


def _remembered(file: Path, planned: Callable[..., Any]) -> Callable[..., Any]:
    def ask(config: Config, *arguments: object, **more: object) -> Any:
        answer = file.with_name(f"{file.name}-{_key(config, *arguments, *sorted(more.items()))}")
        if answer.exists():
            return pickle.loads(answer.read_bytes())
        found = planned(config, *arguments, **more)
        partial = answer.with_name(f"{answer.name}.{os.getpid()}")
        partial.write_bytes(pickle.dumps(found))
        partial.replace(answer)
        return found

    return ask


def _key(config: Config, *others: object) -> str:
    sections = {
        name: {key: value for key, value in dict(section).items() if key not in NOTHING_FOLLOWS.get(name, ())}
        for name, section in dict(config).items()
    }
    return hashlib.sha256(repr((sections, others)).encode()).hexdigest()
