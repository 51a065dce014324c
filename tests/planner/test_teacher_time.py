"""The time of a teacher that runs beside its student, in plans."""

from dataclasses import replace

import pytest

from colonnade.config.distillation import DistillationConfig
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.planner import ranks
from colonnade.planner import teacher as planner_teacher
from colonnade.planner.compose import Composer
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import estimate
from colonnade.planner.estimate_report import as_json, as_text
from colonnade.planner.hardware import hardware
from colonnade.planner.paper import walk
from colonnade.planner.ranks import largest, plan_run
from colonnade.planner.search import refusal
from colonnade.planner.teacher_time import teacher_costs, teacher_seconds
from colonnade.planner.timeline import play
from colonnade.planner.unit_times import Costs, UnitCost
from tests.parity.runs import Case, Way, configured

MACHINE = hardware("a100-80gb")
CASE = Case(drop=0.0, precision="bf16", num_layers=2)


def taught(monkeypatch: pytest.MonkeyPatch, way: Way, *, top_k: int | None = None, **keys: int) -> Config:
    """A student beside a teacher that is as large, but for these keys of its model."""
    config = configured(CASE, way)
    teacher = config.model.model_copy(update=keys)
    monkeypatch.setattr(planner_teacher, "teacher_model", lambda path: teacher)
    return config.model_copy(update={"distillation": DistillationConfig(teacher="teacher", top_k=top_k)})


def test_a_step_takes_the_forward_of_a_teacher_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is as long as that of a model of its size, for each micro-batch; answers from disk take none."""
    way = Way(micro_batch_size=2)
    beside, stored = taught(monkeypatch, way), taught(monkeypatch, way, top_k=3)
    alone, with_it, asked = (
        estimate(each, 37, MACHINE, every_rank=False) for each in (configured(CASE, way), beside, stored)
    )
    walked = walk(configured(CASE, way), 37, 0, device="cuda", whole=True)
    seconds = play(walked.sections, Cost(MACHINE)).seconds
    forward = [
        each
        for section, each in zip(walked.sections, seconds, strict=True)
        if section.action is not None and section.action.kind == "F"
    ]
    assert with_it.spent["teacher"] == pytest.approx(sum(forward), rel=0.1)
    assert with_it.seconds_per_step == pytest.approx(alone.seconds_per_step + with_it.spent["teacher"])
    assert "the teacher's forward" in as_text(with_it)
    assert asked.seconds_per_step == alone.seconds_per_step


def test_micro_batches_follow_one_another_through_the_stages_of_a_teacher() -> None:
    way = Way(pp=2, micro_batch_size=1)
    config = configured(replace(CASE, global_batch_size=4), way)
    kinds = {"embedding": 1.0, "block": 4.0, "head": 2.0}
    costs = Costs({kind: UnitCost(each, 9.0, 9.0, 9, 9, 9) for kind, each in kinds.items()}, {})
    assert teacher_seconds(config, config.model, 37, costs) == 5 + 4 * 6


def test_layouts_are_composed_with_a_teacher_as_a_run_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    config = taught(monkeypatch, Way(micro_batch_size=2), hidden_size=32)
    alone = config.model_copy(update={"distillation": DistillationConfig()})
    cost = Cost(MACHINE)
    (longer, larger, spent), (seconds, size, _) = (Composer(each, 37, cost).compose(each) for each in (config, alone))
    planned = estimate(config, 37, MACHINE, every_rank=False)
    assert spent["teacher"] == planned.spent["teacher"] and longer == seconds + spent["teacher"]
    held = [largest(plan_run(each, 37)).memory.total for each in (config, alone)]
    assert larger - size == held[0] - held[1] > 0


def test_a_search_asks_once_of_layouts_that_cut_a_teacher_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def problems(_: object, config: Config) -> list[str]:
        asked.append((config.parallel.tp, config.parallel.pp))
        return ["no"] * (config.parallel.tp > 1)

    monkeypatch.setattr("colonnade.planner.compose.cut_problems", problems)
    config = taught(monkeypatch, Way(micro_batch_size=2))
    composer = Composer(config, 37, Cost(MACHINE, 2))
    ways = [{}, {"zero": 1}, {"tp": 2}, {"tp": 2, "recompute": "full"}]
    found = [
        composer.cuts_teacher(config.model_copy(update={"parallel": config.parallel.model_copy(update=way)}))
        for way in ways
    ]
    assert found == [True, True, False, False] and asked == [(1, 1), (2, 1)]


def test_a_teacher_that_could_read_longer_samples_takes_no_longer() -> None:
    """It is asked about those of its student."""
    config = configured(CASE, Way(micro_batch_size=2))
    longer = config.model.model_copy(update={"seq_length": 8 * config.model.seq_length})
    as_it_is, as_long = (teacher_costs(config, model, 37, Cost(MACHINE), "cuda") for model in (config.model, longer))
    assert as_long == as_it_is


def test_a_layout_that_the_teacher_cannot_be_cut_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the run would refuse it; planned, it is without the teacher, and says so."""
    for_two = taught(monkeypatch, Way(tp=2, micro_batch_size=2), num_heads=1)
    assert refusal(for_two, Composer(for_two, 37, Cost(MACHINE, 2))) == (
        "distillation.teacher cannot be cut over parallel.tp and parallel.pp"
    )
    for_one = taught(monkeypatch, Way(micro_batch_size=2), num_heads=1)
    assert refusal(for_one, Composer(for_one, 37, Cost(MACHINE, 2))) is None
    assert plan_run(for_two, 37).without_teacher and not plan_run(for_one, 37).without_teacher


@pytest.mark.parametrize("why", [ConfigError("There is no model."), PermissionError("denied")], ids=["none", "closed"])
def test_a_plan_without_a_teacher_that_cannot_be_read_says_so(monkeypatch: pytest.MonkeyPatch, why: Exception) -> None:
    config = taught(monkeypatch, Way(micro_batch_size=2))

    def unreadable(path: object) -> ModelConfig:
        raise why

    monkeypatch.setattr(planner_teacher, "teacher_model", unreadable)
    found = estimate(config, 37, MACHINE)
    assert "teacher" not in found.spent and found.ranks is not None and found.ranks.without_teacher
    for text in (as_text(found), ranks.as_text(found.ranks)):
        assert ", without what libraries take for themselves and the teacher, which cannot be read here, or " in text
    assert ranks.as_json(found.ranks)["without_teacher"] and as_json(found)["without_teacher"]
