"""Thermometers that grow: what counts as growth, what does not, and a run that returns because of it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colonnade.config.check import check
from colonnade.config.schema import DivergenceConfig
from colonnade.config.thermometers import ThermometersConfig
from colonnade.train import loop
from colonnade.train.divergence import Divergence, LossWatch
from colonnade.train.growth import WINDOWS
from colonnade.train.thermometers import Activations, Reading
from tests.commands import forked
from tests.parity.runs import SERIAL, Case, configured
from tests.runs import events

POLICY = DivergenceConfig(growth=4.0, growth_steps=80, growth_after=0)  # windows of ten steps
assert loop, "imported once, here, and not by every forked rank"


def reading(step: int, largest: float, site: str = "attention_logits") -> Reading:
    calm = Activations(-1.0, 1.0, 0.5, 0.0, 0.0, 0.0)
    found = calm._replace(minimum=-largest) if math.isfinite(largest) else calm._replace(non_finite=0.5)
    return Reading(step, ((("blocks.0", "residual_stream"), calm), (("blocks.3", site), found)), ())


def first_sign(values: dict[int, float], site: str = "attention_logits") -> Divergence | None:
    """What a run shows whose thermometer reads so at these steps."""
    watch = LossWatch()
    for step, value in values.items():
        found = watch.sees(POLICY, step, 3.0, 1.0, skipped=False, reading=reading(step, value, site))
        watch = LossWatch(**json.loads(json.dumps(vars(watch))))  # as a checkpoint keeps it
        if found is not None:
            return found
    return None


def growing(to: float, steps: int = 200) -> dict[int, float]:
    """From 2 by the same factor at every step."""
    return {step: 2.0 * to ** (step / steps) for step in range(5, steps + 1, 5)}


def test_slow_growth_is_found_with_its_place_and_its_beginning() -> None:
    found = first_sign(growing(32.0**1.25))
    assert found is not None and (found.step, found.first) == (90, 10)
    assert found.reason.startswith("has blocks.3 attention_logits of at least 11.31 for 10 steps, 5.")
    assert found.reason.endswith("times what it was at step 9 (divergence.growth = 4)")


def test_a_reading_that_is_not_finite_hides_no_growth() -> None:
    found = first_sign({**growing(32.0**1.25), 45: math.inf})
    assert found is not None and (found.step, found.first) == (90, 10)


def test_growth_by_less_and_a_level_that_is_high_are_none() -> None:
    assert first_sign(growing(8.0)) is None
    assert first_sign(dict.fromkeys(range(5, 400, 5), 1000.0)) is None


def test_as_much_as_is_allowed_is_none_and_more_is_one() -> None:
    """Also from nothing, and where windows are no whole number of steps."""

    def rising(first: float, then: float) -> dict[int, float]:
        return {step: first if step < 10 else then for step in range(5, 101, 5)}

    assert first_sign(rising(2.0, 8.0)) is None
    found = first_sign(rising(2.0, 8.001))
    assert found is not None and (found.step, found.first) == (90, 10)
    watch, zero = LossWatch(), Activations(0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    for step, value in rising(0.0, 0.5).items():
        at = Reading(step, ((("blocks.0", "residual_stream"), zero._replace(maximum=value)),), ())
        found = watch.sees(POLICY, step, 3.0, 1.0, skipped=False, reading=at)
        assert (found is not None) == (step == 90)
        assert found is None or "inf times what it was at step 9" in found.reason
    policy, watch = POLICY.model_copy(update={"growth_steps": 20}), LossWatch()
    every = [
        watch.sees(policy, step, 3.0, 1.0, skipped=False, reading=reading(step, 1.0 if step <= 2 else 9.0))
        for step in range(1, 26)
    ]
    (told, *_) = (each for each in every if each is not None)
    assert (told.step, told.first) == (23, 3), "window 0 of 2.5 steps has steps 1 and 2"
    assert "9 times what it was at step 2" in told.reason


def test_windows_of_another_growth_steps_are_left() -> None:
    """Their numbers mean other steps. A checkpoint of before they were told apart has them without growth_steps."""
    watch_before = LossWatch()
    for step, value in ((45, 2.0), (55, 3.0)):
        watch_before.sees(POLICY, step, 3.0, 1.0, skipped=False, reading=reading(step, value))
    longer = POLICY.model_copy(update={"growth_steps": 100})

    def seen(watch: LossWatch, policy: DivergenceConfig) -> list[tuple[int, float]]:
        watch.sees(policy, 60, 3.0, 1.0, skipped=False, reading=reading(60, 7.0))
        return watch.windows["blocks.3 attention_logits"]

    kept = [(4, 2.0), (5, 3.0)]
    assert seen(replace(watch_before), POLICY) == [*kept, (6, 7.0)]
    assert seen(replace(watch_before), longer) == [(4, 7.0)]
    assert seen(replace(watch_before, growth_steps=None), longer) == [*kept, (4, 7.0)]


def test_of_several_the_one_that_has_grown_most_is_told() -> None:
    policy = POLICY.model_copy(update={"growth": 2.0})

    def sign(first: float, second: float) -> str:
        watch = LossWatch()
        for step in range(5, 101, 5):
            large = [first, second] if step >= 10 else [1.0, 1.0]
            found = [Activations(-each, each, 0.5, 0.0, 0.0, 0.0) for each in large]
            units = [("blocks.1", "residual_stream"), ("blocks.2", "cross_attention_logits")]
            told = watch.sees(
                policy, step, 3.0, 1.0, skipped=False, reading=Reading(step, tuple(zip(units, found, strict=True)), ())
            )
            if told is not None:
                return told.reason
        return ""

    assert sign(9.0, 3.0).startswith("has blocks.1 residual_stream of at least 9 for 10 steps, 9 times")
    assert sign(3.0, 9.0).startswith("has blocks.2 cross_attention_logits of at least 9 for 10 steps, 9 times")
    assert sign(1.0, 3.0).startswith("has blocks.2 cross_attention_logits of at least 3 ")


def test_single_readings_move_nothing() -> None:
    """Whatever their size, and if they are not finite: the loss tells of that."""
    steady = dict.fromkeys(range(5, 400, 5), 2.0)
    assert first_sign({**steady, 200: 500.0, 225: math.inf, 300: 1e30}) is None
    assert first_sign({**dict.fromkeys(range(5, 400, 10), 2.0), 205: math.inf}) is None, "alone in its window"
    assert first_sign({**steady, **dict.fromkeys(range(200, 205), 9.0)}) is None
    found = first_sign({**steady, **dict.fromkeys(range(200, 300), 9.0)})
    assert found is not None and found.step == 210


def test_in_the_beginning_everything_may_grow() -> None:
    policy, watch = POLICY.model_copy(update={"growth_after": 100}), LossWatch()
    found = [
        watch.sees(policy, step, 3.0, 1.0, skipped=False, reading=reading(step, value))
        for step, value in growing(32.0**1.25).items()
    ]
    assert [each.step for each in found if each is not None] == [190, 200]


def test_only_what_shows_a_divergence_is_watched() -> None:
    assert first_sign(growing(1000.0), "mlp_hidden") is None
    assert first_sign(growing(1000.0), "residual_stream") is not None


def test_what_is_no_longer_measured_is_forgotten() -> None:
    """And is no sign, however it grew when it was last seen."""
    watch = LossWatch()
    for step, value in growing(32.0**1.25).items():
        if step < 90:
            assert watch.sees(POLICY, step, 3.0, 1.0, skipped=False, reading=reading(step, value)) is None
    calm = reading(95, 1.0, "mlp_hidden")
    assert watch.sees(POLICY, 95, 3.0, 1.0, skipped=False, reading=calm) is None
    assert list(watch.windows) == ["blocks.0 residual_stream"]


def test_only_windows_that_are_still_compared_are_kept() -> None:
    """However long the run is: every checkpoint has them."""
    watch = LossWatch()
    for step in range(5, 2000, 5):
        watch.sees(POLICY, step, 3.0, 1.0, skipped=False, reading=reading(step, 2.0))
    assert {len(each) for each in watch.windows.values()} == {WINDOWS + 2}


def test_nothing_is_kept_where_growth_is_no_sign() -> None:
    watch = LossWatch()
    watch.sees(DivergenceConfig(), 10, 3.0, 1.0, skipped=False, reading=reading(10, 2.0))
    assert watch.windows == {}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"growth": 4.0}, "thermometers.every = 0: none is read. Set thermometers.every = 10"),
        ({"growth": 4.0, "growth_steps": 40, "every": 10}, "would be windows without a reading. Use at most 5, or a"),
        ({"growth": 4.0, "growth_steps": 40, "every": 6}, "thermometers.every = 6 is more than an eighth of"),
        ({"growth": 4.0, "growth_steps": 40, "every": 5}, None),
        ({"growth": 4.0, "then": "roll_back", "every": 10}, "healthy_for + growth_steps = 20 + 2000 = 2020 steps old"),
        (
            {"growth": 4.0, "then": "roll_back", "every": 10, "patience": 3000},
            "healthy_for + patience = 20 + 3000 = 3020 steps old",
        ),
        ({"growth": 1.0, "every": 10}, "divergence.growth = 1 is no growth"),
        ({"growth": 4.0, "every": 10}, None),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], problem: str | None) -> None:
    every = options.pop("every", 0)
    config = configured(Case(), SERIAL).model_copy(
        update={"divergence": DivergenceConfig(**options), "thermometers": ThermometersConfig(every=every)}
    )
    told = " ".join(each.message for each in check(config) if "divergence.growth" in each.keys)
    assert (problem is None and not told) or (problem is not None and problem in told)


def planted(rank: int) -> None:
    """From step 16 on the learning rate is so high that the residual stream grows."""
    step = loop.train_step

    def train_step(state: Any, *arguments: Any, **more: Any) -> Any:
        before = state.learning_rate
        if state.step >= 15 and not state.rollbacks:
            state.learning_rate = lambda number: 0.5
        try:
            return step(state, *arguments, **more)
        finally:
            state.learning_rate = before

    loop.train_step = train_step  # type: ignore[assignment]


@pytest.mark.slow
def test_a_run_returns_alike_on_every_layout(config: Path, tmp_path: Path) -> None:
    told = []
    for layout in ("parallel.tp=1", "parallel.tp=2"):
        run = tmp_path / layout
        answer = forked(
            *("train", config, f"run.folder={run}", "train.steps=32", "train.precision=fp64", "train.evaluate_every=0"),
            *(
                "checkpoint.keep=8",
                "thermometers.every=1",
                "divergence.growth=9",
                "divergence.growth_steps=8",
                "divergence.growth_after=7",
            ),
            *("divergence.then=roll_back", "divergence.healthy_for=2", layout),
            first=planted,
            num_ranks=int(layout[-1]),
        )
        assert answer.status == 0, answer.out[-1500:]
        told.append([each for each in events(run) if each["event"] in ("diverged", "rolled back")])
        for each in told[-1]:
            del each["time"]
            each.pop("id", None)  # what only this rollback has
        steps = [json.loads(line)["step"] for line in (run / "thermometers.jsonl").read_text().splitlines()]
        assert steps == list(range(1, 33))
    assert told[0] == told[1]
    (diverged, back) = told[0]
    assert 17 < diverged["step"] <= 25 and back["to"] < 16
