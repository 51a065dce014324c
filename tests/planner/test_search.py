"""The search: what it tries, what it keeps, and what it says where nothing is left."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from colonnade.config.load import load
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config
from colonnade.errors import LayoutError
from colonnade.outputs import check_output
from colonnade.pipeline.partition import chunks
from colonnade.planner import page_search
from colonnade.planner.compose import Composer
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import estimate
from colonnade.planner.estimate_report import as_json as estimate_json
from colonnade.planner.hardware import hardware
from colonnade.planner.ranks import largest, plan_run
from colonnade.planner.search import (
    KEPT,
    Candidate,
    Confirmed,
    Search,
    _keeps,
    candidates,
    confirmed,
    layout_in_words,
    refusal,
    search,
)
from colonnade.planner.search_report import as_json, as_text, refuse_empty, write
from colonnade.planner.unit_times import unit_costs
from tests.parity.runs import Case, Way, configured
from tests.planner.once import units_timed_once
from tests.slow import first_fast

A100 = hardware("a100-80gb")
TIMED: dict[Any, Any] = {}
"""What units cost in the searches of `found`, which differ in their limit alone."""


def config() -> Config:
    return configured(Case(drop=0.0, precision="bf16", vocab_size=64, global_batch_size=4), Way(micro_batch_size=1))


@cache
def found(limit: float | None = None) -> Search:
    with units_timed_once(TIMED):
        return search(config(), 64, A100 if limit is None else A100.having(device__memory=limit), 2)


def test_it_looks_at_every_axis() -> None:
    chosen = [each.parallel for each in candidates(config(), Composer(config(), 64, Cost(A100, 2)), 2)]
    assert {(each.tp, each.pp, each.dp) for each in chosen} == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}
    assert {each.zero for each in chosen if each.dp == 2} == {0, 1, 2, 3}
    assert {each.sequence_parallel for each in chosen if each.tp == 2} == {True, False}
    assert {each.recompute for each in chosen} == {"none", "full"} and {each.offload for each in chosen} == {
        True,
        False,
    }


@pytest.mark.slow
def test_it_tries_every_axis() -> None:
    chosen = [each.chosen for each in found().fitting]
    assert {(each["tp"], each["pp"], each["dp"]) for each in chosen} == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}
    assert {each["zero"] for each in chosen} == {0, 1, 2, 3}
    assert {each["micro_batch_size"] for each in chosen} == {1, 2, 4}
    assert {each["recompute"] for each in chosen} == {"none", "full"}
    assert {each["offload"] for each in chosen} == {each["sequence_parallel"] for each in chosen} == {True, False}
    composer = Composer(config(), 64, Cost(A100, 2))
    assert all(refusal(each.config, composer) is None for each in found().fitting)
    assert {each["schedule"] for each in chosen} == {"1f1b", "interleaved", "zero_bubble"}


@pytest.mark.slow
def test_nothing_on_the_front_is_beaten() -> None:
    front = found().front
    assert front and front[0] is found().fitting[0]
    for each in front:
        assert not any(other.seconds <= each.seconds and other.memory < each.memory for other in found().fitting), (
            each.chosen
        )


def test_a_pipeline_is_cut_in_each_way_once_and_by_time_its_slowest_stage_is_the_lightest() -> None:
    """A head that weighs as much as several blocks, on a model whose blocks do not divide."""
    model = ModelConfig(num_layers=9, hidden_size=64, num_heads=4, seq_length=128, dropout=0.0, attention_dropout=0.0)
    parallel = config().parallel.model_copy(update={"pp": 4})
    large = config().model_copy(update={"model": model, "parallel": parallel})
    composer = Composer(large, 20_000, Cost(hardware("cpu"), 4))
    ways = list(composer.ways_to_cut(large))
    cut = [large.model_copy(update={"parallel": parallel.model_copy(update=way)}) for way in ways]
    counts = [tuple(map(len, chunks(composer.architecture, each.parallel))) for each in cut]
    assert len(set(counts)) == len(counts) > 1 and {sum(each) for each in counts} == {11}
    slowest = [max(work.whole for work in composer.times(each)) for each in cut]
    assert slowest[-1] == min(slowest) < slowest[0]


@pytest.mark.slow
def test_what_a_layout_is_expected_to_take_does_not_depend_on_those_before_it() -> None:
    """Seven layers: the heavier stage of the plain pipeline is not that of the interleaved one."""
    case = Case(drop=0.0, precision="bf16", vocab_size=64, global_batch_size=4, num_layers=7)
    plain = configured(case, Way(pp=2, micro_batch_size=1))
    other = configured(case, Way(pp=2, micro_batch_size=1, schedule="interleaved", virtual_stages=2))
    seen = Composer(plain, 64, Cost(A100, 2))
    seen.compose(plain)
    assert seen.compose(other) == Composer(plain, 64, Cost(A100, 2)).compose(other)


def test_zero_bubble_hides_weight_gradients_in_the_waiting() -> None:
    way = config().parallel.model_copy(update={"pp": 2})
    plain, split = (
        config().model_copy(update={"parallel": way.model_copy(update={"schedule": name})})
        for name in ("1f1b", "zero_bubble")
    )
    composer = Composer(config(), 64, Cost(A100, 2))
    times = composer.times(split)
    other = min(times, key=lambda work: work.whole)
    hidden = composer.compose(plain)[0] - composer.compose(split)[0]
    assert hidden == pytest.approx(other.weights + min(other)) and other.weights > 0


@pytest.mark.slow
def test_into_zeros_collectives_a_rank_puts_all_its_gradients_and_its_part_of_the_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the plan of a whole step has it, but for padding."""
    way = config().parallel.model_copy(update={"dp": 2, "zero": 1})
    sharded, moved = config().model_copy(update={"parallel": way}), dict[str, int]()

    def move(_: Cost, operation: str, size: int, ranks: Sequence[int]) -> float:
        moved[operation] = size
        return 0.0

    monkeypatch.setattr(Cost, "move", move)
    Composer(sharded, 64, Cost(A100, 2)).compose(sharded)
    traffic = plan_run(sharded, 64).kinds[0].traffic
    sent = {operation: size for (operation, axis), (_, size) in traffic.items() if axis == "dp" and operation in moved}
    assert moved == pytest.approx(sent, rel=0.02) and sent.keys() == {"reduce_scatter", "all_gather"}


