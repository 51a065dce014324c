"""What the planner says of a run, asked once of each configuration: it would take a forked run half of its time."""

import hashlib
import os
import pickle
from collections.abc import Callable
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, ParallelConfig, TrainConfig
from colonnade.planner import comparison, memory
from colonnade.train.products import Decision

NOTHING_FOLLOWS = {
    "model": {"init_std"},
    "run": {"folder"},
    "data": {"train", "validation", "test", "tokenizer"},
    "train": {"steps", "seed", "patience", "evaluate_every", "evaluate_samples"},
    "optim": {"learning_rate", "min_learning_rate", "warmup_steps", "decay", "decay_steps"},
    "divergence": {"then", "spike", "window", "patience", "healthy_for", "rate_factor", "rate_steps", "tries"},
    "checkpoint": {"keep", "retry_for", "unequal_copies", "compare_copies_every"},
    "restarts": {"limit"},
}
"""Keys that neither memory nor time of a step depend on: what the planner says is the same without them."""
OF_UNITS = {"parallel": ("tp", "sequence_parallel", "recompute"), "train": ("precision", "micro_batch_size")}
"""All that what a micro-batch leaves in a unit depends on, beside the model and where it is: on all stages alike."""


def remember(folder: Path) -> None:
    """In a process that runs one command: take from this folder what another asked, and leave there what is new."""
    memory.kept_of = _remembered(folder / "kept", memory.kept_of, _key_of_units)  # type: ignore[attr-defined]
    comparison.prediction = _remembered(folder / "prediction", comparison.prediction, _key)


def _remembered(file: Path, planned: Callable[..., Any], key: Callable[..., object]) -> Callable[..., Any]:
    def ask(*arguments: Any, **more: Any) -> Any:
        digest = hashlib.sha256(repr(key(*arguments, **more)).encode()).hexdigest()
        answer = file.with_name(f"{file.name}-{digest}")
        with file.with_name(f"{answer.name}.lock").open("w") as lock:
            flock(lock, LOCK_EX)  # several stages ask the same at once
            if answer.exists():
                return pickle.loads(answer.read_bytes())
            found = planned(*arguments, **more)
            partial = answer.with_name(f"{answer.name}.{os.getpid()}")
            partial.write_bytes(pickle.dumps(found))
            partial.replace(answer)
            return found

    return ask


def _key(config: Config, *others: object, **more: object) -> object:
    sections = {
        name: {key: value for key, value in dict(section).items() if key not in NOTHING_FOLLOWS.get(name, ())}
        for name, section in dict(config).items()
    }
    asked = [each.products if isinstance(each, Decision) else each for each in others]  # not how that was decided
    return sections, asked, sorted(more.items())


def _key_of_units(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, **more: object) -> object:
    sizes = {key: value for key, value in dict(model).items() if key not in NOTHING_FOLLOWS["model"]}
    chosen = [
        getattr(section, key) for name, section in (("parallel", parallel), ("train", train)) for key in OF_UNITS[name]
    ]
    return sizes, chosen, sorted(more.items())
