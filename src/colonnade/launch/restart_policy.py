"""Whether a run that has failed is started again, when, and on which places: told from how its attempts ended. Pure.

    Attempt      one start of a run, and how it ended
    decide       the decision behind the last of them, with its reason

A place is where a rank runs: a GPU, or a number where ranks have nothing of their own. Progress is a new checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from colonnade.config.numbers import counted
from colonnade.config.restarts import RestartsConfig

NO_RESTART = "no restart"
"""The event of a run that its supervisor has given up, or that has failed without one."""
LONGEST_WAIT = 600.0  # seconds
DOUBLINGS = 100  # of a wait: more no number may hold
TWICE = 2  # the same failure at the same place so often is no accident


class Kind(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    ASKED = "asked to stop"
    RECALLED = "recalled"
    """To try the whole layout again."""
    MISTAKE = "mistake"
    """What a user must mend: a configuration, a divergence, a disk that stays full."""
    KILLED = "killed"
    HUNG = "hung"
    RAISED = "raised"
    DEVICE = "device"
    """An error that a device or a connection reports."""
    OUT_OF_MEMORY = "out of memory"
    DISK = "disk refused"
    """What a disk may get over: the run has gone on before."""


ENDS = {
    Kind.DONE: "the run has ended",
    Kind.ASKED: "it was asked to stop",
    Kind.MISTAKE: "starting again would not mend this",
}
LOSES_A_PLACE = (Kind.KILLED, Kind.HUNG, Kind.DEVICE)
DETERMINED = (Kind.RAISED, Kind.OUT_OF_MEMORY)  # what the same state does again


@dataclass(frozen=True)
class Attempt:
    """One start of the run."""

    kind: Kind
    cause: str
    """In words."""
    step: int
    """The last that was made."""
    saved: int
    """The step of the newest checkpoint; 0 for none."""
    place: int | None = None
    """Of the rank that failed first, where one did."""
    noticed: float = 0.0
    """[seconds] When that was, of `time.monotonic`."""


@dataclass(frozen=True)
class Decision:
    """What comes next."""

    again: bool
    reason: str
    wait: float = 0.0
    """[seconds] Before it."""
    lost: int | None = None
    """A place that is not to be used."""


def decide(
    policy: RestartsConfig,
    attempts: Sequence[Attempt],
    once_lost: frozenset[int] = frozenset(),
    *,
    one_left: bool = False,
    disk_wait: float | None = None,
) -> Decision:
    """What comes after the last attempt. `once_lost`: places that were lost before, and are being tried again.
    `one_left`: all places but one are lost, and so this one cannot be. `disk_wait` [seconds]: until a disk that refuses
    is tried again; None: it has been for too long.
    """
    last = attempts[-1]
    if last.kind in ENDS:
        return Decision(False, ENDS[last.kind])
    if last.kind == Kind.RECALLED:
        return Decision(True, "the ranks that were lost are tried again")
    if not policy.limit:
        return Decision(False, "restarts.limit = 0")
    since = f"step {last.saved}" if last.saved else "the beginning"
    if last.kind == Kind.DISK:
        if disk_wait is None:
            return Decision(False, "its disk has refused for longer than checkpoint.retry_for")
        return Decision(True, f"what its disk refuses is waited out, to go on from {since}", disk_wait)
    row = _without_progress(attempts)
    if len(row) > policy.limit:
        return Decision(
            False,
            f"it was restarted {counted(policy.limit, 'time')} in a row without a new checkpoint (restarts.limit)",
        )
    if last.kind in DETERMINED and _same(row):
        return Decision(False, f"the same happened before, after step {last.step}: it would happen again")
    if last.kind == Kind.OUT_OF_MEMORY and last.step <= last.saved:
        return Decision(False, "memory did not suffice for the first step already")
    lost = None if one_left else _lost(policy, row, once_lost)
    tries = f"restart {len(row)} of {policy.limit} without a new checkpoint"
    gone = "" if lost is None else f"; its place, {lost}, counts as lost"
    return Decision(True, f"{tries}, from {since}{gone}", _wait(policy, len(row)), lost)


def _without_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The last attempts, those after which the newest checkpoint was the same."""
    row: list[Attempt] = []
    for attempt in reversed(attempts):
        if attempt.saved != attempts[-1].saved:
            break
        if attempt.kind not in (Kind.RECALLED, Kind.DISK):
            row.insert(0, attempt)
    return row


def _same(row: Sequence[Attempt]) -> bool:
    """Whether the last attempts ended alike at the same step."""
    last = row[-TWICE:]
    return len(last) == TWICE and len({(each.kind, each.cause, each.step) for each in last}) == 1


def _lost(policy: RestartsConfig, row: Sequence[Attempt], once_lost: frozenset[int]) -> int | None:
    """The place whose rank fails again and again."""
    last = row[-TWICE:]
    place = row[-1].place
    if not policy.fewer_ranks or place is None or row[-1].kind not in LOSES_A_PLACE:
        return None
    again = len(last) == TWICE and all(each.place == place and each.kind in LOSES_A_PLACE for each in last)
    return place if again or place in once_lost else None


def _wait(policy: RestartsConfig, tries: int) -> float:
    return 0.0 if tries <= 1 else min(LONGEST_WAIT, policy.backoff * 2.0 ** min(tries - 2, DOUBLINGS))
