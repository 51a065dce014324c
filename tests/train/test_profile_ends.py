"""What a profile leaves behind it, who meets whom in a collective, and owners whose units are timed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from colonnade.mesh.clock import Clock, Span
from colonnade.train.profile import TimedOwner
from colonnade.train.profile_report import merged
from tests.train.test_profile import rank, step_with, watched


def test_steps_that_are_made_again_behind_a_profile_are_not_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a rollback: what was written is of one pass."""
    profile, mesh, state, told = watched(tmp_path, monkeypatch)
    monkeypatch.setattr("colonnade.train.profile.table", str)
    monkeypatch.setattr("colonnade.train.profile.merged", lambda ranks: (len(ranks), "trace"))
    for state.step in (2, 3, 2, 3):
        with profile.step(state):
            is_timed = mesh.ledger.clock is not None
        profile.finish(state.step + 1)
    assert not is_timed and [span.name for span in profile._clock.spans] == ["3", "4"]
    assert told.of("profiled") == [{"step": 4, "steps": [3, 4]}]


def test_a_rank_waits_for_those_of_its_own_group_alone() -> None:
    """Two tensor-parallel groups, of which the second one's last rank comes later than all others."""
    arrives = {0: 2.0, 1: 3.0, 2: 4.0, 3: 5.5}
    groups = {number: {"tp": [0, 1] if number < 2 else [2, 3]} for number in arrives}
    profile, _ = merged([rank(n, step_with(0.0, at, 6.0), groups=groups[n]) for n, at in arrives.items()])
    waits = [each["parts"].get("wait for tp", 0.0) for each in profile["ranks"]]
    assert waits == pytest.approx([1.0, 0.0, 1.5, 0.0])


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_step_lasts_until_the_last_of_its_ranks_is_done(last: int) -> None:
    """Whichever it is: a pipeline's first stages may be, since their backward passes come last."""
    ends = [12.0 if number == last else 10.0 for number in range(3)]
    profile, _ = merged([rank(n, [Span("step", "7", 1.0, -1, end)]) for n, end in enumerate(ends)])
    assert profile["gantt"]["seconds"] == pytest.approx(11.0)


def test_an_owner_that_is_timed_learns_which_units_come() -> None:
    """Under ZeRO it fetches their weights ahead."""
    expected: list[object] = []
    owner: Any = SimpleNamespace(expect=expected.append)
    TimedOwner(cast(Any, owner), Clock()).expect(["blocks.0", "head"])
    assert expected == [["blocks.0", "head"]]