def moving(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Collectives take so long, whatever they move."""
    monkeypatch.setattr(Cost, "move", lambda _, operation, size, ranks: seconds[operation])


def test_of_gradients_over_dp_what_backward_does_not_hide_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least those of the last unit, behind which nothing is left to compute."""
    copies = config().model_copy(update={"parallel": config().parallel.model_copy(update={"dp": 2})})
    composer = Composer(copies, 64, Cost(A100, 2))
    (work,) = composer.times(copies)
    last = work.backward + work.weights
    moving(monkeypatch, all_reduce=last / 10)
    assert composer.compose(copies)[2]["dp"] == pytest.approx(last / 10 / len(composer.architecture.units))
    moving(monkeypatch, all_reduce=10 * last)
    assert composer.compose(copies)[2]["dp"] == pytest.approx(9 * last)


def test_under_zero_3_each_micro_batch_waits_for_all_that_moves_beside_its_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both gathers and the sum of gradients, where these take longer than what is computed."""
    moving(monkeypatch, all_gather=5.0, reduce_scatter=7.0)
    parallel = config().parallel.model_copy(update={"dp": 2, "zero": 3})
    some, more = (
        config().model_copy(
            update={"parallel": parallel, "train": config().train.model_copy(update={"global_batch_size": size})}
        )
        for size in (4, 6)
    )
    composer = Composer(some, 64, Cost(A100, 2))
    assert composer.compose(more)[0] - composer.compose(some)[0] == pytest.approx(5 + 5 + 7)


def test_the_stage_with_most_weights_is_waited_for_by_the_optimizer() -> None:
    case = Case(drop=0.0, precision="bf16", vocab_size=64, global_batch_size=4, num_layers=6)
    even, uneven = (configured(case, Way(pp=2, micro_batch_size=1, cuts=cuts)) for cuts in ((4, 4), (7, 1)))
    composer = Composer(even, 64, Cost(A100, 2))
    assert composer.compose(uneven)[2]["optimizer"] > composer.compose(even)[2]["optimizer"]


@pytest.mark.slow
def test_under_zero_2_memory_has_the_gradients_of_units_that_are_on_their_way() -> None:
    """Nearly half of what a rank takes, of four large layers whose state is shared by eight."""
    model = ModelConfig(num_layers=4, hidden_size=256, num_heads=4, seq_length=8, dropout=0.0, attention_dropout=0.0)
    parallel = config().parallel.model_copy(update={"dp": 8, "zero": 2})
    train = config().train.model_copy(update={"global_batch_size": 8})
    large = config().model_copy(update={"model": model, "parallel": parallel, "train": train})
    composed, planned = Composer(large, 64, Cost(A100, 8)).compose(large)[1], largest(plan_run(large, 64)).memory
    assert planned.buffers > 0.4 * planned.total and composed == pytest.approx(planned.total, rel=0.25)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1)]
)
def test_memory_is_near_that_of_the_ranks(schedule: str, virtual_stages: int) -> None:
    """Where most of it is what micro-batches keep, in as many chunks as a stage has."""
    model = ModelConfig(num_layers=16, hidden_size=64, num_heads=4, seq_length=128, dropout=0.0, attention_dropout=0.0)
    keys = {"pp": 4, "schedule": schedule, "virtual_stages": virtual_stages}
    parallel = config().parallel.model_copy(update=keys)
    train = config().train.model_copy(update={"global_batch_size": 16, "micro_batch_size": 2})
    large = config().model_copy(update={"model": model, "parallel": parallel, "train": train})
    composed, planned = Composer(large, 64, Cost(A100, 4)).compose(large)[1], largest(plan_run(large, 64)).memory
    assert planned.activations > 0.6 * planned.total and composed == pytest.approx(planned.total, rel=0.25)


@pytest.mark.parametrize(("recompute", "drop"), [("full", 0.0), ("selective", 0.1)])
def test_computing_layers_again_takes_longer_and_keeps_less_of_the_same_layout(
    recompute: Literal["full", "selective"], drop: float
) -> None:
    case = Case(drop=drop, precision="bf16", vocab_size=64, global_batch_size=4)
    plain, again = (configured(case, Way(micro_batch_size=1, recompute=each)) for each in ("none", recompute))
    composer = Composer(plain, 64, Cost(A100))
    (seconds, memory, _), (longer, less, _) = composer.compose(plain), composer.compose(again)
    assert longer > seconds and less < memory


@pytest.mark.slow
def test_units_of_a_decoder_hand_on_their_own_stream_alone() -> None:
    """What the encoder has made passes through them, and is there once."""
    t5 = configured(Case(drop=0.0, block="t5", precision="bf16"), Way(micro_batch_size=1))
    units = unit_costs(t5, 37, Cost(A100, 2), "cuda").units
    read, written = (length * t5.model.hidden_size * 2 for length in (t5.model.seq_length, t5.model.decoder_length))
    assert (units["encoder block"].handed, units["decoder block"].handed) == (read, written)


@pytest.mark.slow
def test_more_memory_never_removes_one() -> None:
    middle = sorted(each.memory for each in found().fitting)[len(found().fitting) // 2]
    small, large = (
        {str(each.chosen) for each in found(limit).fitting} for limit in (float(middle), float(middle) * 1.5)
    )
    assert small < large


def test_the_real_program_confirms_the_best(tmp_path: Path) -> None:
    best = confirmed(found(), 64, A100)
    planned = estimate(best.candidate.config, 64, A100)
    assert planned.seconds_per_step == best.estimate.seconds_per_step
    assert f"the best of {best.looked_at} that were run on paper" in as_text(found(), best, A100, None)
    assert '"best"' in as_json(found(), best)
    write(best.candidate.config, tmp_path / "best.toml")
    check_output(tmp_path / "best.toml", written_by="plan --search")  # that it may replace
    assert load(tmp_path / "best.toml").parallel == best.candidate.config.parallel


def numbered(seconds: float, memory: int) -> Candidate:
    return Candidate(config(), seconds, memory, {"products": seconds})


def test_the_front_is_the_fastest_and_each_slower_one_with_less_memory_than_all_before() -> None:
    some = Search(100.0, [numbered(*each) for each in ((1.0, 30), (2.0, 30), (3.0, 20), (4.0, 25), (5.0, 10))])
    assert [(each.seconds, each.memory) for each in some.front] == [(1.0, 30), (3.0, 20), (5.0, 10)]


def confirmed_of(
    monkeypatch: pytest.MonkeyPatch,
    composed: Sequence[tuple[float, str]],
    planned: Sequence[tuple[float, int]],
    checkpoints: float = 0.0,
    memory: Callable[[int], float] = lambda number: -number,
) -> tuple[int, int]:
    """(which is the best, how many were planned) of layouts of such times and ways, composed to take such memory (each
    less than the one before), on the real program as planned. `checkpoints`: [s] of each planned time.
    """
    each_one: list[Any] = [
        SimpleNamespace(config=i, seconds=each[0], way=each[1], memory=memory(i), chosen=numbered(1.0, 1).chosen)
        for i, each in enumerate(composed)
    ]

    def plan(number: int, *_: object) -> object:
        seconds, memory = planned[number]
        return SimpleNamespace(seconds_per_step=seconds, memory=memory, spent={"checkpoints": checkpoints})

    monkeypatch.setattr("colonnade.planner.search.estimate", plan)
    told: list[int] = []
    found = confirmed(Search(50.0, each_one), 64, A100, told=told.append)
    assert told == list(range(found.looked_at))
    return each_one.index(found.candidate), found.looked_at


@pytest.mark.parametrize(
    ("planned", "best", "looked_at"),
    [
        ([(3.0, 10), (1.0, 99), (2.0, 10), (0.5, 10)], 2, 3),
        ([(1.0, 10), (2.0, 10), (3.0, 10)], 0, 3),
        ([(2.0, 10), (3.0, 10)], 0, 2),
    ],
    ids=["the fastest that fits", "the first", "few"],
)
def test_of_three_that_are_planned_the_fastest_that_fits_is_the_best(
    monkeypatch: pytest.MonkeyPatch, planned: list[tuple[float, int]], best: int, looked_at: int
) -> None:
    composed = [(5.0, "pp 2")] * len(planned)
    assert confirmed_of(monkeypatch, composed, planned) == (best, looked_at)


@pytest.mark.parametrize("fits_from", [3, 4, 1234, 3998, 3999])
def test_where_no_finalist_fits_the_front_is_looked_through_by_halves(
    monkeypatch: pytest.MonkeyPatch, fits_from: int
) -> None:
    """Of thousands a dozen is planned, and the fastest that fits is found."""
    composed = [(1.0 + number, "pp 2") for number in range(4000)]
    planned = [(2.0 + number, 10 if number >= fits_from else 99) for number in range(4000)]
    best, looked_at = confirmed_of(monkeypatch, composed, planned)
    assert best == fits_from and looked_at <= 3 + 12


def test_halves_are_of_those_that_take_less_memory_than_all_faster_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other one is slower than one that takes less."""
    composed = [(1.0 + number, "pp 2") for number in range(4000)]

    def memory(number: int) -> float:
        return 49.0 if number % 2 else 49.0 - number / 100

    planned = [(2.0 + number, int(memory(number)) + 20) for number in range(4000)]
    best, looked_at = confirmed_of(monkeypatch, composed, planned, memory=memory)
    assert planned[best] == (2.0 + best, 50) and planned[best - 2][1] == 51 and looked_at <= 3 + 12


def test_where_none_fits_a_dozen_is_planned_and_the_least_of_all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = [(1.0 + number, "pp 2") for number in range(4000)]
    with pytest.raises(
        LayoutError,
        match=r"^Of 4,000 layouts that seemed to fit into 50 B none of the 14 that were planned on the real program "
        r"does\. The least, 51 B, is 1 B more, with one rank, micro-batch 1\. Use more --ranks, a higher --memory, ",
    ):
        confirmed_of(monkeypatch, composed, [(1.0, 4050 - number) for number in range(4000)])


def test_where_layouts_are_slower_than_composed_the_fastest_of_each_other_way_is_planned_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until one was composed to be as slow as the best is, or twelve were planned."""
    composed = [(1.0, "pp 4")] * 5 + [(2.0, "pp 2"), (2.5, "pp 2"), (3.5, "dp 8")]
    assert confirmed_of(monkeypatch, composed, [(9.0, 10)] * 5 + [(3.0, 10), (2.6, 10), (1.0, 10)]) == (5, 4)
    every = [(1.0, f"tp {number}") for number in range(14)]
    assert confirmed_of(monkeypatch, every, [(20.0 - number, 10) for number in range(14)]) == (11, 12)


def test_checkpoints_which_no_composed_time_has_make_no_layout_slower_than_composed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    composed = [(1.0, "pp 4"), (1.0, "pp 2"), (1.0, "tp 2"), (1.5, "dp 8")]
    assert confirmed_of(monkeypatch, composed, [(3.0, 10)] * 4, checkpoints=2.0) == (0, 3)
    assert confirmed_of(monkeypatch, composed, [(3.0, 10)] * 4, checkpoints=1.0) == (0, 4)


def test_what_a_search_keeps_fits_and_comes_fastest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(3.0, 100, {}), (1.0, 101, {}), (2.0, 60, {}), (2.0, 50, {}), (2.5, 40, {})]
    costs = iter(made)
    monkeypatch.setattr("colonnade.planner.search.Composer", lambda *_: SimpleNamespace(compose=lambda _: next(costs)))
    monkeypatch.setattr("colonnade.planner.search.candidates", lambda *_: iter([config()] * len(made)))
    monkeypatch.setattr("colonnade.planner.search.refusal", lambda *_: None)
    found = search(config(), 64, A100.having(device__memory=100.0), 2)
    assert [(each.seconds, each.memory) for each in found.fitting] == [(2.0, 50), (2.0, 60), (2.5, 40), (3.0, 100)]
    assert found.least is not None and found.least.memory == 40 and found.num_too_large == 1


def test_a_search_leaves_the_keys_that_it_is_told_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other ways are not even put together; where none is left, it says what none has."""
    monkeypatch.setattr(Composer, "compose", lambda *_: (1.0, 10, {}))
    cut: list[tuple[int, int]] = []
    monkeypatch.setattr(
        Composer, "ways_to_cut", lambda _, way: [{}] * (cut.append((way.parallel.dp, way.parallel.zero)) is None)
    )
    keep = ["parallel.dp", "parallel.zero", "train.micro_batch_size"]
    set_so = config().model_copy(update={"parallel": config().parallel.model_copy(update={"dp": 2, "zero": 1})})
    kept = search(set_so, 64, A100, 4, keep=keep).fitting
    assert {(each.chosen["dp"], each.chosen["zero"], each.chosen["micro_batch_size"]) for each in kept} == {(2, 1, 1)}
    assert {(each.chosen["tp"], each.chosen["pp"]) for each in kept} == {(1, 2), (2, 1)} and set(cut) == {(2, 1)}
    reason = "train.global_batch_size and train.micro_batch_size and parallel.dp do not go together"
    assert search(set_so, 64, A100, 3, keep=keep[1:]).refused == {reason: 1}
    with pytest.raises(LayoutError, match=r"^No layout of 3 ranks that a search tries has parallel.dp = 2 and "):
        search(set_so, 64, A100, 3, keep=keep)


def tried(
    num_ranks: int = 8,
    *,
    attention_dropout: float = 0.0,
    seq_length: int = 8,
    parallel: Mapping[str, Any] | None = None,
    keeps: Callable[..., bool] = lambda *_, **__: True,
    **train: Any,
) -> list[Config]:
    """The layouts that are looked at, of four units on nodes of two devices, each pipeline cut in one way."""
    composer: Any = SimpleNamespace(
        teacher=None,
        architecture=SimpleNamespace(units=[None] * 4),
        cost=SimpleNamespace(hardware={"node.size": 2}),
        ways_to_cut=lambda _: [{}],
        live=lambda *_: 1,
    )
    changed = {
        "train": config().train.model_copy(update={"global_batch_size": 32, **train}),
        "model": config().model.model_copy(update={"attention_dropout": attention_dropout, "seq_length": seq_length}),
        "parallel": config().parallel.model_copy(update=dict(parallel or {})),
    }
    return list(candidates(config().model_copy(update=changed), composer, num_ranks, keeps))


def test_all_sizes_of_every_axis_are_looked_at_up_to_their_limits() -> None:
    layouts = [each.parallel for each in tried()]
    assert {each.tp for each in layouts} == {1, 2}, "a node has two devices"
    assert {each.pp for each in layouts} == {1, 2, 4}, "as many stages as units"
    assert {each.train.micro_batch_size for each in tried() if each.parallel.dp == 1} == {1, 2, 4, 8, 16}
    assert {each.zero for each in layouts if each.dp > 1} == {0, 1, 2, 3}
    assert {each.zero for each in layouts if each.dp == 1} == {0}
    assert {each.sequence_parallel for each in layouts if each.tp == 2} == {True, False}
    assert {each.sequence_parallel for each in layouts if each.tp == 1} == {False}, "there is nothing to cut"
    assert {(each.schedule, each.virtual_stages) for each in layouts if each.pp == 2} == {
        ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2),
    }  # fmt: skip


