"""What somebody who asks for a rollback may want of it: what is refused, and how it is written."""

import pytest

from colonnade.config.section import MOST
from colonnade.errors import ConfigError
from colonnade.train.rollback_options import RollbackOptions


@pytest.mark.parametrize(
    "asked",
    [
        RollbackOptions(),
        RollbackOptions(skip=MOST, rewarm=MOST),
        RollbackOptions(rate_factor=0.5, rate_steps=MOST),
        RollbackOptions(rate_factor=1e-9, rate_steps=1),
    ],
    ids=str,
)
def test_what_a_run_can_do_is_taken(asked: RollbackOptions) -> None:
    asked.check(4)


@pytest.mark.parametrize(
    ("asked", "step", "said"),
    [
        (RollbackOptions(skip=2), None, r"^--skip 2 says how to go on behind a rollback\. Give --rollback STEP too"),
        (RollbackOptions(rate_factor=0.0, rate_steps=1), 4, "^--rate-factor 0 would leave no learning rate"),
        (RollbackOptions(rate_factor=1.5, rate_steps=1), 4, r"^--rate-factor 1\.5 .* above 0 and of at most 1"),
        (RollbackOptions(skip=MOST + 1), 4, f"^--skip {MOST + 1} is more steps than a run can have"),
        (RollbackOptions(rate_factor=0.5, rate_steps=MOST + 1), 4, "^--rate-steps .* is more steps than a run can"),
        (RollbackOptions(rewarm=MOST + 1), 4, "^--rewarm .* is more steps than a run can have"),
        (RollbackOptions(rate_factor=0.5), 4, r"^--rate-factor 0\.5 and --rate-steps 0 go together"),
        (RollbackOptions(rate_steps=3), 4, "^--rate-factor 1 and --rate-steps 3 go together"),
    ],
)
def test_what_no_run_can_do_is_refused(asked: RollbackOptions, step: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asked.check(step)


def test_options_are_written_as_they_are_given() -> None:
    RollbackOptions().check(None)
    assert str(RollbackOptions()) == ""
    assert str(RollbackOptions(skip=1_234_567, rate_factor=0.123456789)) == ("--skip 1234567 --rate-factor 0.123456789")
    assert str(RollbackOptions(3, 0.5, 20, 7)) == "--skip 3 --rate-factor 0.5 --rate-steps 20 --rewarm 7"
