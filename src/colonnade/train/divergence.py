"""What counts as a divergence, and where a run returns to then. Pure: told from numbers that all ranks have alike, so
that all decide the same, on any layout and after any restart.

    losses   5.1 5.0 5.1 4.9 … 5.0 │ 9.3 9.8 14.2         median + spike × deviation is exceeded `patience` times
    saved         ▲C1       ▲C2    │ first      └ step     C2 is healthy if healthy_for steps lie between it and `first`
"""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from colonnade.config.numbers import counted
from colonnade.config.schema import DivergenceConfig
from colonnade.errors import ColonnadeError
from colonnade.optim.schedule import LearningRate
from colonnade.train.growth import Windows, grown, observe
from colonnade.train.rollback import Rollback, in_force
from colonnade.train.thermometers import Reading

if TYPE_CHECKING:
    from colonnade.train.change import Change

TO_DEVIATION = 1.4826  # from the median absolute deviation to the standard deviation of what is normal
LEAST_DEVIATION = 0.01  # of the median: losses that hardly vary make no spike of a trifle


@dataclass(frozen=True)
class Divergence:
    """A run that has diverged, as `step` showed."""

    step: int
    first: int
    """The first of the signs that end with `step`."""
    reason: str


class Diverged(Exception):
    """Raised in a step that showed it, on all ranks."""

    def __init__(self, found: Divergence) -> None:
        super().__init__(found.reason)
        self.found = found


ROLLED_BACK = "rolled back"
"""The event of a run that returned to a checkpoint: by itself, or `BY_HAND`."""
BY_HAND = "asked for"
"""The reason of a rollback that somebody asked for, while the run was not at work."""
NO_ROLLBACK = "no rollback"
"""The event of a run that would have done so by itself, and could not."""


COPIES_DIFFER, RETURNS = "copies differ", "returns"
"""The event of copies that differ, and how its `then` begins where the run returned to a checkpoint."""


def has_returned(event: Mapping[str, Any]) -> bool:
    """Whether an event tells that a run at work returned to a checkpoint: what came of it before is undone."""
    if event["event"] == ROLLED_BACK:
        return event.get("reason") != BY_HAND
    return event["event"] == COPIES_DIFFER and str(event.get("then")).startswith(RETURNS)


@dataclass
class LossWatch:
    """The losses that the next one is held against."""

    losses: list[float] = field(default_factory=list)
    """The newest, at most `window`, without those that were signs."""
    signs: int = 0
    """In a row, up to the last step; steps without a loss do not end it."""
    windows: Windows = field(default_factory=dict)
    """Of thermometers."""
    growth_steps: int | None = None
    """That `windows` are parts of; None: there are none, or they are of before this was written."""
    without_loss: int = 0
    """Steps since the first of `signs`, in which no label counted."""

    def sees(
        self,
        policy: DivergenceConfig,
        step: int,
        loss: float | None,
        grad_norm: float,
        *,
        skipped: bool,
        reading: Reading | None = None,
    ) -> Divergence | None:
        """The divergence that a step shows. `skipped`: its gradients overflowed (fp16), and no weight was changed.
        `loss` None: no label counts. `reading`: of the thermometers, where the step is measured.
        """
        first = step - self.signs - self.without_loss
        if not ((loss is None or math.isfinite(loss)) and (math.isfinite(grad_norm) or skipped)):
            has = "no label that counts" if loss is None else f"loss {loss}"
            return Divergence(step, first, f"has {has} and gradient norm {grad_norm}")
        if loss is None:
            self.without_loss += bool(self.signs)
            return self._growth(policy, reading)
        limit = self._limit(policy)
        if loss <= limit:
            self.signs = self.without_loss = 0
            if policy.spike:
                self.losses = [*self.losses, loss][-policy.window :]
            return self._growth(policy, reading)
        self.signs += 1
        if self.signs < policy.patience:
            return None
        since = f"and those since step {first} exceed" if self.signs > 1 else "exceeds"
        return Divergence(
            step, first, f"has loss {loss:.4g}, which {since} {limit:.4g} (divergence.spike = {policy.spike:g})"
        )

    def _growth(self, policy: DivergenceConfig, reading: Reading | None) -> Divergence | None:
        if not policy.growth or reading is None or reading.step <= policy.growth_after:
            return None
        if self.growth_steps not in (None, policy.growth_steps):
            self.windows = {}  # their numbers mean other steps
        self.growth_steps = policy.growth_steps
        found = grown(self.windows, reading, policy.growth, policy.growth_steps)
        self.windows = observe(self.windows, reading, policy.growth_steps)
        return None if found is None else Divergence(reading.step, found.since + 1, found.reason)

    def _limit(self, policy: DivergenceConfig) -> float:
        """[nats] Above it a loss is a sign."""
        if not policy.spike or len(self.losses) < policy.window:
            return math.inf
        losses = self.losses[-policy.window :]
        median = statistics.median(losses)
        deviation = TO_DEVIATION * statistics.median(abs(loss - median) for loss in losses)
        return median + policy.spike * max(deviation, LEAST_DEVIATION * abs(median))


