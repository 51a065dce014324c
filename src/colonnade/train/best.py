"""Which checkpoint of a run is its best: of those that are there, the one whose step had the lowest validation loss.

Nothing is kept for it: metrics.jsonl has the losses and the folder the checkpoints, so that the answer is the same on
every layout and after a restart. Of steps that metrics.jsonl has lost, events tell which were the best when they were
saved.
"""

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from colonnade.checkpoint.names import NAME, checkpoints_in
from colonnade.config.numbers import counted
from colonnade.config.saving import CheckpointConfig
from colonnade.errors import CheckpointError
from colonnade.train.lines import each_line, object_in, step_in
from colonnade.train.run_folder import checkpoints

LOSS = "validation_loss"
BEST = "best"
"""The event of a save that is the best so far."""


class Best(NamedTuple):
    """A step with a checkpoint, and the loss [nats per token] of the evaluation after it."""

    step: int
    validation_loss: float

    def __str__(self) -> str:
        return f"validation loss {self.validation_loss:.4f}"


def best_of(run: Path, steps: Collection[int]) -> Best | None:
    """Of the steps of a run that have a checkpoint, the one with the lowest validation loss; None: none has any."""
    there, losses = frozenset(steps), dict[int, float]()
    for line in _evaluated(run / "metrics.jsonl"):
        losses[line["step"]] = line[LOSS]  # of a step that is written twice, what was written last
    losses |= _told(run, there - losses.keys())
    found = [Best(step, loss) for step, loss in losses.items() if step in there and math.isfinite(loss)]
    return min(found, key=lambda best: (best.validation_loss, best.step), default=None)


def _told(run: Path, steps: Collection[int]) -> dict[int, float]:
    """The losses of those of these steps that were the best when they were saved, and of which metrics.jsonl has no
    line.
    """
    events = _evaluated(run / "events.jsonl") if steps else ()
    told = {line["step"]: line[LOSS] for line in events if line.get("event") == BEST and line["step"] in steps}
    for line in each_line(run / "metrics.jsonl") if told else ():
        if any(b"%d" % step in line for step in told):  # most: not worth parsing
            told.pop(step_in(object_in(line)), None)
        if not told:
            break
    return told


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    """What the evaluations of a run found, by the step and by the name in metrics.jsonl: validation_loss and others."""
    return {
        line["step"]: {name: number for name, number in line.items() if name.startswith("validation_")}
        for line in _evaluated(run / "metrics.jsonl")
    }


def evaluations_since_best(run: Path, *, until: float = math.inf) -> int:
    """Evaluations behind the one with the lowest validation loss, up to step `until`. One that is not finite is never
    the lowest.
    """
    found = [each[LOSS] for step, each in sorted(evaluations(run).items()) if step <= until]
    losses = [loss if math.isfinite(loss) else math.inf for loss in found]
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def none_better(since: int, patience: int) -> str:
    """Why a run has ended early, in words."""
    return f"the last {counted(since, 'evaluation')} found no lower loss (train.patience = {patience})"


def best_steps(run: Path, steps: Collection[int]) -> frozenset[int]:
    """The best of `steps`, or nothing: what a rotation of checkpoints spares."""
    best = best_of(run, steps)
    return frozenset() if best is None else frozenset({best.step})


def spared(run: Path, kept: CheckpointConfig, steps: Collection[int]) -> frozenset[int]:
    """Of the steps of a run those whose checkpoints stay, however old they are."""
    every = frozenset(step for step in steps if kept.keep_every and step % kept.keep_every == 0)
    return every | best_steps(run, steps) if kept.keep_best else every


def best_checkpoint(path: Path) -> tuple[Path, Best]:
    """The best checkpoint of a run, which `path` names by its folder or by that of its checkpoints. CheckpointError
    where there is none.
    """
    folder = checkpoints(path) if checkpoints(path).is_dir() else path
    found = checkpoints_in(folder) if folder.is_dir() else {}
    if not found:
        run = path.parents[1] if NAME.fullmatch(path.name) and len(path.parents) > 1 else "the folder of a run"
        raise CheckpointError(
            f"--best chooses among the checkpoints of a run, and {path} is no run's folder. Name {run}, or leave out "
            "--best."
        )
    best = best_of(folder.parent, found)
    if best is None:
        names = ", ".join(each.name for each in found.values())
        raise CheckpointError(
            f"--best: none of the checkpoints of {folder.parent} ({names}) was evaluated, as its metrics.jsonl says. "
            "Leave out --best for the newest, or name one; train.evaluate_every and checkpoint.every decide which "
            "checkpoints are evaluated."
        )
    return found[best.step], best


def _evaluated(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl, or of events.jsonl, that tell of an evaluation, with NaN for null. One that was cut
    off is passed over.
    """
    for line in each_line(file):
        if LOSS.encode() not in line:  # most: not worth parsing
            continue
        content = {name: math.nan if value is None else value for name, value in (object_in(line) or {}).items()}
        if step_in(content) and isinstance(content.get(LOSS), float):
            yield content
