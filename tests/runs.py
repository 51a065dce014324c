"""What a run has left in its folder, for comparing two of them to the bit."""

import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.checkpoint.load import load
from colonnade.checkpoint.manifest import newest, read_manifest
from colonnade.checkpoint.names import checkpoints_in
from colonnade.checkpoint.plan import Shard
from colonnade.config.schema import Config
from colonnade.train.beginning import Course
from colonnade.train.metadata import metadata_of

TIMES = ("tokens_per_second", "seconds", "mfu")


@dataclass(frozen=True)
class Finished:
    """A run of six steps, saved every two; steps 4 and 6 are kept."""

    config: Path
    folder: Path

    @property
    def newest(self) -> Path:
        return self.folder / "checkpoints" / "step_00000006"


def at_step_4(finished: Finished, folder: Path) -> Path:
    """A copy of a run in `folder` that is at step 4; what it saves at step 6 lies beside it."""
    shutil.copytree(finished.folder, folder)
    (folder / "checkpoints" / "step_00000006").rename(folder.parent / "step_00000006")
    return folder


def course(config: Config, whole: Config | None = None) -> Course:
    """Of a run without rollbacks, whose changes to come make it `whole`."""
    return Course(config, whole or config, returns=(), refused=())


def metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock decides."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def tensors(run: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint, whole: weights and optimizer state."""
    path = newest(run / "checkpoints")
    assert path is not None, f"{run} has no checkpoint"
    return whole_tensors(path)


def whole_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    whole = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in read_manifest(path).tensors.items()}
    load(path, [Shard(name, tuple(x.shape), (0,) * x.ndim, x) for name, x in whole.items()])
    return whole


def saved_steps(run: Path) -> list[int]:
    return list(checkpoints_in(run / "checkpoints"))


def samples_of(run: Path) -> int:
    """Where in its data the newest checkpoint of a run is."""
    newest = checkpoints_in(run / "checkpoints")[saved_steps(run)[-1]]
    return metadata_of(newest, read_manifest(newest)).samples


def assert_same(run: Path, expected: Path) -> None:
    """Bit for bit: what was computed in each step, what it led to, and which steps of it are kept."""
    assert_same_end(run, expected)
    assert saved_steps(run) == saved_steps(expected)


def assert_same_end(run: Path, expected: Path) -> None:
    """Bit for bit: what was computed in each step, and what it led to."""
    assert metrics(run) == metrics(expected)
    ours, theirs = tensors(run), tensors(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name, x in ours.items() if not torch.equal(x, theirs[name])] == []


def assert_near(
    run: Path, expected: Path, *, without_effect: Collection[str] = (), ended_with: Collection[int] = ()
) -> None:
    """In float64: what every step told, and what it led to. `without_effect`: weights that no loss depends on, whose
    gradients are rounding alone, which AdamW divides by their own size. `ended_with`: steps that were the last ones of
    a start, which evaluates there, and that may have been computed again on the way to others.
    """
    for mine, theirs in zip(metrics(run), metrics(expected), strict=True):
        passed_over = mine.keys() ^ theirs.keys() if mine["step"] in ended_with else set()
        assert all(name.startswith("validation_") for name in passed_over), f"{mine} is not {theirs}"
        told = [{name: value for name, value in line.items() if name not in passed_over} for line in (mine, theirs)]
        assert told[0] == pytest.approx(told[1], rel=1e-10), f"{mine} is not {theirs}"
    ours, weights = tensors(run), tensors(expected)
    assert ours.keys() == weights.keys()
    for name, tensor in ours.items():
        least = 1e-8 if name in without_effect else 1e-10
        torch.testing.assert_close(tensor, weights[name], rtol=1e-8, atol=least, msg=lambda m, n=name: f"{n}: {m}")


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}