def decide(
    found: Divergence,
    saved: Collection[int],
    past: Sequence[Rollback],
    policy: DivergenceConfig,
    *,
    folder: str,
    changes: "Sequence[Change]" = (),
) -> Rollback:
    """Where the run returns to, given the steps of its checkpoints and all earlier rollbacks. ColonnadeError with the
    reason where it does not. `folder`: of the run, for what to do by hand. `changes`: made in mid-run so far.
    """
    healthy = [step for step in saved if step + policy.healthy_for < found.first]
    remedy = _remedy(found, saved, healthy, past, folder, by_itself=policy.then == "roll_back")
    remedy += "".join(_made_again(found, max(healthy), folder, changes)) if healthy else ""
    if policy.then == "stop" or found.step == 1:
        raise stopped(found, remedy)
    if not healthy:
        there = f"the oldest of {len(saved)} is of step {min(saved)}" if saved else "there is none"
        raise stopped(
            found,
            f"No checkpoint is healthy, that is, has divergence.healthy_for = {policy.healthy_for} steps between it "
            f"and step {found.first}, the first with a sign: {there}. Lower optim.learning_rate or lengthen "
            "optim.warmup_steps, and start again in another run.folder; or keep more checkpoints (checkpoint.keep).",
        )
    to = max(healthy)
    tries = sum(each.detected is not None and each.detected >= to for each in past)
    if tries >= policy.tries:
        raise stopped(found, f"It has returned {counted(tries, 'time')} already, which is divergence.tries. {remedy}")
    return Rollback(
        to=to,
        detected=found.step,
        skip=found.step - to + _passed_over(past, to + 1) if policy.skip_batches else 0,
        rate_factor=1.0 if policy.rate_factor is None else policy.rate_factor,
        rate_until=0 if policy.rate_factor is None else found.step + policy.rate_steps,
        rewarm_steps=policy.rewarm_steps,
        reason=f"step {found.step} {found.reason}",
    )


def stopped(found: Divergence, remedy: str) -> ColonnadeError:
    """What ends a run that has diverged."""
    return ColonnadeError(f"step {found.step} {found.reason}: the run has diverged. {remedy}")


def _passed_over(past: Sequence[Rollback], since: int) -> int:
    """The steps whose batches were passed over behind the checkpoint of step `since` or a later one."""
    return sum(each.skip for each in in_force(past) if each.to >= since)


def _remedy(
    found: Divergence,
    saved: Collection[int],
    healthy: Collection[int],
    past: Sequence[Rollback],
    folder: str,
    *,
    by_itself: bool,
) -> str:
    """What to do. `by_itself`: the run returns without being told to, where it does."""
    if found.step == 1:
        return (
            "No step has changed a weight before: those that the run began with are too large. Lower model.init_std, "
            "or mend the weights of train.init_from, and start again in another run.folder."
        )
    again = "Lower optim.learning_rate or lengthen optim.warmup_steps, and start again in another run.folder"
    if not healthy:
        return f"{'What is saved is from before' if saved else 'Nothing was saved'}. {again}."
    to = max(healthy)
    skip = found.step - to + _passed_over(past, to)  # a rollback by hand takes the place of those to this step
    else_by_itself = "" if by_itself else ' (divergence.then = "roll_back" does that by itself)'
    return (
        f"What is saved is from before. To go on from step {to} behind the batches that came then: "
        f"`colonnade rollback {folder} {to} --skip {skip}`, and the same command again{else_by_itself}. Or: "
        f"{again[0].lower()}{again[1:]}."
    )


def _made_again(found: Divergence, to: int, folder: str, changes: "Sequence[Change]") -> Iterator[str]:
    """Of each change between a checkpoint and the first sign, how to make another in its place."""
    for change in changes:
        if to <= change.at < found.first:
            keys = " ".join(f"{key}=VALUE" for key in change.values)
            yield (
                f" Behind step {change.at:,} was changed{change.asked}: {change}. Wherever the run goes on from, that "
                f"comes again. For other values there: `colonnade rollback {folder} {to}`, `colonnade change {folder} "
                f"{keys} --at {change.at}`, and the same command again."
            )


def lowered(rate: LearningRate, rollbacks: Sequence[Rollback]) -> LearningRate:
    """A learning rate with what rollbacks take off it."""

    def lower(step: int) -> float:
        factors = [each.rate_factor for each in rollbacks if each.to < step <= each.rate_until]
        ramps = [(step - each.to) / each.rewarm_steps for each in rollbacks if 0 < step - each.to < each.rewarm_steps]
        return rate(step) * math.prod(factors) * min(ramps, default=1.0)

    return lower
