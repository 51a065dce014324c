"""A pipeline planned: what each stage holds, how long it works and waits."""

from itertools import pairwise
from typing import Literal

import pytest

from colonnade.architecture.families import architecture_of
from colonnade.architecture.parts import trained_architecture
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig
from colonnade.errors import LayoutError
from colonnade.pipeline import theory
from colonnade.planner.pipeline import durations, plan_pipeline, unit_work
from tests.parity.runs import Case, Way, configured

SMALL = ModelConfig(num_layers=6, hidden_size=64, num_heads=4, seq_length=64)


def test_the_work_of_units_is_the_models() -> None:
    work = unit_work(architecture_of(SMALL, 1000))
    assert sum(work.values()) == architecture_of(SMALL, 1000).flops_per_token
    assert work["embedding"] == 0
    assert work["head"] == 6 * 64 * 1000
    assert work["blocks.0"] == work["blocks.5"] > 0


def test_one_stage_never_waits() -> None:
    plan = plan_pipeline(SMALL, ParallelConfig(), num_microbatches=3, vocab_size=100)
    assert plan.bubble == plan.theory == 0
    (stage,) = plan.stages
    assert (stage.busy, stage.peak, stage.work) == (1, 1, architecture_of(SMALL, 100).flops_per_token)


def of_equal_stages() -> tuple[ModelConfig, int]:
    """A model and the size of its vocabulary, with which its head is worth two of its eight blocks."""
    model = SMALL.model_copy(update={"num_layers": 8, "seq_length": 1})
    block, head = (unit_work(architecture_of(model, 1))[unit] for unit in ("blocks.0", "head"))
    return model, round(2 * block / head)


def test_stages_wait_as_theory_says_when_their_work_is_equal() -> None:
    model, vocab_size = of_equal_stages()
    parallel = ParallelConfig(pp=5, cuts=(3, 2, 2, 2, 1))
    plan = plan_pipeline(model, parallel, num_microbatches=7, vocab_size=vocab_size)
    assert plan.bubble == pytest.approx(plan.theory, rel=5e-3)
    assert plan.theory == pytest.approx(4 / 11)
    assert [stage.peak for stage in plan.stages] == [5, 4, 3, 2, 1]


def test_uneven_work_is_waited_for() -> None:
    even, uneven = (
        plan_pipeline(SMALL, ParallelConfig(pp=2, cuts=cuts), num_microbatches=4, vocab_size=100)
        for cuts in ((4, 4), (2, 6))
    )
    assert uneven.bubble > even.bubble
    assert uneven.stages[0].busy < even.stages[0].busy
    assert uneven.bubble_by_work == even.bubble_by_work <= even.bubble


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_stage_without_anything_trained_runs_forward_alone_and_waits_for_no_gradients(
    recompute: Literal["none", "full"],
) -> None:
    config = configured(Case(drop=0.0, num_layers=2, parts="upper"), Way(pp=2, micro_batch_size=1, recompute=recompute))
    architecture = trained_architecture(config, 37)
    plan = plan_pipeline(config.model, config.parallel, num_microbatches=8, vocab_size=37, architecture=architecture)
    events = plan.simulation.events[0]
    assert [event.action.kind for event in events if event.end > event.start] == ["F"] * 8
    assert all(before.end == event.start for before, event in pairwise(events))
    frozen, trained = plan.stages
    again = durations(recompute).microbatch / durations("none").microbatch  # of what has a backward alone
    assert frozen.busy / trained.busy == pytest.approx(frozen.work / (again * trained.work))


def test_full_recomputation_adds_a_forward_to_every_backward() -> None:
    assert durations("full").microbatch == durations("none").microbatch + durations("none").forward
    parallel = ParallelConfig(pp=2, schedule="zero_bubble", recompute="full")
    plan = plan_pipeline(SMALL, parallel, num_microbatches=4, vocab_size=100)
    assert plan.theory == theory.bubble("zero_bubble", 2, 4, 1, durations("full"))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_under_zero_bubble_equal_stages_wait_as_theory_says(recompute: str) -> None:
    """A backward that computes layers again leaves weight gradients less of the waiting to fill."""
    parallel = ParallelConfig.model_validate(
        {"pp": 5, "cuts": (3, 2, 2, 2, 1), "schedule": "zero_bubble", "recompute": recompute}
    )
    model, vocab_size = of_equal_stages()
    plan = plan_pipeline(model, parallel, num_microbatches=7, vocab_size=vocab_size)
    assert plan.bubble == pytest.approx({"none": 4 / 25, "full": 8 / 36}[recompute]) == plan.theory


def test_selective_recomputation_adds_no_forward() -> None:
    """What it computes again is little beside the layers' products."""
    none, selective = (
        plan_pipeline(
            SMALL,
            ParallelConfig(pp=2, schedule="zero_bubble", recompute=recompute),
            num_microbatches=4,
            vocab_size=100,
        )
        for recompute in ("none", "selective")
    )
    assert (selective.theory, selective.bubble) == (none.theory, none.bubble)
    assert selective.bubble_by_work == none.bubble_by_work


def test_a_tied_table_counts_on_both_ends() -> None:
    plan = plan_pipeline(SMALL, ParallelConfig(pp=8), num_microbatches=4, vocab_size=1000)
    assert plan.stages[0].parameters == (1000 + 64) * 64
    assert plan.stages[-1].parameters == (1000 + 2) * 64


def test_a_stage_that_has_both_ends_holds_a_tied_table_once() -> None:
    (stage,) = plan_pipeline(SMALL, ParallelConfig(), num_microbatches=4, vocab_size=1000).stages
    assert stage.parameters == architecture_of(SMALL, 1000).num_parameters


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(LayoutError, match="Use pp = 8"):
        plan_pipeline(SMALL, ParallelConfig(pp=9), num_microbatches=4, vocab_size=100)


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_a_forward_of_a_stage_of_mean_work_takes_one(virtual_stages: int) -> None:
    """However many chunks it has: all of a step's work is that of all stages."""
    parallel = ParallelConfig(
        pp=2, virtual_stages=virtual_stages, schedule="interleaved" if virtual_stages > 1 else "1f1b"
    )
    plan = plan_pipeline(SMALL, parallel, num_microbatches=4, vocab_size=100)
    assert sum(plan.simulation.busy) == pytest.approx(2 * 4 * durations("none").microbatch)


def test_measured_seconds_count_in_place_of_operations() -> None:
    units = [unit.name for unit in architecture_of(SMALL, 100).units]
    seconds = {name: 9.0 if name == "blocks.0" else 1.0 for name in units}
    plan = plan_pipeline(SMALL, ParallelConfig(pp=2), num_microbatches=4, vocab_size=100, seconds=seconds)
    assert [stage.work for stage in plan.stages] == [12.0, 4.0] and list(plan.cuts_by_work) == [2, 6]
    assert plan.stages[1].busy == pytest.approx(plan.stages[0].busy / 3)


def test_what_is_frozen_is_less_work() -> None:
    config = configured(Case(parts="upper"), Way(micro_batch_size=2))
    whole, partly = (
        plan_pipeline(config.model, config.parallel, num_microbatches=4, vocab_size=37, architecture=architecture)
        for architecture in (None, trained_architecture(config, 37))
    )
    assert partly.stages[0].work == trained_architecture(config, 37).flops_per_token < whole.stages[0].work
