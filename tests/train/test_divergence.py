"""What counts as a divergence, and where a run returns to: pure functions of what all ranks have alike."""

import math
import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.check import check
from colonnade.config.schema import DivergenceConfig
from colonnade.errors import ColonnadeError
from colonnade.train import divergence
from colonnade.train.change import Change
from colonnade.train.divergence import Divergence, LossWatch, lowered
from colonnade.train.rollback import Rollback
from tests.parity.runs import SERIAL, Case, configured

POLICY = DivergenceConfig(then="roll_back", spike=10.0, window=20, patience=3, healthy_for=4, tries=2)


def seen(
    watch: LossWatch, losses: Sequence[float | None], policy: DivergenceConfig = POLICY, first: int = 1
) -> list[Divergence]:
    found = [watch.sees(policy, first + at, loss, 1.0, skipped=False) for at, loss in enumerate(losses)]
    return [each for each in found if each is not None]


def steady(count: int) -> list[float]:
    """Losses of a run that does well: about 3, a little lower each step."""
    draw = random.Random(0)
    return [3.0 - 0.002 * step + draw.gauss(0, 0.03) for step in range(count)]


@pytest.mark.parametrize(
    ("loss", "grad_norm", "skipped", "goes_on"),
    [
        (1.0, 1.0, False, True),
        (1.0, math.inf, True, True),
        (1.0, math.inf, False, False),
        (math.nan, 1.0, False, False),
        (math.nan, math.nan, True, False),
    ],
)
def test_what_is_not_finite_is_a_divergence_but_an_overflow(
    loss: float, grad_norm: float, skipped: bool, goes_on: bool
) -> None:
    """Of gradients, in a step that is skipped. A loss that is none has no such excuse. No window is needed."""
    found = LossWatch().sees(DivergenceConfig(), 3, loss, grad_norm, skipped=skipped)
    assert found == (None if goes_on else Divergence(3, 3, f"has loss {loss} and gradient norm {grad_norm}"))


def test_a_steady_run_shows_no_sign() -> None:
    watch = LossWatch()
    assert seen(watch, steady(300)) == [] and watch.signs == 0 and len(watch.losses) == POLICY.window


def test_losses_far_above_those_before_are_one_when_patience_is_up() -> None:
    watch = LossWatch()
    assert seen(watch, [*steady(50), 9.0, 8.0]) == [] and watch.signs == 2
    (found,) = seen(watch, [7.0], first=53)
    assert (found.step, found.first) == (53, 51)
    assert found.reason.startswith("has loss 7, which and those since step 51 exceed ")
    assert max(watch.losses) < 4, "signs are not what others are held against"


def test_a_single_high_loss_is_passed() -> None:
    watch = LossWatch()
    assert seen(watch, [*steady(50), 9.0, 9.0, 2.9, 9.0, 9.0, 2.9]) == [] and watch.signs == 0


def test_a_step_in_which_no_label_counts_is_no_loss_to_hold_others_against() -> None:
    """Half of the window were zeros, and its median with it: each loss exceeded it."""
    watch = LossWatch()
    assert seen(watch, [each for loss in steady(60) for each in (None, loss)]) == []
    assert len(watch.losses) == POLICY.window and min(watch.losses) > 2


def test_a_step_in_which_no_label_counts_neither_is_a_sign_nor_ends_their_row() -> None:
    watch = LossWatch()
    assert seen(watch, [*steady(50), 9.0, None, None, 9.0, None, None, None]) == []
    (found,) = seen(watch, [7.0], first=58)
    assert (found.step, found.first) == (58, 51)
    assert seen(watch, [2.9, 9.0, None]) == [] and (watch.signs, watch.without_loss) == (1, 1)


def test_steps_in_which_no_label_counts_are_no_signs_before_the_first() -> None:
    (found,) = seen(LossWatch(), [2.9, None, None, None, math.nan])
    assert (found.step, found.first) == (5, 5)


def test_gradients_that_are_no_numbers_are_told_where_no_label_counts() -> None:
    found = LossWatch().sees(POLICY, 3, None, math.inf, skipped=False)
    assert found == Divergence(3, 3, "has no label that counts and gradient norm inf")


def test_without_a_full_window_or_a_spike_nothing_is_told() -> None:
    assert seen(LossWatch(), [*steady(10), *[9.0] * 9]) == []
    assert seen(LossWatch(), [*steady(50), *[9.0] * 9], DivergenceConfig(spike=0.0, window=20, patience=3)) == []


def test_the_limit_is_the_median_and_so_many_deviations() -> None:
    """Of 1, 2, … 20 the median is 10.5, and the median of the distances from it 5."""
    policy = DivergenceConfig(spike=2.0, window=20, patience=1)
    limit = 10.5 + 2.0 * 1.4826 * 5.0
    losses = [float(loss) for loss in range(1, 21)]
    assert LossWatch(losses, 0).sees(policy, 21, limit, 1.0, skipped=False) is None
    assert LossWatch(losses, 0).sees(policy, 21, limit + 1e-9, 1.0, skipped=False) is not None