@pytest.mark.parametrize(("seq_length", "most"), [(1 << 14, 16), (1 << 15, 8), (1 << 17, 2), (1 << 19, 1)])
def test_of_long_samples_no_micro_batch_has_many(seq_length: int, most: int) -> None:
    assert max(each.train.micro_batch_size for each in tried(1, seq_length=seq_length)) == most


def test_a_sample_is_as_long_as_all_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "sequences", property(lambda _: 4))
    assert max(each.train.micro_batch_size for each in tried(1, seq_length=1 << 15)) == 2


def test_copies_that_do_not_divide_the_batch_are_one_layout_that_cannot_be() -> None:
    """It is counted, so that a search without others can say why, whatever else the configuration has."""
    layouts = [each.parallel for each in tried(8, global_batch_size=4)]
    assert [(each.tp, each.pp, each.dp) for each in layouts if 4 % each.dp] == [(1, 1, 8)]
    reason = "train.global_batch_size and train.micro_batch_size and parallel.dp do not go together"
    odd = config().parallel.model_copy(update={"sequence_parallel": True, "recompute_every": 3})
    seven = search(config().model_copy(update={"parallel": odd}), 64, A100, 7)
    assert (seven.tried, seven.refused) == (1, {reason: 1})
    with pytest.raises(LayoutError, match=rf"Of 1 layouts of 7 ranks none can be: {reason} \(1 layouts\)\. Use"):
        refuse_empty(seven, 7)


