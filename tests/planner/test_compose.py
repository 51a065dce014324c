"""Layouts put together from what units cost: time and memory of small ones, by hand."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Unit, Weight
from colonnade.config.parts import LoraConfig, PartsConfig
from colonnade.config.schema import Config
from colonnade.errors import LayoutError
from colonnade.pipeline.schedule import all_actions
from colonnade.pipeline.simulate import Durations, simulate
from colonnade.planner.compose import Composer, Kept, Lengths, Moment, _kind, _unit_work, _with_traffic
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import estimate
from colonnade.planner.hardware import hardware
from colonnade.planner.kept import Handed
from colonnade.planner.kept import Kept as OfAUnit
from colonnade.planner.memory import buffer_bytes, rank_memory, resident
from colonnade.planner.ranks import largest, plan_run
from colonnade.planner.unit_times import Costs, UnitCost, _cost, unit_costs
from colonnade.planner.waiting import Hop, Work, filling, waiting
from tests.parity.runs import Case, Way, configured
from tests.planner.once import units_timed_once

A100 = hardware("a100-80gb")
LONG: dict[Any, Any] = {}
"""What units cost of long texts with several documents."""


def config(**keys: Any) -> Config:
    found = configured(Case(drop=0.0, precision="bf16", vocab_size=64, num_layers=6), Way(micro_batch_size=1))
    return found.model_copy(update={"parallel": found.parallel.model_copy(update=keys)})


def composer(machine: Any = A100) -> Composer:
    return Composer(config(), 64, Cost(machine, 8))


def test_a_layer_that_is_computed_again_has_its_forward_in_its_backward() -> None:
    """But no weight gradients more; and what is not computed again takes what it took."""
    costs = Costs({"block": UnitCost(1.0, 2.0, 4.0, 0, 0, 0)}, {})
    block = Unit("blocks.0", "block", (), 0, recomputes=True)
    head = block._replace(recomputes=False)
    assert _unit_work(costs, block, True) == (1.0, 3.0, 4.0)
    assert _unit_work(costs, block, False) == _unit_work(costs, head, True) == (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    "more",
    [
        {"lora": LoraConfig(rank=2, targets=("*.attention.qkv",))},
        {"parts": PartsConfig(frozen=("embedding*", "blocks.0.*"))},
        {"parts": PartsConfig(frozen=("blocks.4.*",))},
    ],
    ids=["adapters", "the first units", "one of several"],
)
def test_a_model_that_is_trained_in_part_takes_no_more_than_as_a_whole(more: dict[str, Any]) -> None:
    """Neither time nor memory, however it is cut, and less memory where all of it is on one stage."""
    part, cut, whole = config().model_copy(update=more), config(pp=2).model_copy(update=more), config()
    known: dict[Any, Any] = {}
    with units_timed_once(known):
        mine, all_of_it = (Composer(each, 64, Cost(A100, 2)) for each in (part, whole))
        for keys in [{"pp": 1}, *({"pp": 2, **each} for each in mine.ways_to_cut(cut))]:
            (seconds, size, _), (longer, larger, _) = (
                of.compose(each.model_copy(update={"parallel": each.parallel.model_copy(update=keys)}))
                for of, each in ((mine, part), (all_of_it, whole))
            )
            assert seconds <= longer and (size < larger or (size == larger and keys["pp"] == 2))


def test_what_has_no_backward_takes_its_forward_alone_and_keeps_nothing() -> None:
    """Also where layers are computed again. What is frozen in part, or mapped, costs as much as what is not."""
    costs = Costs({"block": UnitCost(1.0, 2.0, 4.0, 8, 16, 32)}, {})
    frozen = Unit("blocks.0", "block, 0", (), 0, recomputes=True, has_backward=False)
    mapped = Unit("blocks.1", "block, mapped, 1", (), 0, recomputes=True)
    assert [_unit_work(costs, frozen, again) for again in (False, True)] == [(1.0, 0.0, 0.0)] * 2
    assert costs.of(frozen) == UnitCost(1.0, 0.0, 0.0, 0, 16, 32)
    assert _unit_work(costs, mapped, True) == (1.0, 3.0, 4.0) and costs.of(mapped) == costs.units["block"]


@pytest.mark.parametrize(
    ("gather", "reduce", "found"),
    [(4.0, 5.0, (4.0, 6.0, 3.0)), (0.5, 1.0, (1.0, 2.0, 3.0)), (0.0, 6.0, (1.0, 3.0, 3.0))],
)
def test_of_traffic_beside_computation_the_slower_counts(
    gather: float, reduce: float, found: tuple[float, float, float]
) -> None:
    """Parameters beside forward; those and gradients beside both halves of backward."""
    assert _with_traffic(Work(1.0, 2.0, 3.0), gather, reduce) == found


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "seconds"), [("1f1b", 1, 9.0), ("interleaved", 2, 4.5), ("zero_bubble", 1, 6.0)]
)
def test_a_pipeline_fills_by_all_stages_but_the_slowest(schedule: str, virtual_stages: int, seconds: float) -> None:
    """Under zero_bubble two stages hide weight gradients, and as much as is least of all."""
    times = [Work(1.0, 1.0, 2.0), Work(2.0, 4.0, 2.0), Work(2.0, 2.0, 1.0)]
    assert filling(times, config(pp=3, schedule=schedule, virtual_stages=virtual_stages)) == seconds - (
        schedule == "zero_bubble"
    ) * (6.0 - (1.0 + 1.0 - 1.0) - (2.0 + 2.0 - 1.0))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_weight_gradients_fill_a_pipeline_as_far_as_there_are_micro_batches(count: int) -> None:
    way = config(pp=4, schedule="zero_bubble")
    way = way.model_copy(update={"train": way.train.model_copy(update={"global_batch_size": count})})
    makespan = simulate(all_actions("zero_bubble", 4, count), count, durations=Durations(4.0, 5.0, 6.0)).makespan
    assert count * 15 + filling([Work(4.0, 5.0, 6.0)] * 4, way) == pytest.approx(makespan)


def test_the_optimizer_reads_and_writes_what_a_rank_has() -> None:
    """Where it is offloaded, in CPU memory, with gradients and weights over the link."""
    machine = A100.having(
        device__memory_bandwidth=1e10, products__memory=0.5, host__memory_bandwidth=1e9, host__link_bandwidth=1e8
    )
    seconds = composer(machine)._optimizer
    assert seconds(10**9, config(dp=4)) == pytest.approx(28 / 5)
    assert seconds(10**9, config(dp=4, zero=1)) == pytest.approx(28 / 5 / 4)
    assert seconds(10**9, config(dp=4, zero=1, offload=True)) == pytest.approx((28 + 60) / 4)


def test_what_stages_send_is_a_micro_batch_of_the_stream() -> None:
    """To the rank of the next stage, which is as many ranks further as a stage has."""
    size, way, of = 1 * 8 * 16 * 2, {"pp": 2, "dp": 2}, Cost(A100.having(island__size=4, node__size=8), 8)
    found = Composer(config(), 64, of)._hops
    near, far, none = (of.move("send", *each) for each in ((size, (0, 2)), (size, (0, 4)), (0, (0, 2))))
    assert found(config(dp=4)) == []
    assert found(config(**way, tp=1)) == [(near, near - none, True)] and far > near > none
    assert [hop.whole for hop in found(config(**way, tp=2))] == [far]


def test_what_stages_send_takes_as_long_as_the_links_between_them() -> None:
    """Two of four stages are on each machine; of two chunks each, the last stage sends back to the first machine."""
    machine = A100.having(island__size=4, node__size=4)
    near, far = (Cost(machine, 8).move("send", 1 * 8 * 16 * 2, ranks) for ranks in ((0, 2), (2, 4)))
    of, way = composer(machine), {"pp": 4, "dp": 2}

    def found(way: Config) -> list[float]:
        return [hop.whole for hop in of._hops(way)]

    assert found(config(**way)) == [near, far, near] and far > near
    assert found(config(**way, schedule="interleaved", virtual_stages=2)) == [near, far, near, far, near, far, near]
    assert found(config(pp=2, dp=2, schedule="interleaved", virtual_stages=2)) == [near] * 3, "all on one"
    assert found(config(pp=4)) == [near, near, near]


def test_no_gradients_are_sent_to_stages_that_are_frozen_with_all_before_them() -> None:
    """Two units are on each: of the second one is trained."""
    frozen = PartsConfig(frozen=("embedding*", "blocks.0.*", "blocks.1.*", "blocks.4.*", "blocks.5.*"))
    way = config(pp=4).model_copy(update={"parts": frozen})
    assert [hop.returns for hop in Composer(way, 64, Cost(A100, 4))._hops(way)] == [False, True, True]


@pytest.mark.parametrize(
    ("keys", "case", "model", "size"),
    [
        ({}, {}, {}, 2 * 128),
        ({"tp": 2}, {}, {}, 2 * 128),
        ({"tp": 2, "sequence_parallel": True}, {}, {}, 2 * 64),
        ({}, {"precision": "fp32"}, {}, 4 * 128),
        ({}, {"precision": "fp64"}, {}, 8 * 128),
        ({}, {}, {"fp32_residual": True}, 4 * 128),
        ({}, {"block": "t5"}, {}, 2 * (128 + 192)),
        ({"cuts": (2, 6)}, {"block": "t5"}, {}, 2 * 128),
    ],
    ids=["bf16", "tp", "sequence parallelism", "fp32", "fp64", "an fp32 stream", "two streams", "from the encoder on"],
)
def test_a_message_is_as_large_as_in_a_run(
    monkeypatch: pytest.MonkeyPatch, keys: Any, case: Any, model: Any, size: int
) -> None:
    """To each stage but the first, 8 tokens of 16 numbers, and to one that begins in a decoder both streams, here 12
    tokens too.
    """
    monkeypatch.setattr(Cost, "move", lambda _, operation, size, ranks: float(size))
    found = configured(Case(**{"drop": 0.0, "precision": "bf16", "vocab_size": 64, **case}), Way(micro_batch_size=1))
    shape = {"model": found.model.model_copy(update=model)}
    way = found.model_copy(update={**shape, "parallel": found.parallel.model_copy(update={"pp": 2, **keys})})
    assert [hop.whole for hop in Composer(way, 64, Cost(A100, 8))._hops(way)] == [size]


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "live"),
    [
        ("1f1b", 1, [(2, 2), (1, 1)]),
        ("zero_bubble", 1, [(2, 2), (2, 1)]),
        ("interleaved", 2, [(5, 4), (3, 3)]),
        ("gpipe", 1, [(8, 8), (8, 8)]),
    ],
)
def test_micro_batches_live_as_long_as_their_schedule_keeps_them(
    schedule: str, virtual_stages: int, live: list[tuple[int, int]]
) -> None:
    """Chunks of micro-batches, until their weight gradients are there; and micro-batches with a chunk whose backward is
    to come.
    """
    way = config(pp=2, schedule=schedule, virtual_stages=virtual_stages)
    assert [composer().live(way, stage) for stage in (0, 1)] == live


def test_each_schedule_keeps_its_own_micro_batches_whatever_was_looked_at_before() -> None:
    found = composer()
    assert [found.live(config(pp=2, schedule=each), 1).chunks for each in ("1f1b", "zero_bubble", "gpipe")] == [1, 2, 8]


def test_rounds_that_are_not_whole_are_refused_however_few_micro_batches_would_do() -> None:
    way = config(pp=2, schedule="interleaved", virtual_stages=2)
    odd = way.model_copy(update={"train": way.train.model_copy(update={"global_batch_size": 9})})
    with pytest.raises(LayoutError, match="micro-batches"):
        composer().live(odd, 0)
    assert composer().live(way, 0).chunks == 5


@pytest.mark.parametrize(("zero", "more"), [(1, 0), (2, 4 * 200 + 2 * 100), (3, 4 * 200 + 2 * 100 + 2 * 300)])
def test_memory_has_what_micro_batches_keep_and_what_is_gathered(zero: int, more: int) -> None:
    """Of units that follow one another: under ZeRO 2 gradients on their way, of three whole and of the two before the
    last a rank's part; under ZeRO 3 parameters too, frozen or not, of the same moment.
    """
    way = config(pp=2, dp=2, zero=zero, schedule="interleaved", virtual_stages=2)
    kept = Kept(each=1000, once=70, shared=0, moments=frozenset({Moment(200, 100, 300), Moment(30, 20, 600)}))
    found = composer()._memory(0, Lengths(1600, 800), kept, way)
    assert found == buffer_bytes(1600, way.parallel, way.train, frozen=800) + 5 * 500 + 70 + more


@pytest.mark.parametrize(
    "keys", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}, {"dp": 2, "zero": 3}], ids=["1 rank", "tp", "pp", "dp", "ZeRO 3"]
)
def test_frozen_weights_take_memory_as_they_do_in_a_run(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]) -> None:
    """What a rank holds all the time is exact where no buffer is padded. Only ZeRO 3 shares it out."""
    monkeypatch.setattr(Composer, "_costs", lambda *_: Costs(defaultdict(lambda: UnitCost(0, 0, 0, 0, 0, 0)), {}))
    case = Case(drop=0.0, precision="bf16", vocab_size=64, hidden_size=64)
    whole = configured(case, Way(micro_batch_size=1, **keys))
    shape = {"model": whole.model.model_copy(update={"ffn_hidden_size": 128})}
    adapted = whole.model_copy(update={**shape, "lora": LoraConfig(rank=32)})
    stated = trained_architecture(adapted, 64)
    held = max(
        resident(stated, adapted.parallel, adapted.train, stage=stage).state for stage in range(keys.get("pp", 1))
    )
    run = rank_memory(adapted.model, adapted.parallel, adapted.train, vocab_size=64, architecture=stated)
    assert Composer(adapted, 64, Cost(A100, 2)).compose(adapted)[1] == held + (run.buffers if "zero" in keys else 0)


@pytest.mark.parametrize(
    ("precision", "way"),
    [
        ("bf16", Way(dp=2, reduce_precision="16-bit")),
        ("bf16", Way(dp=4, zero=1, reduce_precision="16-bit")),
        ("bf16", Way(dp=4, zero=2, pp=2, schedule="zero_bubble", reduce_precision="16-bit")),
        ("bf16", Way(dp=2, zero=3, schedule="zero_bubble")),
        ("bf16", Way(dp=4, zero=2)),
        ("fp64", Way(dp=2, zero=3)),
    ],
    ids=["16-bit", "16-bit, ZeRO 1", "16-bit, zero bubble, ZeRO 2", "zero bubble, ZeRO 3", "ZeRO 2", "fp64, ZeRO 3"],
)
def test_gradients_on_their_way_take_memory_as_they_do_in_a_run(
    monkeypatch: pytest.MonkeyPatch, precision: Literal["bf16", "fp64"], way: Way
) -> None:
    """Where the units are nearly all alike. Of zero-bubble all gradients of a stage are whole, however many: backward
    computes some of each, and the others come later.
    """
    monkeypatch.setattr(Composer, "_costs", lambda *_: Costs(defaultdict(lambda: UnitCost(0, 0, 0, 0, 0, 0)), {}))
    case = Case(drop=0.0, precision=precision, vocab_size=16, hidden_size=256, num_layers=16)
    found = configured(case, replace(way, micro_batch_size=1))
    parts = trained_architecture(found, 16)
    held = rank_memory(found.model, found.parallel, found.train, vocab_size=16, architecture=parts)
    composed = Composer(found, 16, Cost(A100, 8)).compose(found)[1]
    assert composed - held.state == pytest.approx(held.buffers, rel=0.03)


def of_heavy_blocks(monkeypatch: pytest.MonkeyPatch, way: Config) -> Composer:
    """Each of which keeps ten million bytes of a micro-batch; nothing else keeps any."""
    nothing = UnitCost(0, 0, 0, 0, 0, 0)
    costs = Costs({"embedding": nothing, "head": nothing, "block": replace(nothing, kept=10**7)}, {})
    monkeypatch.setattr(Composer, "_costs", lambda *_: costs)
    return Composer(way, 64, Cost(A100, 8))


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"pp": 4}, 3 * 2),  # of the second stage, with two blocks, three micro-batches live
        ({"pp": 4, "cuts": (2, 1, 3, 2)}, 2 * 3),  # of the third two, and of the first four of one block
        ({"pp": 4, "cuts": (4, 1, 1, 2)}, 4 * 3),
        ({"pp": 4, "cuts": (1, 1, 1, 5)}, 4),
        ({"pp": 4, "schedule": "zero_bubble"}, 4 * 2),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, 5 * 3 / 2),
    ],
    ids=str,
)
def test_the_stage_that_takes_most_memory_counts(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], kept: float
) -> None:
    """Wherever it is, and wherever that of a layout before was."""
    way = config(**keys)
    of, parts = of_heavy_blocks(monkeypatch, way), trained_architecture(way, 64)
    of.compose(config(pp=4, cuts=(5, 1, 1, 1)))
    state = max(resident(parts, way.parallel, way.train, stage=stage).state for stage in range(way.parallel.pp))
    assert of.compose(way)[1] == pytest.approx(10**7 * kept, abs=2 * state)


def test_a_stage_that_is_trained_counts_beside_one_with_as_many_frozen_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the third stage two blocks, of each two micro-batches live; the second keeps nothing."""
    parts = PartsConfig(frozen=("embedding*", "blocks.[0-3].*"))
    way = config(pp=4, cuts=(3, 2, 2, 1)).model_copy(update={"parts": parts})
    assert of_heavy_blocks(monkeypatch, way).compose(way)[1] == pytest.approx(2 * 2 * 10**7, rel=0.1)