def test_losses_that_hardly_vary_make_no_spike_of_a_trifle() -> None:
    policy = DivergenceConfig(spike=10.0, window=20, patience=1)
    assert LossWatch([2.0] * 20, 0).sees(policy, 21, 2.2, 1.0, skipped=False) is None
    assert LossWatch([2.0] * 20, 0).sees(policy, 21, 2.2 + 1e-9, 1.0, skipped=False) is not None


def test_signs_before_a_loss_that_is_no_number_count() -> None:
    watch = LossWatch()
    seen(watch, [*steady(50), 9.0, 9.0])
    found = watch.sees(POLICY, 53, math.nan, 1.0, skipped=False)
    assert found == Divergence(53, 51, "has loss nan and gradient norm 1.0")


@given(st.lists(st.floats(0.1, 100.0), max_size=60), st.integers(0, 60))
def test_a_watch_that_is_saved_and_read_goes_on_alike(losses: list[float], at: int) -> None:
    whole, first = LossWatch(), LossWatch()
    told = seen(whole, losses)
    before = seen(first, losses[:at])
    second = LossWatch(list(first.losses), first.signs)
    assert before + seen(second, losses[at:], first=1 + len(losses[:at])) == told
    assert second == whole


def decide(found: Divergence, saved: list[int], past: list[Rollback], policy: DivergenceConfig) -> Rollback:
    return divergence.decide(found, saved, past, policy, folder="runs/mine")


# --- where to ---------------------------------------------------------------------------------------------------------


def test_the_newest_that_was_followed_by_enough_healthy_steps() -> None:
    """The sign is step 100: what is saved after step 96 has three steps behind it, 95 has four."""
    found = Divergence(102, 100, "has loss 9")
    assert decide(found, [80, 90, 95, 96, 100], [], POLICY) == Rollback(
        to=95, detected=102, skip=7, reason="step 102 has loss 9"
    )
    assert decide(found, [80, 96], [], POLICY).to == 80
    assert decide(found, [99], [], POLICY.model_copy(update={"healthy_for": 0})).to == 99


def test_returns_to_an_earlier_checkpoint_that_passed_this_one_count_too() -> None:
    past = [Rollback(to=80, detected=99), Rollback(to=80, detected=101)]
    assert "It has returned 2 times already" in refused(Divergence(110, 108, "x"), [80, 95], past)
    assert decide(Divergence(130, 128, "x"), [80, 110], past, POLICY).to == 110, "they did not come so far"


def test_a_change_that_would_come_again_is_named_with_what_takes_its_place() -> None:
    """To pass over batches does not help where the change has made the run diverge."""
    found, policy = Divergence(54, 52, "has loss 9"), POLICY.model_copy(update={"then": "stop"})
    values = {"optim.learning_rate": 300.0, "optim.weight_decay": 0.0}
    changes = [Change(at=at, values=values, was={}, line="", reason="typo") for at in (39, 40, 51, 52)]
    with pytest.raises(ColonnadeError) as told:
        divergence.decide(found, [20, 40, 51], [], policy, folder="runs/mine", changes=changes)
    assert str(told.value).endswith(
        " Behind step 51 was changed (typo): optim.learning_rate = 300.0, optim.weight_decay = 0.0. Wherever the run "
        "goes on from, that comes again. For other values there: `colonnade rollback runs/mine 40`, `colonnade change "
        "runs/mine optim.learning_rate=VALUE optim.weight_decay=VALUE --at 51`, and the same command again."
    )
    assert re.findall("Behind step [0-9]+", str(told.value)) == ["Behind step 40", "Behind step 51"]


def test_the_learning_rate_is_lowered_for_a_while_and_more_with_each_try() -> None:
    policy = POLICY.model_copy(update={"skip_batches": False, "rate_factor": 0.5, "rate_steps": 10})
    first = decide(Divergence(102, 100, "x"), [90], [], policy)
    assert (first.skip, first.rate_factor, first.rate_until) == (0, 0.5, 112)
    second = decide(Divergence(105, 104, "x"), [90], [first], policy)
    rate = lowered(lambda step: float(step), [first, second])
    assert [rate(step) for step in (90, 91, 112, 113, 115, 116)] == [90, 91 / 4, 28, 113 / 2, 115 / 2, 116]


def refused(found: Divergence, saved: list[int], past: list[Rollback], policy: DivergenceConfig = POLICY) -> str:
    with pytest.raises(ColonnadeError) as told:
        decide(found, saved, past, policy)
    return str(told.value)