def test_what_is_not_looked_at_is_as_usual_whatever_the_configuration_has() -> None:
    other = {"recompute_every": 3, "schedule": "gpipe", "virtual_stages": 2, "partition": "flops", "cuts": (2, 2)}
    keys = {"recompute_every": 1, "schedule": "1f1b", "virtual_stages": 1, "partition": "layers", "cuts": ()}
    found = [each.parallel for each in tried(1, parallel=other)]
    assert found and all({key: getattr(each, key) for key in keys} == keys for each in found)


@pytest.mark.parametrize("key", first_fast(["parallel.recompute", "parallel.recompute_every"]))
def test_groups_of_layers_that_are_computed_again_are_kept_with_it(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Or for themselves. Without, each layer is one."""
    monkeypatch.setattr(Composer, "compose", lambda *_: (1.0, 10, {}))
    parallel = config().parallel.model_copy(update={"recompute": "full", "recompute_every": 2})
    found = search(config().model_copy(update={"parallel": parallel}), 64, A100, 2, keep=[key]).fitting
    assert found and {(each.chosen["recompute"], each.chosen["recompute_every"]) for each in found} == {("full", 2)}
    assert all("recompute full in groups of 2" in layout_in_words(each) for each in found)
    none = parallel.model_copy(update={"recompute": "none", "recompute_every": 1})
    kept = search(config().model_copy(update={"parallel": none}), 64, A100, 2, keep=["parallel.recompute"]).fitting
    assert kept and {each.chosen["recompute"] for each in kept} == {"none"}


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", {1, 2, 4}), ("zero_bubble", {2, 4}), ("interleaved", {2})])
def test_a_schedule_that_is_kept_leaves_layouts_of_one_stage_out_unless_it_is_theirs(
    schedule: str, stages: set[int]
) -> None:
    """They run one forward and one backward in turn, whatever the configuration has."""
    found = [each.parallel for each in tried(keeps=partial(_keeps, {"parallel.schedule": schedule}))]
    assert {each.pp for each in found} == stages and {each.schedule for each in found} == {schedule}


@pytest.mark.parametrize("key", [key for key in KEPT if key != "parallel.recompute_every"])  # else 1 throughout
def test_a_key_that_is_kept_leaves_all_layouts_that_have_it_so_and_no_other(key: str) -> None:
    look = partial(tried, 4, global_batch_size=4, attention_dropout=0.1, precision="bf16")
    layouts, value_of = look(), attrgetter(key)
    values = {value_of(each) for each in layouts}
    assert len(values) > 1
    for value in values:
        found = look(keeps=partial(_keeps, {key: value}))
        assert found == [each for each in layouts if value_of(each) == value]


def test_a_layout_that_cannot_be_has_a_reason_in_a_few_words() -> None:
    """Alike ones have the same: they are counted by it."""
    composer: Any = SimpleNamespace(teacher=None, live=lambda *_: 1)

    def reason(**keys: Any) -> str | None:
        return refusal(config().model_copy(update={"parallel": config().parallel.model_copy(update=keys)}), composer)

    assert reason() is None and reason(tp=3) == "parallel.tp and model.num_heads do not go together"
    for message, few in (
        ("Three heads are odd: they cannot be. Use 2.", "Three heads are odd"),
        ("parallel.tp = 3 is odd. Use 2: it is not.", "parallel.tp = 3 is odd"),
        ("parallel.tp is odd.", "parallel.tp is odd"),
    ):
        alone: Any = SimpleNamespace(keys=("parallel.tp",), message=message)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("colonnade.planner.search.check", lambda _, alone=alone: [alone])
            assert reason() == few

    def refuse(*_: object) -> None:
        raise LayoutError("no such rounds")

    never: Any = SimpleNamespace(teacher=None, live=refuse)
    assert refusal(config(), never) == "micro-batches are no multiple of parallel.pp"


@pytest.mark.parametrize(
    ("attention_dropout", "ways"),
    [(0.0, {"none", "full"}), (0.1, {"none", "selective", "full"})],
    ids=["without", "with"],
)
def test_attention_is_computed_again_alone_where_its_dropout_is_kept(attention_dropout: float, ways: set[str]) -> None:
    assert {each.parallel.recompute for each in tried(1, attention_dropout=attention_dropout)} == ways


@pytest.mark.parametrize(("precision", "offload"), [("bf16", True), ("fp16", True), ("fp32", False)])
def test_offload_is_looked_at_where_there_are_master_weights(precision: str, offload: bool) -> None:
    assert any(each.parallel.offload for each in tried(1, precision=precision)) == offload


def test_every_layout_that_was_tried_fits_or_cannot_be_or_takes_more() -> None:
    one = Candidate(config(), 1.0, 1_000, {"products": 1.0})
    some = Search(2_000.0, [one], one, tried=20, refused={"too long": 3, "too wide": 5})
    some_estimate = estimate(config(), 64, A100, every_rank=False)
    text = as_text(some, Confirmed(one, some_estimate, 1), A100, None)
    first, *reasons = text.splitlines()[:3]
    written = as_text(some, Confirmed(one, some_estimate, 1), A100, Path("best.toml"))
    assert written == f"{text}\n\nIts configuration is in best.toml."
    told = json.loads(as_json(some, Confirmed(one, some_estimate, 1)))
    assert (told["tried"], told["fitting"], told["refused"]) == (20, 1, {"too long": 3, "too wide": 5})
    assert told["best"]["estimate"] == estimate_json(some_estimate) and told["best"]["bound_by"] == "products"
    assert (told["limit_bytes"], [each["memory_bytes"] for each in told["front"]]) == (2_000.0, [1_000])
    assert first.endswith(": 1 fit into 2.00 kB, 8 cannot be, 11 take more.")
    assert reasons == ["  5: too wide", "  3: too long"]
    assert text.splitlines()[7].endswith("one rank, micro-batch 1  matrix products")
    beaten = json.loads(as_json(replace(some, fitting=[one, numbered(2.0, 3_000)]), Confirmed(one, some_estimate, 1)))
    assert [each["memory_bytes"] for each in beaten["front"]] == [1_000] and beaten["fitting"] == 2
    for count, more in ((12, False), (14, True)):
        many = Search(2_000.0, [numbered(1.0 + number, 1_000 - number) for number in range(count)])
        text = as_text(many, Confirmed(one, some_estimate, 1), A100, None)
        assert ("… and 2 more, slower with less memory" in text) == more == ("… and" in text)
    drawn = str(page_search.drawn(some, one))
    assert "20 layouts were put together: 1 fit into" in drawn and " 8 cannot be, 11 take more memory." in drawn


def test_every_layout_that_is_drawn_is_within_the_picture() -> None:
    """Those too that are ten times as slow as any of the front, and take ten times the memory."""
    best, worst = numbered(1.0, 1_000), numbered(10.0, 10_000)
    picture = str(page_search.drawn(Search(20_000.0, [best, worst]), best))
    (size,) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
    dots = re.findall(r'<path class="dots \w+" d="M([-\d.]+) ([-\d.]+)h0"', picture)
    assert len(dots) == 4 and all(0 < float(at) < float(end) for dot in dots for at, end in zip(dot, size, strict=True))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "one rank"),
        ({"tp": 2}, "tp 2"),
        ({"pp": 2, "dp": 4}, "pp 2, dp 4"),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, "pp 2, 2 virtual stages"),
        ({"pp": 2, "schedule": "zero_bubble"}, "pp 2, zero bubble"),
        ({"pp": 2, "partition": "flops"}, "pp 2, cut by flops"),
        ({"pp": 2, "cuts": (1, 3)}, "pp 2, cut by time"),
        ({"dp": 2, "zero": 1, "offload": True}, "dp 2, ZeRO 1, offload"),
        ({"tp": 2, "sequence_parallel": True, "recompute": "full"}, "tp 2, recompute full, sequence parallelism"),
    ],
    ids=str,
)
def test_a_layout_in_words_has_what_is_not_as_usual(keys: dict[str, Any], words: str) -> None:
    parallel = config().parallel.model_copy(update=keys)
    one = Candidate(config().model_copy(update={"parallel": parallel}), 1.0, 1_000, {"products": 1.0})
    assert layout_in_words(one) == f"{words}, micro-batch 1"


def test_the_real_program_has_to_fit_what_was_asked_for() -> None:
    """Not all of a device's memory."""
    with pytest.raises(LayoutError, match=r"Of 1 layouts .* into 1.00 kB none of the 1 that were planned .* does"):
        confirmed(Search(1000.0, [numbered(1.0, 900)]), 64, A100)


def test_an_empty_search_says_what_emptied_it_and_by_how_much() -> None:
    with pytest.raises(LayoutError, match=r"none fits into 1.00 kB: memory is what none has. The least, .* more, with"):
        refuse_empty(replace(found(), limit=1000.0, fitting=[]), 2)
    with pytest.raises(LayoutError, match=r"The least, 3\.00 kB, is 2\.00 kB more, with one rank"):
        refuse_empty(Search(1000.0, least=numbered(1.0, 3_000), tried=1), 1)
    with pytest.raises(LayoutError, match="Of 0 layouts of 1,000 ranks none can be: none has whole sizes"):
        refuse_empty(Search(1000.0), 1_000)
