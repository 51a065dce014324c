"""Time on a machine: numbers that can be followed, and what must hold of all."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.architecture.parts import trained_architecture
from colonnade.config.schema import Config
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Entry
from colonnade.pipeline.schedule import Action
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import (
    Estimate,
    Failures,
    _links,
    _step,
    checkpoint_stall,
    estimate,
    failures,
    stage_kinds,
)
from colonnade.planner.estimate_report import as_json, as_text, duration
from colonnade.planner.hardware import FIGURES, Hardware, hardware
from colonnade.planner.memory import Memory
from colonnade.planner.operators import Event, Operator, Section, Sent, Waited
from colonnade.planner.paper import Walk, walk
from colonnade.planner.timeline import Played, play
from tests.parity.runs import Case, Way, configured

A100 = hardware("a100-80gb").having(products__half_area=0, products__half_depth=0, device__kernel_seconds=0)
TWO = Way(micro_batch_size=2)
PLAIN = Case(drop=0.0, num_layers=2, precision="bf16")


def configuration(way: Way, case: Case = PLAIN) -> Config:
    return configured(case, way)


@cache
def walked(way: Way) -> Walk:
    return walk(configuration(way), 37, 0, device="cuda")


# --- operators and collectives ----------------------------------------------------------------------------------------


def test_a_product_takes_its_arithmetic_or_its_bytes() -> None:
    large = Operator("mm", 2 * 8192**3, 6 * 8192**2, "bfloat16", (1, 8192, 8192, 8192))
    assert Cost(A100).operator(large) == pytest.approx(2 * 8192**3 / (312e12 * 0.8))
    thin = Operator("mm", 2 * 8192**2, 2 * 8192**2, "bfloat16", (1, 1, 8192, 8192))
    assert Cost(A100).operator(thin) == pytest.approx(2 * 8192**2 / (2039e9 * 0.8))


def test_small_products_reach_less() -> None:
    cost = Cost(hardware("a100-80gb"))
    small, large = (
        cost.arithmetic(Operator("mm", 2 * n**3, 6 * n * n, "bfloat16", (1, n, n, n))) / n**3 for n in (256, 8192)
    )
    assert small > 10 * large


def test_a_causal_kernel_computes_half_of_what_is_counted() -> None:
    full = Operator("attention", 10**12, 10**6, "bfloat16", (64, 2048, 2048, 128), is_attention=True)
    causal = full._replace(is_causal=True)
    assert Cost(A100).arithmetic(full) == 10**12 / (312e12 * A100["products.attention"])
    assert Cost(A100).arithmetic(causal) == Cost(A100).arithmetic(full) / 2


def test_attention_of_narrow_heads_takes_longer() -> None:
    cost = Cost(A100.having(products__half_head=32.0))
    wide, narrow = (
        cost.arithmetic(Operator("attention", 10**12, 10**6, "bfloat16", (1, 64, 64, width), is_attention=True))
        for width in (96, 32)
    )
    assert narrow == pytest.approx(1.5 * wide), "half of what is reached, and three quarters"


def test_where_ranks_sit_decides() -> None:
    cost = Cost(A100, 64)
    within, across, spread = (cost.move("all_reduce", 10**9, ranks) for ranks in (range(8), range(16), range(0, 64, 8)))
    assert within < across < spread, "NVLink; all adapters of two machines; one adapter of each of eight"
    assert within == pytest.approx(2 * 7 / 8 * 1e9 / (300e9 * 0.8), rel=0.01)
    assert spread == pytest.approx(2 * 7 / 8 * 1e9 / (200e9 / 8 * 0.8), rel=0.01)
    assert cost.move("all_reduce", 10**9, range(1)) == 0


def test_beyond_a_switch_links_are_shared() -> None:
    shared = A100.having(network__switch_nodes=2, network__oversubscription=4)
    near, far = (Cost(shared, 64).move("all_gather", 10**9, ranks) for ranks in (range(16), range(32)))
    assert far > 4 * near


def test_crowded_cores_are_slower() -> None:
    cpu = replace(hardware("cpu").having(device__together=0.8, device__crowded=0.5), cores=4)
    product = Operator("mm", 10**9, 10**6, "float32", (1, 500, 1000, 1000))
    alone, two, all_of_them, twice = (Cost(cpu, ranks).operator(product) for ranks in (1, 2, 4, 8))
    assert two == pytest.approx(alone / (1 - 0.2 / 3)) and all_of_them == pytest.approx(alone / 0.8)
    assert twice == pytest.approx(2 * all_of_them / 0.5)
    one = replace(cpu, cores=1)
    assert Cost(one, 2).operator(product) == pytest.approx(2 * alone / 0.5), "of one core too"


def test_arithmetic_of_elements_can_take_longer_than_their_bytes() -> None:
    gelu = Operator("gelu_", 0, 8 * 10**6, "float32", elements=10**6)
    slow = replace(hardware("cpu").having(device__kernel_seconds=0.0), operators={"gelu": 1e-6})
    assert Cost(slow).operator(gelu) == pytest.approx(1.0)
    assert Cost(replace(slow, operators={"gelu": 1e-15})).operator(gelu) == 8e6 / slow["device.memory_bandwidth"]


def test_a_collective_is_a_call_and_its_messages() -> None:
    cpu = hardware("cpu").having(island__call=1.0, island__latency=0.1, device__crowded=1.0)
    assert Cost(cpu, 2).move("all_reduce", 0, range(2)) == pytest.approx(1.2)
    assert Cost(cpu, 2).move("all_gather", 0, range(2)) == pytest.approx(1.1)


# --- what overlaps ----------------------------------------------------------------------------------------------------


def test_what_is_waited_for_later_costs_less() -> None:
    product = Operator("mm", 10**12, 0, "bfloat16", (1, 1, 1, 1))
    entry = Entry("all_reduce", "dp", (1,), "float32", 10**9, "", False, 0.0)
    sent, seconds = Sent(1, entry, tuple(range(8))), Cost(A100).operator(product)
    moved = Cost(A100).collective(entry, range(8))

    def total(*events: Event) -> float:
        return play([Section(None, list(events))], Cost(A100)).total

    assert total(sent, Waited(1), product) == pytest.approx(moved + seconds, rel=1e-3)
    assert total(sent, product, Waited(1)) == pytest.approx(max(moved, seconds), rel=1e-2)


def test_over_one_axis_collectives_go_one_by_one_and_over_two_at_once() -> None:
    def total(*axes: str) -> float:
        entries = [Entry("all_reduce", axis, (1,), "float32", 10**9, "", False, 0.0) for axis in axes]
        sent = [Sent(number, entry, tuple(range(8))) for number, entry in enumerate(entries)]
        return play([Section(None, [*sent, *(Waited(each.number) for each in sent)])], Cost(A100)).total

    assert total("dp", "dp") == pytest.approx(2 * total("dp")) and total("dp", "tp") == total("dp")


def test_a_host_that_is_too_slow_is_waited_for() -> None:
    small = Operator("add", 0, 8, "bfloat16")
    slow = A100.having(device__dispatch_seconds=1e-3)
    assert play([Section(None, [small] * 10)], Cost(slow)).total == pytest.approx(1e-2, rel=1e-3)


def test_a_host_is_ahead_of_a_gpu_and_computes_itself_on_a_cpu() -> None:
    large = Operator("mm", 10**12, 0, "bfloat16", (1, 1, 1, 1))
    gpu = A100.having(device__dispatch_seconds=1e-3)
    each = Cost(gpu).operator(large)
    assert each > 1e-3
    assert play([Section(None, [large] * 10)], Cost(gpu)).total == pytest.approx(1e-3 + 10 * each)
    assert play([Section(None, [large] * 10)], Cost(replace(gpu, kind="cpu"))).total == pytest.approx(
        10 * (1e-3 + each)
    )


def test_a_step_of_a_pipeline_has_what_comes_before_its_schedule_and_behind_it() -> None:
    """The stage that works longest, its ends included, tells what for; what is left of the step is its waiting."""
    played = {
        0: Played((1.0, 3.0, 1.0), {"products": 4.0, "dp": 1.0}),
        1: Played((4.0, 2.0, 2.0), {"products": 3.0, "memory": 5.0}),
    }
    simulation: Any = SimpleNamespace(makespan=10.0, busy=[3.0, 2.0])
    assert _step([0, 1], played, simulation) == (16.0, {"products": 3.0, "memory": 5.0, "pipeline": 8.0})


def test_a_message_takes_the_time_of_all_its_tensors() -> None:
    """Those of each chunk its own; between machines longer than within one. A stage may send no gradients."""
    entry = Entry("send", "pp", (1,), "bfloat16", 0, "", False, 0.0)

    def sends(kind: Any, chunk: int, *sizes: int) -> Section:
        events = [Sent(at, replace(entry, bytes=size), (0, 8)) for at, size in enumerate(sizes)]
        return Section(Action(kind, 0, chunk), [*events, Sent(9, replace(entry, operation="receive"), (8, 0))])

    first: Any = SimpleNamespace(sections=[Section(None), sends("F", 0, 10**9), sends("F", 1, 10**9, 10**8)])
    other: Any = SimpleNamespace(sections=[Section(None), sends("F", 0, 10**9), sends("B", 0, 10), sends("B", 1, 20)])
    cost, layout = Cost(A100.having(island__call=0.25, network__latency=0.5), 12), Layout(pp=3, dp=2, tp=2)
    ways = {
        (0, 1): (10**9, (0, 4)), (3, 4): (10**9 + 10**8, (0, 4)), (1, 2): (10**9, (4, 8)), (2, 3): (10**9, (8, 0)),
        (1, 0): (10, (4, 0)), (2, 1): (10, (8, 4)), (4, 3): (20, (4, 0)), (5, 4): (20, (8, 4)),
    }  # fmt: skip
    found = _links([0, 1, 1], {0: first, 1: other}, layout, cost)
    assert found == {
        link: (cost.move("send", size, ranks), cost.move("send", 0, ranks)) for link, (size, ranks) in ways.items()
    }
    assert found[1, 2] == (cost.move("send", 10**9, (4, 8)), 0.75)
    assert _links([0], {0: walked(TWO)}, Layout(dp=8), cost) == {}


def test_stages_of_a_kind_are_walked_once() -> None:
    config = configuration(Way(pp=4, micro_batch_size=1), replace(PLAIN, num_layers=10))
    assert stage_kinds(trained_architecture(config, 37), config.parallel) == [0, 1, 1, 3]
    way = Way(pp=4, micro_batch_size=1, schedule="interleaved", virtual_stages=2, cuts=(2, 1, 1, 1, 1, 2, 1, 3))
    assert stage_kinds(trained_architecture(config, 37), configuration(way).parallel) == [0, 1, 2, 3], "a second chunk"


# --- a whole estimate -------------------------------------------------------------------------------------------------


@cache
def found(way: Way = TWO) -> Estimate:
    return estimate(configuration(way), 37, hardware("a100-80gb"))


@pytest.mark.slow
def test_one_stage_takes_what_its_walk_takes() -> None:
    way = Way(micro_batch_size=2)
    played = play(walked(way).sections, Cost(hardware("a100-80gb"), 1))
    assert found(way).seconds_per_step == pytest.approx(played.total, rel=0.01), "but for checkpoints"


def test_ranks_copy_a_checkpoint_together_or_one_storage_takes_it_all() -> None:
    config = configuration(Way(dp=4, micro_batch_size=2))
    architecture = trained_architecture(config, 37)
    stalls = [
        checkpoint_stall(
            config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"asynchronous": each})}),
            architecture,
            A100,
        )
        for each in (True, False)
    ]
    size = 12 * architecture.num_parameters
    assert stalls == [size / 4 / A100["host.link_bandwidth"], size / A100["storage.write_bandwidth"]]


@pytest.mark.parametrize(("precision", "of_frozen", "of_trained"), [("bf16", 2, 12), ("fp32", 4, 12), ("fp64", 8, 24)])
@pytest.mark.parametrize("parts", ["upper", "lora"])
def test_a_checkpoint_has_moments_of_what_is_trained_and_of_adapters_on_a_base_nothing_else(
    parts: Any, precision: Any, of_frozen: int, of_trained: int
) -> None:
    """A frozen weight is saved as it is computed with, and one of a base not at all."""
    config = configuration(TWO, replace(PLAIN, parts=parts, precision=precision))
    architecture = trained_architecture(config, 37)
    trained, frozen = architecture.num_trained, architecture.num_parameters - architecture.num_trained
    plain = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"asynchronous": False})})
    based = plain.model_copy(update={"train": plain.train.model_copy(update={"init_from": "base"})})
    sizes = [round(checkpoint_stall(c, architecture, A100) * A100["storage.write_bandwidth"]) for c in (plain, based)]
    whole = of_trained * trained + of_frozen * frozen
    assert frozen > 0 and sizes == [whole, of_trained * trained if parts == "lora" else whole]


@pytest.mark.slow
def test_each_step_has_its_share_of_a_checkpoint() -> None:
    saves = configuration(TWO).checkpoint.model_copy(update={"asynchronous": False})
    none, often = (
        estimate(
            configuration(TWO).model_copy(update={"checkpoint": saves.model_copy(update={"every": every})}), 37, A100
        )
        for every in (0, 5)
    )
    assert often.stall > 0 and often.spent["checkpoints"] == often.stall / 5 and "checkpoints" not in none.spent
    assert often.seconds_per_step == none.seconds_per_step + often.stall / 5


@pytest.mark.slow
def test_batches_are_read_by_the_cpu_that_computes_and_while_a_gpu_does() -> None:
    way, second = Way(dp=2, micro_batch_size=2), 1 / (4 * 8)  # a rank has 4 of the 8 samples of 8 tokens
    config = configuration(way, replace(PLAIN, precision="fp32"))
    cpu = replace(hardware("cpu").having(host__token_seconds=0.0), cores=1)
    gpu = hardware("a100-80gb").having(host__token_seconds=0.0)
    for machine in (cpu, gpu):
        never = estimate(config, 37, machine)
        assert "data" not in never.spent
        slow = estimate(config, 37, replace(machine, figures={**machine.figures, "host.token_seconds": second}))
        waits = slow.seconds_per_step - never.seconds_per_step
        both = Cost(machine, 2).crowding if machine is cpu else 1.0
        assert slow.spent["data"] == pytest.approx(waits)
        assert waits == pytest.approx(both if machine is cpu else 1.0 - never.seconds_per_step, rel=1e-3)
    assert "data" not in estimate(config, 37, gpu.having(host__token_seconds=1e-9)).spent, "read behind the step"


def test_utilisation_is_by_its_formula() -> None:
    each = found()
    rate = each.tokens_per_step / each.seconds_per_step
    assert each.mfu == rate * each.flops_per_token / 312e12
    assert each.tokens_per_step == 8 * 8


def test_a_pipeline_waits() -> None:
    each = found(Way(pp=2, micro_batch_size=2))
    assert each.spent["pipeline"] > 0 and sum(each.spent.values()) == pytest.approx(each.seconds_per_step, rel=0.01)
    assert set(each.walks) == {0, 1}


def test_a_stage_without_anything_trained_waits_for_no_gradients() -> None:
    """It goes on from the first micro-batch to the last, however slow the link is."""
    slow = hardware("a100-80gb").having(island__size=1, node__size=1, network__bandwidth=1e6)
    config = configuration(Way(pp=2, micro_batch_size=1), replace(PLAIN, parts="upper"))
    events = estimate(config, 37, slow, every_rank=False).simulation.events[0]
    assert len(events) == 16 and all(before.end == event.start for before, event in pairwise(events))


@pytest.mark.slow
def test_stages_that_share_cores_are_faster_while_others_wait() -> None:
    """One core for four stages: what they compute takes as long as one after the other, whoever waits for whom."""
    config = configuration(Way(pp=4, micro_batch_size=2), replace(PLAIN, num_layers=8, precision="fp32"))
    cpu = hardware("cpu").having(island__call=0.0, island__latency=0.0, device__crowded=1.0)
    shared, own = (estimate(config, 37, replace(cpu, cores=cores), every_rank=False) for cores in (1, 4))
    work = sum(own.simulation.busy)
    assert own.simulation.bubble > 0.2 and shared.simulation.makespan == pytest.approx(work, rel=0.02)
    gpu = estimate(config, 37, replace(cpu, cores=0, kind="cuda"), every_rank=False).simulation
    assert gpu.bubble > 0.2, "devices of their own are as fast beside others"


@pytest.mark.parametrize(
    ("busy", "pace"), [(1, 4 / 0.5 / 0.8), (2, 4 / 0.5), (4, 2.0), (8, 1.0)], ids=["one", "a core each", "half", "all"]
)
def test_how_fast_ranks_are_while_others_wait(busy: int, pace: float) -> None:
    """Eight ranks on two cores: a core keeps 0.8 of its speed beside the other, and half of that where it is shared."""
    cpu = replace(hardware("cpu").having(device__together=0.8, device__crowded=0.5), cores=2)
    assert Cost(cpu, 8).pace(busy / 8) == pytest.approx(pace)
    assert Cost(replace(cpu, cores=0), 8).pace(busy / 8) == 1.0


def test_it_is_told_in_words_and_in_json() -> None:
    each = found()
    text, told = as_text(each), as_json(each)
    assert "fits:" in text and "bound by" in text
    assert told["fits"] and told["memory_bytes"] + told["room_bytes"] == 80e9
    short = replace(each, hardware=each.hardware.having(device__memory=1e8), walks={})
    assert "fits" in as_text(short)


def test_each_number_of_an_estimate_is_told_by_its_name() -> None:
    each = found(Way(pp=2, micro_batch_size=2))
    each = replace(
        each,
        spent={"data": 0.1, "products": 0.6, "tp": 0.0, "pipeline": 0.3},
        failures=Failures(between=7200.0, interval=600.0, best=5, lost=0.25),
        tokens=400 * each.tokens_per_step,
        seconds_per_step=864.0,
        walks={1: replace(each.walks[1], rank=2)},
    )
    text, told = as_text(each), as_json(each)
    shares = [line.split(maxsplit=1) for line in text.splitlines()[text.splitlines().index("") + 1 :] if "    " in line]
    assert [line for line in shares if line[0].endswith("%")] == [
        ["60.0%", "matrix products"], ["30.0%", "waiting for other stages"], ["10.0%", "reading data"],
    ]  # fmt: skip
    assert "of 312 TFLOP/s" in text and f"{each.tokens:,} tokens: 4.0 days" in text
    assert "failures one every 2.0 hours, 25.0% of the time is lost; a checkpoint every 10.0 minutes is best: " in text
    assert "is best: checkpoint.every = 5\n" in text
    assert told["days"] == pytest.approx(4.0) and told["bound_by"] == "products"
    assert told["failures"] == {
        "seconds_between": 7200.0, "checkpoint_interval": 600.0, "best_checkpoint_every": 5, "lost": 0.25,
    }  # fmt: skip
    assert [(walk["stage"], walk["rank"]) for walk in told["walks"]] == [(1, 2)]


def test_a_device_that_is_too_small_is_told_with_what_it_lacks() -> None:
    each = found()
    short = replace(each, hardware=each.hardware.having(device__memory=each.memory - 1_000))
    assert "does not fit:" in as_text(short) and " 1.00 kB more than the " in as_text(short)
    assert not as_json(short)["fits"] and as_json(short)["room_bytes"] == -1_000


def test_every_chunk_takes_the_time_of_its_own_units() -> None:
    """Chunks go to the stages in turn; the second of four has five of the eight units."""
    way = Way(pp=2, schedule="interleaved", virtual_stages=2, cuts=(1, 5, 1, 1), micro_batch_size=1)
    case = replace(PLAIN, num_layers=6, global_batch_size=4)
    found = estimate(configuration(way, case), 37, hardware("h100"), every_rank=False)
    assert found.simulation is not None
    for kind in "FB":
        seconds = {
            (event.action.chunk, stage): event.end - event.start
            for stage, events in enumerate(found.simulation.events)
            for event in events
            if event.action.kind == kind
        }
        assert max(seconds, key=lambda place: seconds[place]) == (0, 1)
        assert seconds[0, 1] > 3 * seconds[1, 0], "five blocks and one"


def test_memory_is_that_of_the_rank_that_takes_most() -> None:
    """Of all kinds that were told, and of those that were walked, whose peak is at one moment."""
    each = found()
    walked = max(walk.peak.bytes for walk in each.walks.values())
    assert each.ranks is not None
    told = replace(each.ranks.kinds[0], memory=replace(each.ranks.kinds[0].memory, activations=10**12))
    assert replace(each, ranks=None).memory == walked
    assert replace(each, ranks=replace(each.ranks, kinds=(*each.ranks.kinds, told))).memory == told.memory.total
    tiny = replace(each.ranks.kinds[0], memory=Memory(1, 1, 1, 1, 1))
    assert replace(each, ranks=replace(each.ranks, kinds=(tiny,))).memory == walked


LONG = {"step": 10.0, "every": 0, "steps": 1000.0}


def test_a_checkpoint_that_takes_no_time_is_saved_now_and_then() -> None:
    each = failures(A100, 8, 0.0, **LONG)
    assert each == failures(A100, 8, 1e-3, **LONG) and each.interval > 1.0


def test_the_best_time_between_checkpoints_is_young_and_dalys() -> None:
    """In steps, each of which is told with its share of the checkpoints that there are."""
    machine = hardware("h100").having(failures__device_hours=1000)
    each = failures(machine, 100, 60.0, step=22.0, every=30, steps=1000)
    assert each.between == 36000 and each.interval == pytest.approx((2 * 60 * 36000) ** 0.5 - 60)
    assert each.best == round(each.interval / 20.0)
    for stall in (18_000.0, 30_000.0, 50_000.0):
        found = failures(machine, 100, stall, **LONG)
        assert found.interval == 36000, "a stall that is no small part of the time between"


@pytest.mark.parametrize(("every", "segment"), [(100, 1000), (900, 9000), (5000, 36_000), (0, 36_000)])
def test_what_failures_cost_is_of_the_configured_checkpoints(every: int, segment: float) -> None:
    """By Daly's whole formula: without a checkpoint all of the run is computed again."""
    machine = hardware("h100").having(failures__device_hours=1000, failures__restart_seconds=1800)
    longer = math.exp(0.05) * math.expm1(segment / 36000) * 36000 / segment
    assert 1 / (1 - failures(machine, 100, 60.0, step=10.0, every=every, steps=3600).lost) == pytest.approx(longer)