def test_a_run_that_is_to_stop_says_how_to_return_by_hand() -> None:
    found = Divergence(102, 102, "has loss nan and gradient norm 1.0")
    told = refused(found, [80, 90], [], DivergenceConfig(healthy_for=5))
    assert told.startswith("step 102 has loss nan and gradient norm 1.0: the run has diverged. What is saved is from")
    assert "`colonnade rollback runs/mine 90 --skip 12`" in told
    assert "Lower" not in told and "lower optim.learning_rate" in told
    again = "Lower optim.learning_rate or lengthen optim.warmup_steps, and start again in another run.folder."
    for saved, what in (([], "Nothing was saved."), ([99], "What is saved is from before.")):
        told = refused(found, saved, [], DivergenceConfig(healthy_for=5))
        assert told == f"step 102 {found.reason}: the run has diverged. {what} {again}"


@pytest.mark.parametrize("policy", [DivergenceConfig(), POLICY], ids=["stops", "rolls back"])
def test_at_the_first_step_the_weights_that_a_run_began_with_are_too_large(policy: DivergenceConfig) -> None:
    found = Divergence(1, 1, "has loss nan and gradient norm nan")
    assert refused(found, [], [], policy) == (
        "step 1 has loss nan and gradient norm nan: the run has diverged. No step has changed a weight before: those "
        "that the run began with are too large. Lower model.init_std, or mend the weights of train.init_from, and "
        "start again in another run.folder."
    )


def test_batches_that_were_passed_over_behind_the_checkpoint_are_not_taken_again() -> None:
    """A rollback by hand takes the place of those to its step, and the run's own comes behind them."""
    found, stop = Divergence(102, 100, "x"), POLICY.model_copy(update={"then": "stop"})
    same, later, before = Rollback(to=90, skip=5), Rollback(to=95, skip=4), Rollback(to=80, skip=7)
    for past, by_itself, by_hand in (
        ([before, same], 12, 17),
        ([before, later], 12 + 4, 16),
        ([before, same, later], 12 + 4, 21),
        ([before, later, same], 12, 17),  # the later one was of a course that has been left
        ([later, before], 12, 12),
        ([same, same], 12, 12 + 5 + 5),  # the second has come behind the first
    ):
        assert decide(found, [80, 90], past, POLICY).skip == by_itself
        assert f"90 --skip {by_hand}`" in refused(found, [80, 90], past, stop)
    taken_again = POLICY.model_copy(update={"skip_batches": False})
    assert decide(found, [80, 90], [later], taken_again).skip == 0


def test_a_bounded_number_of_tries_from_the_same_place() -> None:
    found, back = Divergence(102, 100, "x"), [Rollback(to=90, detected=94), Rollback(to=90, detected=101)]
    assert "It has returned 2 times already, which is divergence.tries" in refused(found, [90], back)
    assert "does that by itself" not in refused(found, [90], back), "it is set"
    stop = POLICY.model_copy(update={"then": "stop"})
    assert '(divergence.then = "roll_back" does that by itself)' in refused(found, [90], back, stop)
    assert decide(found, [90], back[:1], POLICY).to == 90
    assert decide(found, [96, 95], back, POLICY).to == 95, "one of them was passed"
    by_hand = [Rollback(to=90), Rollback(to=90)]
    assert decide(found, [90], by_hand, POLICY).to == 90, "what somebody asked for is no try"


def test_no_healthy_checkpoint_is_told_with_what_there_is() -> None:
    found = Divergence(102, 100, "x")
    told = refused(found, [96, 98], [])
    assert "healthy_for = 4 steps between it and step 100" in told and "the oldest of 2 is of step 96" in told
    assert "there is none. Lower" in refused(found, [], [])


def test_warming_up_again_behind_a_rollback() -> None:
    rate = lowered(lambda step: 8.0, [Rollback(to=10, rewarm_steps=4), Rollback(to=12, rewarm_steps=2)])
    assert [rate(step) for step in (9, 10, 11, 12, 13, 14, 15)] == [8.0, 8.0, 2.0, 4.0, 4.0, 8.0, 8.0]
    assert str(Rollback(to=10, rewarm_steps=4)) == "take the same batches, warming up again in 4 steps"
    found = divergence.decide(
        Divergence(30, 28, "has"), [10], [], POLICY.model_copy(update={"rewarm_steps": 5}), folder="runs/r"
    )
    assert found.rewarm_steps == 5


@pytest.mark.parametrize(("every", "keep"), [(1, 8), (3, 4), (6, 3), (7, 2), (8, 2)])
def test_as_many_checkpoints_are_kept_as_a_run_needs_that_diverges_right_after_a_save(every: int, keep: int) -> None:
    """Seven steps back: with one more than those that may be too young, one is old enough."""
    run = configured(Case(), SERIAL)

    def told(number: int) -> str:
        saves = run.checkpoint.model_copy(update={"every": every, "keep": number})
        config = run.model_copy(update={"divergence": POLICY, "checkpoint": saves})
        return " ".join(each.message for each in check(config) if "divergence.healthy_for" in each.keys)

    assert told(keep) == ""
    assert "= 4 + 3 = 7 steps old" in told(keep - 1) and f"Set checkpoint.keep = {keep}, or" in told(keep - 1)
