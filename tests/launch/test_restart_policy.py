"""Whether a failed run is started again: pure decisions, with their reasons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.restarts import RestartsConfig
from colonnade.launch.restart_policy import LONGEST_WAIT, Attempt, Kind, decide

POLICY = RestartsConfig(limit=3, backoff=5.0)


def killed(saved: int, *, place: int = 0, step: int | None = None) -> Attempt:
    return Attempt(Kind.KILLED, f"rank {place} was killed", saved + 2 if step is None else step, saved, place)


def raised(cause: str, step: int, saved: int = 10, kind: Kind = Kind.RAISED) -> Attempt:
    return Attempt(kind, cause, step, saved, 0)


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.ASKED, Kind.MISTAKE])
def test_what_nobody_restarts(kind: Kind) -> None:
    assert not decide(POLICY, [Attempt(kind, "", 12, 10)]).again


def test_the_first_comes_at_once_and_later_ones_wait_longer_and_longer() -> None:
    attempts = [killed(10, place=place) for place in (0, 1, 2)]
    waits = [decide(POLICY, attempts[:n]).wait for n in (1, 2, 3)]
    assert waits == [0.0, 5.0, 10.0]
    assert decide(POLICY, attempts[:1]).reason == "restart 1 of 3 without a new checkpoint, from step 10"
    assert decide(POLICY, [killed(0)]).reason.endswith(", from the beginning")


def test_no_wait_is_longer_than_ten_minutes() -> None:
    policy, attempts = RestartsConfig(limit=1000, backoff=5.0), [killed(10, place=place) for place in range(20)]
    assert [decide(policy, attempts[:n]).wait for n in (8, 9, 20)] == [320.0, 600.0, 600.0]
    assert decide(RestartsConfig(limit=3000, backoff=5.0), attempts * 100).wait == 600.0


def test_restarts_without_progress_end_and_progress_begins_anew() -> None:
    stuck = [killed(10, place=place) for place in (0, 1, 2, 3)]
    assert not decide(POLICY, stuck).again and "3 times in a row" in decide(POLICY, stuck).reason
    assert decide(POLICY, [*stuck[:3], killed(20)]).again
    assert decide(POLICY, [*stuck[:3], killed(20)]).wait == 0.0
    assert not decide(RestartsConfig(limit=0), [killed(10)]).again


def test_the_same_error_at_the_same_step_is_no_accident() -> None:
    assert decide(POLICY, [raised("ValueError: x", 12)]).again
    assert not decide(POLICY, [raised("ValueError: x", 12), raised("ValueError: x", 12)]).again
    assert decide(POLICY, [raised("ValueError: x", 12), raised("ValueError: x", 13)]).again
    assert decide(POLICY, [raised("ValueError: x", 12), raised("KeyError: y", 12)]).again
    assert decide(POLICY, [killed(10), killed(10)]).again


def test_memory_is_tried_twice_but_not_for_a_first_step() -> None:
    short = raised("MemoryShortError: rank 0", 12, kind=Kind.OUT_OF_MEMORY)
    assert decide(POLICY, [short]).again and not decide(POLICY, [short, short]).again
    assert not decide(POLICY, [raised("MemoryShortError: rank 0", 10, kind=Kind.OUT_OF_MEMORY)]).again


def test_a_place_that_fails_twice_is_lost_and_one_that_came_back_at_once() -> None:
    assert decide(POLICY, [killed(10, place=3)]).lost is None
    assert decide(POLICY, [killed(10, place=3), killed(10, place=3)]).lost == 3
    assert decide(POLICY, [killed(10, place=3)] * 2).reason.endswith(", from step 10; its place, 3, counts as lost")
    assert "lost" not in decide(POLICY, [killed(10, place=3)]).reason
    assert decide(POLICY, [killed(10, place=3), killed(10, place=2)]).lost is None
    assert decide(POLICY, [killed(10, place=3), killed(20, place=3)]).lost is None, "there was progress"
    assert decide(POLICY, [killed(10, place=place) for place in (0, 1, 1)]).lost == 1, "the last two count"
    assert decide(POLICY, [killed(10, place=place) for place in (1, 1, 0)]).lost is None
    assert decide(POLICY, [raised("ValueError: x", 12), killed(10)]).lost is None, "one was the program's own"
    assert decide(POLICY, [killed(10, place=3)], frozenset({3})).lost == 3
    assert decide(RestartsConfig(fewer_ranks=False), [killed(10, place=3), killed(10, place=3)]).lost is None


def test_the_last_place_is_never_lost_and_is_tried_as_often_as_may_be() -> None:
    failed = [killed(10, place=3)] * 4
    decided = [decide(POLICY, failed[:n], frozenset({3}), one_left=True) for n in (1, 2, 3, 4)]
    assert [(each.again, each.lost) for each in decided] == [(True, None)] * 3 + [(False, None)]
    assert decided[1].reason == "restart 2 of 3 without a new checkpoint, from step 10"


@pytest.mark.parametrize("kind", list(Kind))
def test_what_a_machine_does_to_a_rank_twice_loses_its_place(kind: Kind) -> None:
    """And not what its program does, or somebody asks for."""
    failed = [Attempt(kind, f"once, {step}", step, 10, 3) for step in (12, 13)]
    lost = kind in (Kind.KILLED, Kind.HUNG, Kind.DEVICE)
    assert decide(POLICY, failed).lost == (3 if lost else None)


def test_a_recall_is_no_failure() -> None:
    recalled = Attempt(Kind.RECALLED, "", 30, 30)
    assert decide(POLICY, [killed(10), recalled]).again
    assert decide(POLICY, [killed(30, place=1), recalled, killed(30, place=3)]).wait == 5.0


@given(
    st.lists(st.tuples(st.sampled_from(list(Kind)), st.integers(0, 3), st.integers(0, 2)), min_size=1),
    st.integers(0, 4),
)
def test_it_always_ends(history: list[tuple[Kind, int, int]], limit: int) -> None:
    """No more than `limit` restarts in a row stand at one checkpoint, but for those behind a recall or what a disk
    refuses, which has an end of its own; and waits stay bounded.
    """
    saved, attempts = 0, []
    for kind, progress, place in history:
        saved += progress
        attempts.append(Attempt(kind, "x", saved + 1, saved, place))
    found = decide(RestartsConfig(limit=limit), attempts)
    assert 0 <= found.wait <= LONGEST_WAIT and found.reason
    row = 0
    for attempt in reversed(attempts):
        if attempt.saved != saved:
            break
        row += attempt.kind not in (Kind.RECALLED, Kind.DISK)
    if row > limit and attempts[-1].kind != Kind.RECALLED:
        assert not found.again