def test_a_teachers_stages_are_none_of_the_students(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages with the same units of the student may have others of its teacher."""
    way = config(pp=4)
    of = of_heavy_blocks(monkeypatch, way)
    alone, of.teacher = of.compose(way)[1], way.model
    monkeypatch.setattr(Composer, "_teacher_seconds", lambda *_: 0.0)
    monkeypatch.setattr(Composer, "_teacher_memory", lambda _, stage, __: {2: 10**9}.get(stage, 0))
    assert of.compose(way)[1] == pytest.approx(alone + 10**9 - 2 * 10**7, rel=1e-3)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_large_table_takes_memory_as_it_does_in_a_run(monkeypatch: pytest.MonkeyPatch, zero: Literal[2, 3]) -> None:
    """Its gradients are on their way with those of small units, not three times at once, and not all the while that it
    is gathered.
    """
    monkeypatch.setattr(Composer, "_costs", lambda *_: Costs(defaultdict(lambda: UnitCost(0, 0, 0, 0, 0, 0)), {}))
    case = Case(drop=0.0, precision="bf16", vocab_size=20_000, hidden_size=64, num_layers=6)
    found = configured(case, Way(dp=2, pp=2, zero=zero, micro_batch_size=1))
    parts = trained_architecture(found, 20_000)
    of = Composer(found, 20_000, Cost(A100, 8))
    for stage in (0, 1):
        held = rank_memory(found.model, found.parallel, found.train, vocab_size=20_000, architecture=parts, stage=stage)
        kept = of._kept(stage, of._held(found), of._key(found), found)
        composed = of._memory(stage, of._lengths(of._held(found), 1)[stage], kept, found)
        assert composed == pytest.approx(held.state + held.buffers, rel=0.005)


@pytest.mark.parametrize("zero", [2, 3])
def test_two_large_tables_of_a_stage_take_no_more_memory_in_a_run(
    monkeypatch: pytest.MonkeyPatch, zero: Literal[2, 3]
) -> None:
    """There the gradients of one are on their way while the other's are made, of the micro-batch behind it; with ZeRO 3
    both tables are not gathered then.
    """
    monkeypatch.setattr(Composer, "_costs", lambda *_: Costs(defaultdict(lambda: UnitCost(0, 0, 0, 0, 0, 0)), {}))
    case = Case(drop=0.0, precision="bf16", vocab_size=20_000, hidden_size=64, num_layers=6, tied=False)
    found = configured(case, Way(dp=2, zero=zero, micro_batch_size=1))
    parts = trained_architecture(found, 20_000)
    held = rank_memory(found.model, found.parallel, found.train, vocab_size=20_000, architecture=parts)
    composed = Composer(found, 20_000, Cost(A100, 8)).compose(found)[1]
    assert composed == pytest.approx(held.state + held.buffers, rel=0.005)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_one_of_two_large_tables_is_on_its_way_behind_a_single_micro_batch(
    monkeypatch: pytest.MonkeyPatch, schedule: Literal["1f1b", "zero_bubble"]
) -> None:
    """Of zero-bubble both are whole: its weight gradients come at the end."""
    monkeypatch.setattr(Composer, "_costs", lambda *_: Costs(defaultdict(lambda: UnitCost(0, 0, 0, 0, 0, 0)), {}))
    case = Case(drop=0.0, precision="bf16", vocab_size=20_000, hidden_size=64, num_layers=6, tied=False)
    found = configured(case, Way(dp=2, zero=2, schedule=schedule, micro_batch_size=1))
    found = found.model_copy(update={"train": found.train.model_copy(update={"global_batch_size": 2})})
    parts = trained_architecture(found, 20_000)
    held = rank_memory(found.model, found.parallel, found.train, vocab_size=20_000, architecture=parts)
    composed = Composer(found, 20_000, Cost(A100, 8)).compose(found)[1]
    assert composed == pytest.approx(held.state + held.buffers, rel=0.01)


@pytest.mark.parametrize(
    ("keys", "frozen"),
    [
        ({"pp": 2}, ()),
        ({"pp": 2, "schedule": "zero_bubble"}, ()),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, ()),
        ({"recompute": "full"}, ()),
        ({"pp": 2}, ("embedding*", "blocks.[0-2].*")),
        ({"recompute": "full"}, ("embedding*", "blocks.[0-2].*")),
    ],
    ids=["1f1b", "zero bubble", "interleaved", "full", "frozen", "full and frozen"],
)
def test_masks_of_documents_take_memory_as_they_do_in_a_run(keys: dict[str, Any], frozen: tuple[str, ...]) -> None:
    """Once a micro-batch, as long as a layer needs it: 65,536 bytes here, of hidden states that take 8,192."""
    with units_timed_once(LONG):
        way = config(**keys).model_copy(update={"parts": PartsConfig(frozen=frozen)})
        data = way.data.model_copy(update={"documents": "separate"})
        long = way.model_copy(update={"data": data, "model": way.model.model_copy(update={"seq_length": 256})})
        composed = Composer(long, 64, Cost(A100, 2)).compose(long)[1]
    assert composed == pytest.approx(largest(plan_run(long, 64)).memory.total, rel=0.04)


def test_a_unit_keeps_what_it_makes_and_hands_on_and_no_more() -> None:
    """What it hands on as it came is another's. It works with the most that either half makes, beside what it keeps."""
    kept = OfAUnit(100, (Handed(30), Handed(50, source=0), Handed(7)), forward=150, backward=40)
    assert _cost({"F": 1.0, "B": 2.0}, kept) == UnitCost(1.0, 2.0, 0.0, kept=137, handed=37, working=50)
    late = OfAUnit(100, (Handed(30),), forward=110, backward=40)
    assert _cost({"F": 1.0, "B": 2.0, "W": 3.0}, late) == UnitCost(1.0, 2.0, 3.0, kept=130, handed=30, working=40)


def test_units_cost_what_they_do_under_the_options_of_their_layers() -> None:
    """Of a stream that is cut along the sequence half is handed on; documents that are kept apart take a mask."""

    def block(**keys: Any) -> UnitCost:
        parallel = config(tp=2, **keys.pop("parallel", {}))
        found = parallel.model_copy(update={"data": parallel.data.model_copy(update=keys)})
        return unit_costs(found, 64, Cost(A100, 2), "cuda").units["block"]

    whole, cut = block(), block(parallel={"sequence_parallel": True})
    assert (cut.handed, cut.kept < whole.kept) == (whole.handed / 2, True)
    assert block(documents="separate").kept > whole.kept


# --- what a step sends ------------------------------------------------------------------------------------------------

SECONDS = {"all_reduce": 1.0, "reduce_scatter": 2.0, "all_gather": 30.0, "send": 7.0}


def step(
    monkeypatch: pytest.MonkeyPatch, way: Config, times: Sequence[Work] | None = None
) -> tuple[dict[str, float], dict[str, tuple[int, list[int]]]]:
    """[s] Of a step, by what for; bytes and ranks of what is sent. `times`: of each stage; None: all have as much to
    compute.
    """
    sent: dict[str, tuple[int, list[int]]] = {}

    def move(_: Cost, operation: str, size: int, ranks: Any) -> float:
        if not size:
            return 0.0
        sent[operation] = size, list(ranks)
        return SECONDS[operation]

    monkeypatch.setattr(Cost, "move", move)
    monkeypatch.setattr(Composer, "_costs", lambda *_: Costs({}, {"products": 1.0}))
    times = times or [Work(4.0, 5.0, 6.0)] * way.parallel.pp
    return composer()._step(times, [Lengths(1000, 600)], way)[1], sent


@pytest.mark.parametrize(
    ("precision", "reduced", "width"),
    [("bf16", "fp32", 2), ("bf16", "16-bit", 2), ("fp32", "fp32", 4), ("fp64", "fp32", 8)],
)
def test_gradients_are_summed_as_set_and_parameters_gathered_in_their_own_type(
    monkeypatch: pytest.MonkeyPatch, precision: str, reduced: str, width: int
) -> None:
    """Over the ranks that have the same part of the model, between which those of tp sit."""
    size = 1000 * (2 if reduced == "16-bit" else max(4, width))
    ranks, plain = [0, 2, 4, 6], config(tp=2, dp=4)
    sharded = config(tp=2, dp=4, zero=1)
    plain, sharded = (
        each.model_copy(
            update={"train": each.train.model_copy(update={"precision": precision, "reduce_precision": reduced})}
        )
        for each in (plain, sharded)
    )
    assert step(monkeypatch, plain)[1] == {"all_reduce": (size, ranks)}
    assert step(monkeypatch, sharded)[1] == {"reduce_scatter": (size, ranks), "all_gather": (width * 250, ranks)}


@pytest.mark.parametrize(
    ("keys", "slowest"),
    [
        ({"pp": 2, "dp": 3, "tp": 2}, {"dp": (6, 8, 10), "ends": (2, 8)}),  # the last stage lies in two machines
        ({"pp": 2, "dp": 3, "tp": 2, "zero": 1}, {"dp": (6, 8, 10), "ends": (2, 8)}),
    ],
    ids=["sums", "sums and what is gathered"],
)
def test_gradients_are_summed_over_the_slowest_group_of_copies(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], slowest: dict[str, Sequence[int]]
) -> None:
    """And parameters gathered there. Of six ranks in the first stage all are in one machine of eight."""
    way = config(**keys)
    monkeypatch.setattr(Composer, "_costs", lambda *_: Costs({}, {"products": 1.0}))
    slow = A100.having(network__latency=1.0)
    layouts = Composer(way, 64, Cost(slow, 12))
    _, spent = layouts._step([Work(0.0, 0.0, 0.0)] * 2, [Lengths(960, 0)], way)
    apart, sizes = Cost(slow, 12), layouts._sizes(way)
    if way.parallel.zero:
        summed = apart.move("reduce_scatter", 960 * sizes.reduced, slowest["dp"])
        gathered = apart.move("all_gather", 960 // 3 * sizes.width, slowest["dp"])
    else:
        summed, gathered = apart.move("all_reduce", 960 * sizes.reduced, slowest["dp"]), 0.0
    assert spent["dp"] == pytest.approx(summed + gathered, rel=1e-3) and spent["dp"] > 1.0
    assert spent["ends"] == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(("zero", "gathered"), [(1, 1000), (2, 1000), (3, 1600)])
def test_frozen_parameters_are_gathered_under_zero_3_alone(
    monkeypatch: pytest.MonkeyPatch, zero: int, gathered: int
) -> None:
    """Where a rank has but its part of them; nothing changes them."""
    found = step(monkeypatch, config(dp=4, zero=zero))[1]
    assert found == {"reduce_scatter": (4000, [0, 1, 2, 3]), "all_gather": (2 * gathered // 4, [0, 1, 2, 3])}


@pytest.mark.parametrize(("zero", "waits"), [(0, 0.0), (1, 26.0), (2, 26.0), (3, 0.0)])
def test_what_is_gathered_once_a_step_is_hidden_by_the_first_forward_alone(
    monkeypatch: pytest.MonkeyPatch, zero: int, waits: float
) -> None:
    """Under ZeRO 3 each micro-batch gathers for itself."""
    units = len(composer().architecture.units)
    least = SECONDS["reduce_scatter" if zero else "all_reduce"] / units
    assert step(monkeypatch, config(dp=2, zero=zero))[0]["dp"] == pytest.approx(waits + least)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "pp"),
    [("1f1b", 1, 4), ("zero_bubble", 1, 4), ("interleaved", 2, 4), ("interleaved", 2, 2), ("interleaved", 4, 2)],
    ids=lambda each: str(each),
)
@pytest.mark.parametrize("send", [0.0, 3.0, 30.0])
def test_a_pipeline_waits_for_messages_in_each_round_as_it_does_when_simulated(
    monkeypatch: pytest.MonkeyPatch, schedule: str, virtual_stages: int, pp: int, send: float
) -> None:
    monkeypatch.setitem(SECONDS, "send", send)
    way = config(pp=pp, schedule=schedule, virtual_stages=virtual_stages)
    way = way.model_copy(update={"train": way.train.model_copy(update={"global_batch_size": 32})})
    links = {(at, at + to): (send, 0.0) for at in range(pp * virtual_stages) for to in (1, -1)}
    makespan = simulate(
        all_actions(schedule, pp, 32, virtual_stages),
        32,
        virtual_stages=virtual_stages,
        durations=Durations(4.0, 5.0, 6.0),
        links=links,
    ).makespan
    assert 32 * 15 + step(monkeypatch, way)[0]["pipeline"] == pytest.approx(makespan, rel=0.1)


@pytest.mark.parametrize("latency", [0.0, 0.9])
@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "pp", "count"),
    [("1f1b", 1, 3, 12), ("1f1b", 1, 8, 32), ("zero_bubble", 1, 6, 24), ("interleaved", 2, 4, 16),
     ("interleaved", 2, 3, 12), ("1f1b", 1, 4, 4)],
    ids=lambda each: str(each),
)  # fmt: skip
def test_a_pipeline_waits_for_a_slow_link_as_it_does_when_simulated(
    monkeypatch: pytest.MonkeyPatch, schedule: str, virtual_stages: int, pp: int, count: int, latency: float
) -> None:
    """Between the second of its stages and the third, whose messages take three times a stage's work."""
    way = config(pp=pp, schedule=schedule, virtual_stages=virtual_stages)
    way = way.model_copy(update={"train": way.train.model_copy(update={"global_batch_size": count})})
    monkeypatch.setattr(Composer, "_hops", lambda *_: [hop(chunk) for chunk in range(pp * virtual_stages - 1)])

    def hop(chunk: int) -> Hop:
        whole = 45.0 / virtual_stages if chunk % pp == 1 else 0.1
        return Hop(whole, whole * (1 - latency))

    chunks = range(pp * virtual_stages)
    links = {(at, to): (hop(min(at, to)).whole, hop(min(at, to)).whole * latency) for at in chunks for to in chunks}
    simulation = simulate(
        all_actions(schedule, pp, count, virtual_stages),
        count,
        virtual_stages=virtual_stages,
        durations=Durations(4.0, 5.0, 6.0),
        links=links,
    )
    assert count * 15 + step(monkeypatch, way)[0]["pipeline"] == pytest.approx(simulation.makespan, rel=0.1)