def test_a_run_takes_the_least_time_with_checkpoints_as_often_as_is_best() -> None:
    """A stall counts once, in the steps; rare checkpoints cost what is computed again."""
    machine = hardware("h100").having(failures__device_hours=1000, failures__restart_seconds=300)

    def whole(every: int) -> float:
        step = 20.0 + (60.0 / every if every else 0.0)
        return 10_000 * step / (1 - failures(machine, 100, 60.0, step=step, every=every, steps=10_000).lost)

    best = failures(machine, 100, 60.0, **LONG | {"step": 20.0}).best
    rarer, oftener = ([whole(round(best * factor**n)) for n in range(4)] for factor in (2, 0.5))
    assert rarer == sorted(rarer) and oftener == sorted(oftener) and whole(best) < 1.1 * 10_000 * 20
    assert whole(0) > 10 * whole(best)


def test_an_estimate_has_the_failures_of_its_own_run_and_checkpoints() -> None:
    each, every = found(), configuration(TWO).checkpoint.every
    steps = each.tokens / each.tokens_per_step
    assert each.failures == failures(each.hardware, 1, each.stall, step=each.seconds_per_step, every=every, steps=steps)
    assert each.failures != failures(each.hardware, 1, each.stall, step=each.seconds_per_step, every=2, steps=steps)


