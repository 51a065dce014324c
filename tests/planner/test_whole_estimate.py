"""An estimate as a whole: what it is made of, and for whom. Walks are those of one small step, whatever is asked."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.architecture.parts import trained_architecture
from colonnade.config.schema import Config
from colonnade.mesh.ledger import Entry
from colonnade.pipeline.schedule import Action
from colonnade.planner import estimate as planner_estimate
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import Estimate, _step, checkpoint_stall, estimate, failures, simulated
from colonnade.planner.hardware import Hardware, hardware
from colonnade.planner.operators import Section, Sent
from colonnade.planner.paper import Walk, walk
from colonnade.planner.timeline import Played
from tests.parity.runs import Case, Way, configured

A100 = hardware("a100-80gb").having(host__token_seconds=0)
PLAIN = Case(drop=0.0, num_layers=2, precision="bf16")
TWO = Way(micro_batch_size=2)
RANKS: Any = SimpleNamespace()


@cache
def walked() -> Walk:
    return walk(configured(PLAIN, TWO), 37, 0, device="cuda")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """With what a step was walked, or ranks were planned."""
    calls: list[dict[str, Any]] = []

    def walks(config: Config, vocab_size: int, rank: int, **keys: Any) -> Walk:
        calls.append({"vocab_size": vocab_size, "rank": rank, **keys})
        return walked()

    def plans(config: Config, vocab_size: int) -> Any:
        calls.append({"vocab_size": vocab_size, "ranks": "all"})
        return RANKS

    monkeypatch.setattr(planner_estimate, "walk", walks)
    monkeypatch.setattr(planner_estimate, "plan_run", plans)
    return calls


def of(machine: Hardware = A100, case: Case = PLAIN, way: Way = TWO, **train: Any) -> Estimate:
    config = configured(case, way)
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    return estimate(config, 37, machine, every_rank=False)


@pytest.mark.parametrize(
    ("device", "machine", "walked_on"),
    [("auto", "cpu", "cpu"), ("auto", "a100-80gb", "cuda"), ("cpu", "a100-80gb", "cpu"), ("cuda", "cpu", "cuda")],
)
def test_a_step_is_walked_where_the_run_computes(
    asked: list[dict[str, Any]], device: str, machine: str, walked_on: str
) -> None:
    """With the kernels that are asked for; memory of all ranks is planned where it is wanted."""
    config, products = configured(PLAIN, TWO), object()
    config = config.model_copy(update={"train": config.train.model_copy(update={"device": device})})
    wanted: Any = products
    found = estimate(config, 37, hardware(machine), products=wanted, every_rank=False)
    step = {"vocab_size": 37, "rank": 0, "device": walked_on, "products": products}
    assert asked == [step] and found.ranks is None
    assert estimate(config, 37, hardware(machine)).ranks is RANKS
    assert asked[1:] == [step | {"products": None}, {"vocab_size": 37, "ranks": "all"}]


@pytest.mark.parametrize(("precision", "peak"), [("bf16", 1e14), ("fp16", 2e14), ("fp32", 3e13), ("fp64", 4e12)])
def test_what_is_used_of_a_device_is_of_its_peak_in_the_precision_of_the_run(
    asked: list[dict[str, Any]], precision: str, peak: float
) -> None:
    keys = {"bfloat16": 1e14, "float16": 2e14, "float32": 3e13, "float64": 4e12}
    machine = A100.having(**{f"device__peak_flops__{name}": value for name, value in keys.items()})
    assert of(machine, precision=precision).peak == peak


def test_failures_are_those_of_all_devices(asked: list[dict[str, Any]]) -> None:
    found = of(way=Way(dp=4, micro_batch_size=2))
    every, steps = configured(PLAIN, TWO).checkpoint.every, found.tokens / found.tokens_per_step
    few, many = (
        failures(A100, ranks, found.stall, step=found.seconds_per_step, every=every, steps=steps) for ranks in (1, 4)
    )
    assert found.stall > 0 and found.failures == many != few


def test_tokens_of_a_step_are_those_of_every_text_of_its_samples(asked: list[dict[str, Any]]) -> None:
    choice = Case(block="choice", drop=0.0)
    model = configured(choice, TWO).model
    assert of(case=choice).tokens_per_step == 8 * model.sample_length > 8 * model.seq_length


def test_a_step_waits_for_what_is_not_read_behind_the_one_before_and_for_its_share_of_a_checkpoint(
    asked: list[dict[str, Any]],
) -> None:
    """The 64 tokens of a step take a twentieth of a second to be read."""
    free, slow = of(), of(A100.having(host__token_seconds=0.05 / 64))
    assert "data" not in free.spent and free.spent["checkpoints"] > 0
    step = free.seconds_per_step - free.spent["checkpoints"]
    assert slow.spent["data"] == pytest.approx(0.05 - step) and slow.bound == "data"
    assert slow.seconds_per_step == pytest.approx(0.05 + free.spent["checkpoints"])


def test_a_checkpoint_has_what_is_frozen_too() -> None:
    """A number of each such weight, and three of each that is trained."""
    whole, partly = (configured(Case(parts=parts), TWO) for parts in ("all", "upper"))
    stated = [trained_architecture(each, 37) for each in (whole, partly)]
    trained, every = stated[1].num_trained, stated[0].num_trained
    assert trained < every == stated[0].num_parameters == stated[1].num_parameters
    times = checkpoint_stall(partly, stated[1], A100) / checkpoint_stall(whole, stated[0], A100)
    assert times == pytest.approx((trained + (every - trained) / 3) / every)


def test_a_step_of_one_stage_takes_what_all_of_its_sections_take() -> None:
    """Not as if each micro-batch took what the median takes."""
    simulation: Any = SimpleNamespace(makespan=6.0, busy=[6.0])
    assert _step([0], {0: Played((1.0, 3.0, 9.0, 2.0), {"products": 15.0})}, simulation) == (15.0, {"products": 15.0})


def test_what_a_stage_spends_time_on_is_no_more_than_the_step() -> None:
    """Where its sections were timed beside more ranks than are at work."""
    played = {stage: Played((1.0, 30.0, 1.0), {"products": 30.0, "dp": 10.0}) for stage in (0, 1)}
    simulation: Any = SimpleNamespace(makespan=8.0, busy=[3.0, 3.0])
    assert _step([0, 1], played, simulation) == (10.0, {"products": 7.5, "dp": 2.5, "pipeline": 0.0})


# --- a schedule with times --------------------------------------------------------------------------------------------


def stage_of(seconds: dict[str, float], sent: list[Sent]) -> tuple[Any, Played]:
    """A walk with a section of each kind of action between its ends, and its times."""
    actions = [Action(kind, 0, 0) for kind in seconds]  # type: ignore[arg-type]
    sections = (Section(None), *(Section(each, list(sent)) for each in actions), Section(None))
    return SimpleNamespace(sections=sections), Played((50.0, *seconds.values(), 50.0), {})


def scheduled(cost: Cost, stages: list[dict[str, float]], *sizes: int, **keys: Any) -> Any:
    """Simulated, with messages of these sizes from one stage to the next."""
    entry = Entry("send", "pp", (1,), "bfloat16", 0, "", False, 0.0)
    sent = [Sent(number, replace(entry, bytes=size), (0, 1)) for number, size in enumerate(sizes)]
    found = [stage_of(seconds, sent) for seconds in stages]
    config = configured(PLAIN, Way(pp=len(stages), micro_batch_size=2, **keys))
    walks, played = ({stage: each[place] for stage, each in enumerate(found)} for place in (0, 1))
    return simulated(config, range(len(stages)), walks, played, cost)


def test_actions_of_a_schedule_take_what_they_take_on_their_stage() -> None:
    """Weight gradients too, where they wait."""
    stages = [{"F": 1.0, "B": 2.0, "W": 4.0}, {"F": 3.0, "B": 5.0, "W": 7.0}]
    found = scheduled(Cost(A100, 2), stages, schedule="zero_bubble")
    lengths = [{event.action.kind: event.end - event.start for event in events} for events in found.events]
    assert lengths == [pytest.approx(stage) for stage in stages]


def test_a_stage_begins_when_all_tensors_of_the_one_before_are_there() -> None:
    """One after the other, over the one link between them."""
    stages = [{"F": 1.0, "B": 2.0}] * 2
    machine = A100.having(island__call=0, island__latency=0, island__bandwidth=1e9, network__efficiency=1)
    found = scheduled(Cost(machine, 2), stages, 10**9, 3 * 10**9, 2 * 10**9)
    assert found.events[1][0].start == pytest.approx(1.0 + 6.0)


def test_a_message_takes_as_long_as_the_link_between_its_stages() -> None:
    """Two of four stages are on each machine, so that one link in three is of the network."""
    cost = Cost(A100.having(island__size=2, node__size=2, network__bandwidth=1e9), 4)
    near, far = (cost.move("send", 10**9, ranks) for ranks in ((0, 1), (1, 2)))
    found = scheduled(cost, [{"F": 1.0, "B": 2.0}] * 4, 10**9, schedule="gpipe")
    begun = [events[0].start for events in found.events]
    assert begun == pytest.approx([0, 1 + near, 2 + near + far, 3 + near + far + near]) and far > 10 * near


def test_of_messages_to_the_next_stage_all_bytes_take_their_time() -> None:
    """What a message takes beside its bytes, the others do not wait for."""
    stages = [{"F": 1.0, "B": 2.0}] * 2
    machine = A100.having(island__call=0.25, island__latency=0.5, island__bandwidth=1e9, network__efficiency=1)
    found = scheduled(Cost(machine, 2), stages, 10**10, schedule="gpipe")
    starts = [event.start for event in found.events[1] if event.action.kind == "F"]
    assert starts == pytest.approx([1 + 0.75 + 10 * count for count in (1, 2, 3, 4)])


def test_stages_that_share_a_core_take_as_long_as_one_after_the_other() -> None:
    """Their times are those of both at work: half as fast as alone."""
    cpu = hardware("cpu").having(device__crowded=1.0, device__together=1.0)
    work = 2 * 4 * 3.0
    shared = scheduled(Cost(replace(cpu, cores=1), 2), [{"F": 1.0, "B": 2.0}] * 2)
    own = scheduled(Cost(replace(cpu, cores=0), 2), [{"F": 1.0, "B": 2.0}] * 2)
    assert shared.makespan == pytest.approx(work / 2) and own.makespan == pytest.approx(work / 2 + 3.0)