@pytest.mark.parametrize("latency", [0.0, 0.9])
@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "pp", "frozen"),
    [("1f1b", 1, 2, 1), ("1f1b", 1, 4, 1), ("1f1b", 1, 4, 3), ("zero_bubble", 1, 4, 1), ("interleaved", 2, 2, 1),
     ("interleaved", 2, 4, 1), ("interleaved", 2, 4, 5), ("interleaved", 3, 2, 2), ("interleaved", 2, 4, 7),
     ("interleaved", 4, 2, 7), ("interleaved", 3, 2, 5)],
    ids=lambda each: str(each),
)  # fmt: skip
def test_a_pipeline_whose_first_chunks_are_frozen_waits_as_it_does_when_simulated(
    monkeypatch: pytest.MonkeyPatch, schedule: str, virtual_stages: int, pp: int, frozen: int, latency: float
) -> None:
    """Messages take twice a stage's work."""
    way, count, chunks = config(pp=pp, schedule=schedule, virtual_stages=virtual_stages), 32, pp * virtual_stages
    way = way.model_copy(update={"train": way.train.model_copy(update={"global_batch_size": count})})
    sizes = [(4.0, 0.0, 0.0) if chunk < frozen else (4.0, 5.0, 6.0) for chunk in range(chunks)]
    each = [Work(*(size / virtual_stages for size in work)) for work in sizes]
    times = [Work(*map(sum, zip(*each[stage::pp], strict=True))) for stage in range(pp)]
    whole = 30.0 / virtual_stages
    hops = [Hop(whole, whole * (1 - latency), chunk >= frozen) for chunk in range(chunks - 1)]
    monkeypatch.setattr(Composer, "_hops", lambda *_: hops)
    simulation = simulate(
        all_actions(schedule, pp, count, virtual_stages),
        count,
        virtual_stages=virtual_stages,
        durations=[Durations(*work) for work in each],
        links={(at, at + to): (whole, whole * latency) for at in range(chunks) for to in (1, -1)},
        first_trained=frozen,
    )
    composed = count * max(work.whole for work in times) + step(monkeypatch, way, times)[0]["pipeline"]
    assert composed == pytest.approx(simulation.makespan, rel=0.1)


