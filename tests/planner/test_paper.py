"""The real program on paper, beside the same program with numbers and processes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from colonnade.architecture.parts import trained_architecture
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, TrainConfig
from colonnade.kernels.choice import Kernels, Products
from colonnade.mesh.ledger import Entry
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.pipeline.schedule import Action
from colonnade.planner.memory import Memory, rank_memory
from colonnade.planner.operators import Operator, Recorder, Section
from colonnade.planner.paper import Walk, steady, walk
from colonnade.planner.stand_in import StandIn
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from colonnade.verify.memory import measure
from tests.distributed import run_on_ranks
from tests.parity.covering import Combination, covering, handful, job
from tests.parity.runs import CPU, Case, Job, Way, configured, microbatches
from tests.planner.once import weights_drawn_once

PLAIN = Case(drop=0.0)
LOSSES = 24 * 24
"""[bytes] The most that the losses of 24 micro-batches take."""


def check_memory(one: Memory, other: Memory) -> None:
    """Equal to the byte, but for the losses."""
    assert abs(one.activations - other.activations) <= LOSSES
    assert abs(one.operators - other.operators) <= LOSSES
    rest = {"activations": 0, "operators": 0}
    assert replace(one, **rest) == replace(other, **rest)


def comparable(entries: Iterator[Entry]) -> list[dict[str, Any]]:
    return [{k: v for k, v in vars(entry).items() if k not in ("started", "seconds")} for entry in entries]


def on_paper(case: Case, way: Way, rank: int = 0, **keys: Any) -> Walk:
    return walk(configured(case, way), case.vocab_size, rank, **{"device": "cpu", **keys})


# --- what is sent -----------------------------------------------------------------------------------------------------


def check_ledgers(combinations: Sequence[Combination]) -> None:
    """Entry by entry, with the lines that asked. All are of as many ranks: these are started once."""
    jobs = [job(each) for each in combinations]
    (num_ranks,) = {way.layout.num_ranks for _, way in jobs}

    @weights_drawn_once()
    def on_a_rank(rank: int, num_ranks: int) -> list[list[dict[str, Any]]]:
        found = []
        for case, way in jobs:
            mesh = build_mesh(way.layout, rank)
            state = build_state(configured(case, way), mesh, case.vocab_size, CPU)
            train_step(state, microbatches(case, way, 0, mesh), mesh, configured(case, way).train)
            found.append(comparable(iter(mesh.ledger.entries)))
        return found

    for rank, found in enumerate(run_on_ranks(on_a_rank, num_ranks, time_limit=60.0 * len(jobs))):
        for (case, way), real in zip(jobs, found, strict=True):
            assert comparable(on_paper(case, way, rank, whole=True).entries) == real, f"rank {rank} of {way}, {case}"


def few_ranks() -> list[Combination]:
    return sorted(handful(), key=lambda each: each["tp"] * each["pp"] * each["dp"])[:2]


@pytest.mark.parametrize("number", range(2))
def test_planned_and_real_ledgers_are_equal(number: int) -> None:
    check_ledgers([few_ranks()[number]])


@pytest.mark.slow
def test_planned_and_real_ledgers_are_equal_for_all_of_the_covering_set() -> None:
    by_ranks: dict[int, list[Combination]] = {}
    for combination in covering():
        by_ranks.setdefault(job(combination)[1].layout.num_ranks, []).append(combination)
    for combinations in by_ranks.values():
        check_ledgers(combinations)


def test_what_stages_send_goes_from_one_rank_of_all_to_another() -> None:
    """Not between places in the pipeline: where a rank lies decides about its links."""
    way = Way(pp=2, tp=2, micro_batch_size=1)
    first, second = (way.layout.rank_at(pp=stage, dp=0, tp=1) for stage in (0, 1))
    for rank, peer in ((first, second), (second, first)):
        sections = on_paper(PLAIN, way, rank).sections
        moved = [sent for each in sections for sent in each.sent if sent.entry.operation in ("send", "receive")]
        assert {sent.ranks for sent in moved} == {(rank, peer)}


def test_the_gradient_of_a_table_on_both_ends_is_put_down_to_it() -> None:
    for rank in (0, 1):
        sums = [each for each in on_paper(PLAIN, Way(pp=2, micro_batch_size=2), rank).entries if each.axis == "ends"]
        assert [(each.operation, each.unit) for each in sums] == [("all_reduce", "embedding.tokens")]


@pytest.mark.parametrize("way", [Way(micro_batch_size=2), Way(pp=2, micro_batch_size=1)], ids=str)
@pytest.mark.parametrize("parts", ["lower", "upper", "lora", "lora on some"])
def test_what_blocks_share_is_there_once_whatever_of_them_is_trained(parts: Any, way: Way) -> None:
    """The mask of documents: blocks that are frozen otherwise than others are of another kind, and read the same."""
    case = replace(PLAIN, documents="separate", parts=parts, num_layers=6, seq_length=64, precision="bf16")
    config = configured(case, way)
    planned = rank_memory(
        config.model,
        config.parallel,
        config.train,
        vocab_size=case.vocab_size,
        separate_documents=True,
        architecture=trained_architecture(config, case.vocab_size),
    )
    check_memory(planned, on_paper(case, way, device="cuda").memory)


# --- the shortcut -----------------------------------------------------------------------------------------------------

SUMS = ("stack", "cat", "_to_copy")
"""What losses are summed with behind the schedule."""
LONG_WAYS = (
    Way(micro_batch_size=1),
    Way(pp=2, micro_batch_size=1, zero=0),
    Way(pp=2, micro_batch_size=1, schedule="naive", recompute="full"),
    Way(pp=2, micro_batch_size=1, schedule="zero_bubble"),
    Way(pp=2, micro_batch_size=1, schedule="interleaved", virtual_stages=2),
)
MORE_WAYS = tuple(
    Way(pp=pp, dp=dp, micro_batch_size=1, schedule=schedule, virtual_stages=virtual, zero=zero, tp=tp)  # type: ignore[arg-type]
    for pp in (1, 2, 4)
    for schedule, virtual in (("naive", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2))
    for tp, dp, zero in ((1, 1, 0), (1, 2, 1), (1, 2, 3), (2, 2, 2))
)[::3]
"""A third of them, in which every pair of depth, schedule and the others occurs; under "gpipe" all micro-batches are
walked."""
MANY = 100
"""Micro-batches, of which each of these schedules walks a few."""


@cache
def check_shortcut(way: Way) -> None:
    """All that a walk tells is what a walk through every micro-batch tells. A way that did is not walked again."""
    few = steady(way.parallel, MANY)
    assert few < MANY, "there is nothing to compare with"
    count = few + 2 * way.pp if way.schedule == "interleaved" else few + 5  # the period at least twice more
    case = replace(PLAIN, global_batch_size=count * way.dp, num_layers=max(2, way.pp * way.virtual_stages))
    for stage in range(way.pp):
        rank = way.layout.rank_at(pp=stage, dp=way.dp - 1, tp=0)
        short = on_paper(case, way, rank)
        assert short.walked == steady(way.parallel, count)
        whole = on_paper(case, way, rank, whole=True)
        assert whole.walked == count
        numbers = [{**each, "number": 0} for each in comparable(whole.entries)]
        assert [{**each, "number": 0} for each in comparable(short.entries)] == numbers
        assert [each.action for each in short.sections] == [each.action for each in whole.sections]
        one, other = ([list(each.operators) for each in found.sections] for found in (short, whole))
        assert one[:-1] == other[:-1]
        ends = [[each.name for each in found[-1] if each.name not in SUMS] for found in (one, other)]
        assert ends[0] == ends[1]
        check_memory(short.memory, whole.memory)
        assert abs(short.peak.bytes - whole.peak.bytes) <= LOSSES


@pytest.mark.slow
@pytest.mark.parametrize("way", LONG_WAYS[:1] + LONG_WAYS[3:4], ids=str)
def test_a_shorter_walk_tells_the_same(way: Way) -> None:
    check_shortcut(way)


@pytest.mark.slow
@pytest.mark.parametrize("way", LONG_WAYS + MORE_WAYS, ids=str)
def test_a_shorter_walk_tells_the_same_under_each_schedule(way: Way) -> None:
    check_shortcut(way)


# --- memory and arithmetic --------------------------------------------------------------------------------------------


def real_step(config: Config, case: Case, way: Way) -> Any:
    state = build_state(config, Mesh(), case.vocab_size, CPU)
    batches = microbatches(case, way, 0, Mesh())
    return state, lambda: train_step(state, batches, Mesh(), config.train)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_table_on_both_ends_is_summed_where_it_is(stage: int) -> None:
    """No copy of its gradient is made, which is larger than all that one micro-batch leaves."""
    model = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=16)
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1)
    config = configured(PLAIN, Way(pp=2)).model_copy(update={"model": model, "train": train})
    walked = walk(config, 50_000, stage, device="cpu").memory
    planned = rank_memory(
        model, config.parallel, train, vocab_size=50_000, stage=stage, architecture=trained_architecture(config, 50_000)
    )
    assert walked.gradients == planned.gradients
    assert walked.operators - planned.operators < 50_000 * 64 * 4 / 50


@pytest.mark.parametrize(
    "job",
    [
        (Case(), Way(micro_batch_size=2)),
        (Case(precision="bf16", block="llama"), Way(micro_batch_size=2, recompute="full")),
        (Case(optimizer="lamb", documents="separate", seq_length=64), Way(micro_batch_size=1)),
    ],
    ids=lambda job: " ".join(map(str, job[:2]))[:40],
)
def test_memory_is_what_a_real_step_takes(job: Job) -> None:
    case, way = job
    state, step = real_step(configured(case, way), case, way)
    _, measured = measure(state, step)
    found = on_paper(case, way).memory
    check_memory(found, measured)


@pytest.mark.parametrize(("zero", "offload"), [(1, True), (2, False), (3, True), (3, False)])
def test_what_ranks_share_of_a_state_is_put_down_to_its_kind(zero: Literal[1, 2, 3], offload: bool) -> None:
    """As the plan of memory has it. At its peak a step has what it gathers, too."""
    case, way = replace(PLAIN, precision="bf16"), Way(dp=2, zero=zero, offload=offload, micro_batch_size=2)
    config, found = configured(case, way), on_paper(case, way, device="cuda")
    planned = rank_memory(config.model, config.parallel, config.train, vocab_size=case.vocab_size, device="cuda")
    check_memory(found.memory, replace(planned, operators=found.memory.operators))
    always = planned.parameters + planned.gradients + planned.optimizer
    assert (found.memory.buffers > 0) == (zero >= 2)
    assert found.peak.bytes >= always + found.memory.buffers


def test_arithmetic_is_what_torch_counts() -> None:
    case, way = Case(), Way(micro_batch_size=2)  # with dropout attention is spelled out, which torch can count on CPUs
    _, step = real_step(configured(case, way), case, way)
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **keys: 2 * a[0] * a[1] * b[1]}  # which torch leaves out
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        step()
    assert on_paper(case, way).flops == counter.get_total_flops()


def test_arithmetic_is_the_closed_formula() -> None:
    """A causal kernel counts in full here, and half in the formula."""
    case, way = replace(PLAIN, seq_length=32, vocab_size=128), Way(micro_batch_size=2)
    config = configured(case, way)
    found, tokens = on_paper(case, way), case.global_batch_size * 32
    attention = sum(each.flops for each in found.operators if each.is_attention)
    formula = trained_architecture(config, 128).flops_per_token * tokens
    products = formula - tokens * case.num_layers * 3 * 2 * 32 * 16  # half of 2 products of [s, s, h], forward and back
    assert found.flops - attention == products
    forward = tokens * case.num_layers * 2 * 2 * 32 * 16
    assert attention == forward * (1 + 2.5), "backward multiplies five times, the scores once more among them"


def test_of_a_table_the_rows_that_are_looked_up_are_read_and_written() -> None:
    with Recorder(StandIn("cpu")) as recorder:
        torch.nn.functional.embedding(torch.tensor([3, 5, 5]), torch.zeros(1000, 16))
    (found,) = (each for each in recorder.sections[0].operators if each.name == "embedding")
    assert found.bytes == 2 * 3 * 16 * 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_attention_is_a_product_of_queries_and_keys_for_each_head_of_each_sample(device: str) -> None:
    """Two samples with four heads of four numbers."""
    case = replace(PLAIN, precision="bf16", seq_length=32)
    found = on_paper(case, Way(micro_batch_size=2), device=device)
    assert {each.product for each in found.operators if each.is_attention} == {(2 * 4, 32, 32, 4)}


def test_launches_are_the_operators_that_compute() -> None:
    found = on_paper(PLAIN, Way())
    names = {each.name for each in found.operators}
    assert found.launches == len(list(found.operators)) > 50
    assert not names & {"view", "detach", "empty", "transpose", "t", "_unsafe_view", "slice"}
    assert {"addmm", "native_layer_norm", "_fused_adamw_"} & names


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_run_by_compiled_kernels_is_planned_by_whoever_has_none(precision: Literal["bf16", "fp32"]) -> None:
    """As much memory, and one update of all weights."""
    case = replace(PLAIN, precision=precision)
    kernels = Kernels(weight_gradient="compiled", output="compiled", attention="compiled")
    products = Products(fp32=kernels, bf16=kernels)
    config = configured(case, Way())
    walked = [walk(config, case.vocab_size, 0, device="cpu", products=each) for each in (None, products)]
    usual, compiled = (found.memory for found in walked)
    assert (usual.parameters, usual.gradients, usual.optimizer) == (
        compiled.parameters,
        compiled.gradients,
        compiled.optimizer,
    )
    assert "_fused_adamw_" in {each.name for each in walked[1].operators}


def test_kernels_of_a_device_are_asked_for_and_arithmetic_is_told_by_operator() -> None:
    """What runs in CPU memory is none of them; what multiplies most comes first."""
    events = [Operator("mm", 5, 0, "float32"), Operator("bmm", 9, 0, "float32"), Operator("mm", 3, 0, "float32")]
    hosted = [Operator("add", 0, 0, "float32", on_host=where) for where in ("host", "copy", "")]
    sections = (Section(None, [*events]), Section(Action("F", 0), [*hosted]))
    found = Walk(0, {}, Memory(0, 0, 0, 0, 0), sections, 1)
    assert (found.launches, found.flops) == (5, 17)
    assert list(found.flops_by_operator().items()) == [("bmm", 9), ("mm", 8)]


def test_the_peak_has_its_moment() -> None:
    found = on_paper(replace(PLAIN, num_layers=6), Way(pp=4, micro_batch_size=1))
    inputs = found.peak.bytes - found.memory.total
    assert 0 < inputs < 8 * 8 * 8 * 8 and found.peak.action is not None
    assert found.peak.action.kind in "FB" and found.sections[found.peak.place].action == found.peak.action


# --- at scale ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 16_383])
def test_any_of_16384_ranks(rank: int) -> None:
    way = Way(tp=4, pp=8, dp=512, micro_batch_size=1, zero=1)
    found = on_paper(replace(PLAIN, num_layers=6, global_batch_size=1024), way, rank)
    assert found.coordinates == {"pp": rank // 2048, "dp": rank // 4 % 512, "tp": rank % 4}
    assert max(each.bytes for each in found.entries if each.axis == "dp") > 0


def test_offload_takes_host_memory() -> None:
    """On a GPU: the optimizer works on the CPU, and gradients and weights cross between both."""
    case, way = replace(PLAIN, precision="bf16"), Way(dp=2, zero=1, offload=True, micro_batch_size=2)
    found = on_paper(case, way, device="cuda")
    where = {(each.name, each.on_host) for each in found.operators if each.on_host}
    assert ("_fused_adamw_", "host") in where and ("copy_", "copy") in where
    assert found.memory.optimizer == 0 < found.memory.host


def test_the_device_changes_what_runs() -> None:
    on_cpu, on_gpu = (
        {each.name for each in on_paper(replace(PLAIN, precision="bf16"), Way(), device=device).operators}
        for device in ("cpu", "cuda")
    )
    assert "_scaled_dot_product_flash_attention_for_cpu" in on_cpu - on_gpu
    assert "_scaled_dot_product_flash_attention" in on_gpu - on_cpu


def test_memory_of_the_device() -> None:
    """The torch that runs this has no GPU: nothing above may have asked for one."""
    assert not torch.cuda.is_initialized()