def test_a_run_that_hardly_ever_comes_to_its_end_loses_all_of_its_time() -> None:
    assert failures(A100, 10**6, 1.0, step=1e6, every=0, steps=1e6).lost == 1


def test_all_ranks_are_paid_for_while_failures_take_their_part() -> None:
    """Of a quarter lost, a run takes a third longer."""
    each = found(Way(pp=2, micro_batch_size=2))
    each = replace(each, failures=replace(each.failures, lost=0.25), hardware=each.hardware.having(cost__device_hour=3))
    told = as_json(each)
    assert told["days_with_failures"] == pytest.approx(each.steps * each.seconds_per_step / 86400 / 0.75)
    assert told["dollars"] == pytest.approx(told["days_with_failures"] * 24 * 2 * 3)
    never = replace(each, failures=replace(each.failures, lost=1.0))
    assert never.days_with_failures == never.dollars == math.inf, "of all lost, it never ends"
    assert as_json(never)["days_with_failures"] is as_json(never)["dollars"] is None, "JSON has no infinity"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0942, "94.2 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (1.5, "1.5 s"),
        (7200, "2.0 hours"),
        (400_000, "4.6 days"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


# --- what must hold of all --------------------------------------------------------------------------------------------

MORE = [key for key in FIGURES if "bandwidth" in key or "peak_flops" in key or key.startswith("products.")]
BETTER = [key for key in MORE if "half" not in key]
WAYS = (Way(micro_batch_size=2), Way(tp=2, dp=2, zero=3, micro_batch_size=2), Way(dp=4, zero=1, micro_batch_size=2))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(BETTER), st.sampled_from(WAYS), st.floats(1.01, 50))
def test_more_of_anything_never_slows(key: str, way: Way, factor: float) -> None:
    def total(machine: Hardware) -> float:
        return play(walked(way).sections, Cost(machine, way.layout.num_ranks)).total

    low, high = (FIGURES[key].low, FIGURES[key].high)
    machine = hardware("a100-80gb")
    better = machine.having(**{key.replace(".", "__"): min(max(machine[key] * factor, low), high)})
    assert total(better) <= total(machine) * (1 + 1e-12)


@settings(max_examples=10, deadline=None)
@given(st.permutations(list(FIGURES)))
def test_the_order_of_keys_does_not_count(order: list[str]) -> None:
    machine = hardware("h100")
    shuffled = replace(machine, figures={key: machine.figures[key] for key in order})
    way = WAYS[1]
    assert play(walked(way).sections, Cost(shuffled, 4)) == play(walked(way).sections, Cost(machine, 4))


def test_an_action_is_a_section() -> None:
    assert [each.action for each in walked(WAYS[0]).sections][1:3] == [Action("F", 0), Action("B", 0)]