def of_three_stages(works: Sequence[float], whole: Sequence[float], count: int) -> tuple[float, float]:
    """[s] Composed and simulated, of three chunks each, of which the last alone has a backward, which takes no time,
    and of messages that share no link.
    """
    way, chunks = config(pp=3, schedule="interleaved", virtual_stages=3), len(whole) + 1
    way = way.model_copy(update={"train": way.train.model_copy(update={"global_batch_size": count})})
    hops, times = [Hop(each, 0.0, returns=False) for each in whole], [Work(3 * work, 0.0, 0.0) for work in works]
    simulation = simulate(
        all_actions("interleaved", 3, count, 3),
        count,
        virtual_stages=3,
        durations=[Durations(work, 0.0, 0.0) for work in works] * 3,
        links={(at, at + 1): (each, each) for at, each in enumerate(whole)},
        first_trained=chunks - 1,
    )
    return count * 3 * max(works) + filling(times, way) + sum(whole) + waiting(times, hops, way), simulation.makespan


A_LAP = [40.0, 40.0, 40.0, 0.1, 0.1, 0.1, 0.1, 0.1]
"""The first of two, of each stage."""


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize(
    ("work", "whole"),
    [
        (0.0, [1.0, 9.0, 2.0, 5.0, 1.0, 4.0, 8.0, 1.0]),  # the second stage waits longest
        (0.0, [1.0, 1.0, 2.0, 5.0, 1.0, 4.0, 2.0, 9.0]),  # the third
        (0.0, [9.0, 1.0, 2.0, 5.0, 1.0, 4.0, 2.0, 1.0]),  # the first
        (4.0, A_LAP),
    ],
    ids=str,
)
def test_a_pipeline_that_is_frozen_but_for_its_end_waits_for_each_lap(
    work: float, whole: list[float], count: int
) -> None:
    composed, simulated = of_three_stages([work] * 3, whole, count)
    assert composed == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize("whole", [0.1, 40.0])
