"""What a run that goes on does otherwise than before: said in a line, never silently."""

from collections.abc import Sequence
from pathlib import Path

from colonnade.config.compare import difference, value_at
from colonnade.config.schema import Config
from colonnade.train.rollback import Rollback
from colonnade.train.run_folder import configuration_of
from colonnade.train.state import decay_begin, learning_rate_of

DECAY = "optim.decay_steps"


def changes(checkpoint: Path, config: Config) -> list[str]:
    """A line for each key whose value is not that with which the checkpoint was written."""
    before = configuration_of(checkpoint)
    return [] if before is None else difference(before, config)


def what_changed(checkpoint: Path, config: Config, step: int, rollbacks: Sequence[Rollback]) -> list[str]:
    """What to tell who goes on from `step`, with these rollbacks: all keys that changed in one line, and another curve
    of the learning rate in another.
    """
    before = configuration_of(checkpoint)
    if before is None:
        return [f"{checkpoint} has no readable config.toml: whether keys have changed since is unknown."]
    lines = difference(before, config)
    return [*([f"Changed since: {'; '.join(lines)}."] if lines else []), *other_curve(before, config, step, rollbacks)]


def other_curve(before: Config, now: Config, step: int, rollbacks: Sequence[Rollback]) -> list[str]:
    """Where the learning rate of who goes on from `step` leaves the curve that it had, in a line; nothing if nowhere.

    Rates that are written alike are no difference: within the warm-up all curves are one.
    """
    old_end, new_end = value_at(before, DECAY), value_at(now, DECAY)
    if old_end == new_end or None in (old_end, new_end):  # no step ends a constant rate, or a decay by tokens
        return []
    was, will_be = (learning_rate_of(each, rollbacks) for each in (before, now))
    for at in _may_differ(before, now, step, rollbacks):
        old, new = f"{was(at):.3g}", f"{will_be(at):.3g}"
        if old != new:
            return [
                f"The learning rate follows another curve from step {at} on: its decay ends at step {new_end} instead "
                f"of {old_end}, so that step {at} has {new} and not {old}. Set {DECAY} = {old_end} to keep the curve."
            ]
    return []


def _may_differ(before: Config, now: Config, step: int, rollbacks: Sequence[Rollback]) -> range:
    """The steps behind `step` of which the rates may be others: where the decay has another end and nothing else is
    changed, not those before it begins, nor those behind both ends.
    """
    one, other = (each.optim.model_copy(update={"decay_steps": None}) for each in (before, now))
    if one != other or before.optim.warmup != now.optim.warmup:
        return range(step + 1, now.train.steps + 1)
    if now.optim.decay == "constant":
        return range(0)
    ends = max(each.optim.decay_end(each.train.steps) for each in (before, now))
    first = min(decay_begin(each, rollbacks) for each in (before, now))
    return range(max(step, first) + 1, min(now.train.steps, ends) + 1)