def test_laps_are_waited_for_as_far_as_they_are_longer_than_a_stage_works_meanwhile(whole: float) -> None:
    """What four groups of micro-batches more take, of a stage that works longer than others."""
    few, more = (of_three_stages([4.0, 4.0, 6.0], [whole] * 8, count) for count in (12, 24))
    assert more[0] - few[0] == pytest.approx(more[1] - few[1], rel=1e-12)


def test_what_is_no_pipeline_waits_for_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step(monkeypatch, config())[0]["pipeline"] == 0.0


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ({"pp": 2}, (4 * 64 * 16, [0, 1])),
        ({"pp": 3, "tp": 2}, (4 * 64 * 16 // 2, [0, 4])),
        ({"pp": 3, "tp": 2, "dp": 2, "zero": 1}, (4 * 64 * 16 // 4, [0, 8])),
    ],
    ids=["pp", "tp", "ZeRO"],
)
def test_gradients_of_a_tied_table_are_summed_between_the_ends(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, int], sent: tuple[int, list[int]]
) -> None:
    """Of a rank's part: over tp, and over dp under ZeRO."""
    spent, moved = step(monkeypatch, config(**keys))
    assert (spent["ends"], moved["all_reduce"]) == (SECONDS["all_reduce"], sent)


def test_a_tied_pipeline_over_a_slow_network_is_composed_to_take_as_long_as_it_is_planned() -> None:
    """More than a quarter of it is the sum between the ends, and more the waiting for messages."""
    slow = A100.having(island__size=1, node__size=1, network__bandwidth=1e6, network__latency=1e-4)
    planned = estimate(config(pp=4), 64, slow, every_rank=False)
    seconds, _, spent = Composer(config(pp=4), 64, Cost(slow, 4)).compose(config(pp=4))
    assert seconds == pytest.approx(planned.seconds_per_step, rel=0.1)
    assert spent["ends"] == pytest.approx(planned.spent["ends"])


def test_a_pipeline_with_frozen_stages_over_a_slow_network_is_composed_to_take_as_long_as_it_is_planned() -> None:
    """To the first half of its stages no gradients go."""
    slow = A100.having(island__size=1, node__size=1, network__bandwidth=1e6, network__latency=1e-4)
    frozen = PartsConfig(frozen=("embedding*", *(f"blocks.{layer}.*" for layer in range(3))))
    way = config(pp=4).model_copy(update={"parts": frozen})
    planned = estimate(way, 64, slow, every_rank=False)
    assert Composer(way, 64, Cost(slow, 4)).compose(way)[0] == pytest.approx(planned.seconds_per_step, rel=0.1)


def test_stages_that_share_nothing_that_is_trained_sum_nothing() -> None:
    way = config(pp=2)
    untied = way.model_copy(update={"model": way.model.model_copy(update={"tie_embeddings": False})})
    frozen = way.model_copy(update={"parts": PartsConfig(frozen=("embedding.tokens.weight",))})
    assert [Composer(each, 64, Cost(A100, 8))._ends(each) for each in (config(), untied, frozen)] == [0, 0, 0]


# --- what a stage has -------------------------------------------------------------------------------------------------


def test_chunks_go_to_the_stages_in_turn() -> None:
    stages = composer()._units(((1, 2, 3, 2), 2))
    assert [[unit.name.removeprefix("blocks.") for unit in units] for units in stages] == [
        ["embedding", "2", "3", "4"],
        ["0", "1", "5", "head"],
    ]


def test_a_model_is_cut_by_time_into_as_many_chunks_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was cut into fewer before. The head takes as long as three blocks."""
    each = {"embedding": 1.0, "block": 2.0, "head": 6.0}
    costs = {kind: UnitCost(seconds, 0.0, 0.0, 0, 0, 0) for kind, seconds in each.items()}
    monkeypatch.setattr(Composer, "_costs", lambda *_: Costs(costs, {}))
    found = composer()
    virtual = {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}
    ways = [list(found.ways_to_cut(config(**keys)))[-1] for keys in ({"pp": 2}, {"pp": 3}, virtual)]
    assert [way["cuts"] for way in ways] == [(5, 3), (4, 3, 1), (3, 2, 2, 1)]


def test_weights_of_a_stage_count_once_and_those_that_are_frozen_apart() -> None:
    """Whatever was looked at before."""
    found = composer()
    buckets = {
        "table": [Weight("w", (8, 4), cut=0), Weight("f", (40,), cut=0, is_frozen=True)],
        "own": [Weight("w", (3,))],
    }
    found.architecture = SimpleNamespace(buckets=buckets)  # type: ignore[assignment]
    first, last = SimpleNamespace(buckets=("table",)), SimpleNamespace(buckets=("own", "table"))
    units: Any = [first, last]
    assert [found._length(units, tp) for tp in (1, 2, 4)] == [(35, 40), (19, 20), (11, 10)]


def test_layouts_that_differ_in_what_a_micro_batch_costs_are_told_apart() -> None:
    alike = ({}, {"dp": 2}, {"recompute": "full"})
    others = ({"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"recompute": "selective"})
    assert len({_kind(config(**keys)) for keys in alike}) == 1
    assert len({_kind(config(**keys)) for keys in (*alike, *others)}) == 4


def test_few_micro_batches_live_fewer_than_many_do() -> None:
    """Also where many were looked at before."""
    found, way = composer(), config(pp=4, schedule="gpipe")
    few = way.model_copy(update={"train": way.train.model_copy(update={"global_batch_size": 2})})
    assert [found.live(each, 0).chunks for each in (way, few)] == [way.train.num_microbatches(1), 2]


def test_what_is_remembered_of_a_layout_is_taken_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that a search composes one after the other each is as it is alone, whichever came before."""
    monkeypatch.setattr("colonnade.planner.compose.unit_costs", costs_of)
    machine = A100.having(island__size=2, node__size=2, network__bandwidth=1e9, network__latency=1e-5)
    schedules = (("1f1b", 1, 1), ("1f1b", 2, 1), ("zero_bubble", 2, 1), ("interleaved", 2, 2))
    ways = [
        layout.model_copy(update={"train": layout.train.model_copy(update={"micro_batch_size": size})})
        for schedule, pp, virtual in schedules
        for tp, dp, zero, recompute in product((1, 2), (1, 2), (0, 2, 3), ("none", "selective", "full"))
        for layout in [
            config(schedule=schedule, pp=pp, virtual_stages=virtual, tp=tp, dp=dp, zero=zero, recompute=recompute)
        ]
        for size in (1, 4)
        if virtual == 1 or size == 1  # whole rounds
    ]
    alone = [Composer(each, 64, Cost(machine, 8)).compose(each) for each in ways]
    for order in (1, -1):
        one = Composer(config(), 64, Cost(machine, 8))
        assert [one.compose(each) for each in ways[::order]] == alone[::order]


def costs_of(config: Config, *_: object) -> Costs:
    """Numbers that differ with what the costs of units depend on."""
    size, less = config.train.micro_batch_size * 128 // config.parallel.tp, config.parallel.recompute == "selective"
    seconds, kept = 1e-6 * size * (1 + less), size * (7 - less)
    return Costs(defaultdict(lambda: UnitCost(seconds, 2 * seconds, seconds, kept, 2 * size, 5 * size)), {})


def test_layers_that_are_computed_again_keep_their_input_and_are_there_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Embedding and head are not. A block that is alone on its stage is no other."""
    found = composer()
    kinds = {"embedding": (500, 40, 1), "block": (300, 30, 20), "head": (70, 0, 250)}
    costs = {name: UnitCost(0.0, 0.0, 0.0, *sizes) for name, sizes in kinds.items()}
    units: Any = [
        Unit(kind, kind, (), 0, losses=("loss",) if kind == "head" else (), recomputes=kind == "block")
        for kind in ("embedding", "block", "block", "head")
    ]
    monkeypatch.setattr(Composer, "_costs", lambda *_: Costs(costs, {}))
    monkeypatch.setattr(Composer, "_units", lambda *_: [units, [units[1]], [units[3]]])
    each = {way: found._kept(0, ((), 1), way, config(recompute=way))[:2] for way in ("none", "full")}
    alone = [found._kept(stage, ((), 3), "full", config(recompute="full"))[:2] for stage in (1, 2)]
    together = found._kept(0, ((), 1), "together", config(recompute="full", recompute_every=2))[:2]
    assert together == (500 + 30 + 70, 2 * 300 + 20), "two blocks, one input"
    assert alone == [(30, 320), (70, 250)]
    assert each == {"none": (500 + 2 * 300 + 70, 250), "full": (500 + 2 * 30 + 70, 320)}
