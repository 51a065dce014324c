"""What theory says a rank sends in a step, beside what the ledger sees when the step is walked through on paper."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, Literal

import pytest
import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.config.thermometers import ALL_SITES, SiteName, ThermometersConfig
from colonnade.errors import ConfigError
from colonnade.mesh.mesh import paper_mesh
from colonnade.planner import traffic as planner_traffic
from colonnade.planner.step import Step
from colonnade.planner.traffic import Flow, totals, traffic
from colonnade.tensor_parallel import cross_entropy
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from tests.parity.runs import CPU, LORA, PARTS, Case, Way, configured, microbatches
from tests.planner.once import weights_drawn_once

VOCAB = 37


@pytest.fixture(scope="module", autouse=True)
def _weights() -> Iterator[None]:
    """The ranks of a layout have most of them in common, and so have layouts."""
    with weights_drawn_once():
        yield


def theory(
    case: Case, way: Way, rank: int, *, skipped: bool = False, measured: tuple[SiteName, ...] = ()
) -> list[Flow]:
    config = configured(case, way)
    stated = trained_architecture(config, VOCAB)
    step = Step(
        config.model, config.parallel, config.train, config.optim.name, VOCAB, rank, skipped, cuda=False, stated=stated
    )
    return traffic(replace(step, measured=measured))


def seen(
    case: Case, way: Way, rank: int, *, measured: tuple[SiteName, ...] = ()
) -> tuple[dict[tuple[str, str], tuple[int, int]], bool]:
    """(count, bytes) by (operation, axis) of one training step, and whether it was skipped."""
    config, mesh = configured(case, way), paper_mesh(way.layout, rank)
    config = config.model_copy(
        update={"thermometers": ThermometersConfig(every=int(bool(measured)), sites=measured or ALL_SITES)}
    )
    state = build_state(config, mesh, VOCAB, CPU)
    mesh.ledger.clear()
    with torch.no_grad():
        for bucket in state.buckets:
            bucket.master.fill_(0.01)
    result = train_step(state, microbatches(case, way, 0, mesh), mesh, config.train)
    ledger = mesh.ledger
    return {key: (ledger.counts[key], ledger.bytes[key]) for key in ledger.counts}, result.skipped


def assert_agree(case: Case, way: Way, *, measured: tuple[SiteName, ...] = ()) -> None:
    for rank in range(way.layout.num_ranks):
        found, skipped = seen(case, way, rank, measured=measured)
        expected = theory(case, way, rank, skipped=skipped, measured=measured)
        assert totals(expected) == found, f"rank {rank} of {way}, {case}"


WAYS = [
    Way(),
    Way(tp=2, micro_batch_size=2),
    Way(tp=4, micro_batch_size=4, sequence_parallel=True),
    Way(dp=2, micro_batch_size=2),
    *(Way(dp=4, zero=zero, micro_batch_size=1) for zero in (1, 2, 3)),
    *(Way(tp=2, dp=2, zero=zero, micro_batch_size=2, sequence_parallel=True) for zero in (0, 1, 2, 3)),
    Way(pp=4, micro_batch_size=1, schedule="gpipe"),
    Way(pp=2, micro_batch_size=1, schedule="naive", zero=3, dp=2),
    Way(pp=2, virtual_stages=2, schedule="interleaved", micro_batch_size=2, zero=3, dp=2),
    Way(pp=2, schedule="zero_bubble", micro_batch_size=2, zero=2, dp=2, tp=2, sequence_parallel=True),
    Way(tp=2, micro_batch_size=4, recompute="full"),
    Way(tp=2, micro_batch_size=4, recompute="selective", sequence_parallel=True),
    Way(dp=2, zero=3, micro_batch_size=2, recompute="full", recompute_every=2),
]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("case", [Case(drop=0.0), Case(drop=0.0, tied=False, optimizer="lamb", precision="bf16")])
def test_theory_is_what_the_ledger_sees(case: Case, way: Way) -> None:
    assert_agree(case, way)


@pytest.mark.parametrize("sites", [ALL_SITES, ("residual_stream",), ("attention_logits", "updates")], ids=len)
@pytest.mark.parametrize("block", ["gpt", "labels", "t5"])
def test_a_measured_step(block: Any, sites: tuple[SiteName, ...]) -> None:
    """Thermometers: two all-reduces more, of so many numbers as the whole model has of what is measured."""
    way = Way(tp=2, pp=2, micro_batch_size=2)
    assert_agree(Case(drop=0.0, block=block, parts="upper"), way, measured=sites)
    extra = [flow for flow in theory(Case(block=block), way, 0, measured=sites) if flow.axis == "world"]
    assert sum(flow.count for flow in extra) == 2


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["upper", "lora", "lora on some"])
@pytest.mark.parametrize("block", ["t5", "neox"])
def test_parts_of_other_blocks(block: Any, parts: Any) -> None:
    """A second stream has adapters too; both halves of a block may read one norm."""
    case = Case(drop=0.0, block=block, parts=parts)
    assert_agree(case, Way(tp=2, micro_batch_size=4, sequence_parallel=True, recompute="full"))
    assert_agree(case, Way(tp=2, pp=2, micro_batch_size=4))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("half", ["lora_a", "lora_b"])
@pytest.mark.parametrize("block", ["gpt", "t5", "neox"])
def test_one_half_of_adapters_is_frozen(monkeypatch: pytest.MonkeyPatch, block: Any, half: str) -> None:
    """A frozen A sends a gradient on only where what it reads has one."""
    monkeypatch.setitem(PARTS, "lora", {"frozen": (f"*.{half}",)})
    case = Case(drop=0.0, block=block, parts="lora")
    assert_agree(case, Way(tp=2, micro_batch_size=4, sequence_parallel=True, recompute="full"))
    assert_agree(case, Way(tp=2, pp=2, micro_batch_size=4))


@pytest.mark.parametrize("half", ["lora_a", "lora_b"])
def test_adapters_behind_a_frozen_encoder(monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    """What a decoder's first block reads of the encoder has no gradient, though its own stream has one by then."""
    monkeypatch.setitem(PARTS, "lora", {"frozen": ("encoder.*", f"*.{half}")})
    case = Case(drop=0.0, block="t5", parts="lora")
    assert_agree(case, Way(tp=2, micro_batch_size=4, sequence_parallel=True))


@pytest.mark.one_in(11)
@pytest.mark.parametrize(
    "trained",
    [
        *("norm.weight", "attention_norm.*", "mlp_norm.*", "cross_norm.*"),
        *("attention.qkv.*", "attention.query.*", "attention.key_value.*", "cross.key_value.*", "cross.query.*"),
        *("output.weight", "output.bias", "up.weight", "up.bias", "gate.*", "down.weight", "down.bias"),
    ],
)
def test_one_kind_of_weight_is_trained(monkeypatch: pytest.MonkeyPatch, trained: str) -> None:
    """Of the upper half of the layers: gradients go down to there alone, and what is sent is what they need."""
    monkeypatch.setitem(PARTS, "upper", {"frozen": ("*", f"!*blocks.1.*{trained}")})
    tried = 0
    for block in ("gpt", "llama", "neox", "bert", "t5"):
        case = Case(drop=0.0, block=block, parts="upper")  # type: ignore[arg-type]
        try:
            trained_architecture(configured(case, Way()), VOCAB)
        except ConfigError:  # it has no such weight
            continue
        tried += 1
        assert_agree(case, Way(tp=2, micro_batch_size=4, sequence_parallel=True))
        assert_agree(case, Way(tp=2, pp=2, micro_batch_size=4, recompute="full"))
    assert tried


@pytest.mark.parametrize(
    ("norm_position", "trained"),
    [("pre", "attention.qkv.*"), ("pre", "attention.output.bias"), ("post", "attention_norm.*")],
)
def test_what_is_trained_in_attention_has_its_gradient_through_the_mlp(
    monkeypatch: pytest.MonkeyPatch, norm_position: Any, trained: str
) -> None:
    """Of the first block that is trained: nothing before its attention has one, and what the MLP reads does."""
    monkeypatch.setitem(PARTS, "upper", {"frozen": ("*", f"!*blocks.1.{trained}")})
    case = Case(drop=0.0, parts="upper", norm_position=norm_position)
    assert_agree(case, Way(tp=2, micro_batch_size=4, sequence_parallel=True))
    whole = Way(tp=2, micro_batch_size=4)
    assert_agree(case, whole)
    once = case.global_batch_size // whole.micro_batch_size
    assert [flow.count for flow in theory(case, whole, 0) if " a layer backward" in flow.what] == [once]


@pytest.mark.parametrize(
    ("block", "trained"),
    [("neox", "attention.qkv.weight"), ("llama", "mlp.gate.weight"), ("grouped", "attention.query_norm.weight")],
)
def test_what_one_weight_of_the_first_trained_block_needs(
    monkeypatch: pytest.MonkeyPatch, block: Any, trained: str
) -> None:
    """Of attention beside an MLP, of a gate beside columns that are frozen, and of the norm of queries."""
    monkeypatch.setitem(PARTS, "upper", {"frozen": ("*", f"!*blocks.1.{trained}")})
    case = Case(drop=0.0, block=block, parts="upper")
    assert_agree(case, Way(tp=2, micro_batch_size=4, sequence_parallel=True))
    assert_agree(case, Way(tp=2, micro_batch_size=4))


def test_adapters_of_a_block_without_a_backward_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "lora", {"frozen": ("*blocks.0.*", "embedding*")})
    case = Case(drop=0.0, parts="lora", precision="bf16")
    assert_agree(case, Way(tp=2, micro_batch_size=4, sequence_parallel=True, recompute="full"))


def test_an_adapter_behind_columns_that_are_trained_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the MLP's rows, whose own A is frozen, as is all that comes before the MLP's columns."""
    monkeypatch.setitem(PARTS, "lora", {"frozen": ("*", "!*blocks.1.mlp.up.lora_b", "!*blocks.1.mlp.down.lora_b")})
    case = Case(drop=0.0, parts="lora")
    assert_agree(case, Way(tp=2, micro_batch_size=4, sequence_parallel=True))


@pytest.mark.parametrize(
    "way",
    [
        Way(tp=2, micro_batch_size=4, sequence_parallel=True),
        Way(pp=2, dp=2, zero=1, micro_batch_size=2),
        Way(tp=2, pp=2, micro_batch_size=4, sequence_parallel=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("block", ["preferences", "t5"])
def test_pairs_of_answers_and_two_stacks(block: Any, way: Way) -> None:
    """Pairs are weighed before their loss; a stack's memory is cut as its stream is; a table is shared by slices."""
    assert_agree(Case(drop=0.0, block=block), way)


def test_a_step_that_overflowed_has_no_norms_of_weights() -> None:
    case, way = Case(drop=0.0, optimizer="lamb", precision="fp16", loss_scale=2.0**40), Way(tp=2, micro_batch_size=4)
    assert seen(case, way, 0)[1], "it is skipped"
    assert_agree(case, way)


@pytest.mark.parametrize(
    "trained",
    [
        *("norm.weight", "bias", "dense.weight", "dense.bias", "dense_norm.*", "pooler.weight", "pooler.bias"),
        *("order.weight", "order.bias"),
    ],
)
def test_one_weight_of_two_losses_is_trained(monkeypatch: pytest.MonkeyPatch, trained: str) -> None:
    """Neither loss sends back what nothing before it needs."""
    monkeypatch.setitem(PARTS, "upper", {"frozen": ("*", f"!head.{trained}")})
    case = Case(drop=0.0, block="bert", parts="upper")
    assert_agree(case, Way(tp=2, micro_batch_size=4, sequence_parallel=True))
    assert_agree(case, Way(tp=2, pp=2, micro_batch_size=4))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_losses(way: Way) -> None:
    assert_agree(Case(drop=0.0, block="bert"), way)
    assert_agree(Case(drop=0.0, block="bert", norm_position="post", tied=False, precision="bf16"), way)


@pytest.mark.one_in(19)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_stacks(way: Way) -> None:
    """Streams of two lengths, a memory that is read, sent on and sent back, and what three stages share."""
    assert_agree(Case(drop=0.0, block="t5"), way)
    assert_agree(Case(drop=0.0, block="t5 relu", tied=False, fp32_residual=True, precision="bf16"), way)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(1, 1, 2, 4), (4, 2, 1, 1), (2, 2, 2, 2)])
def test_two_stacks_wherever_they_are_cut(cuts: tuple[int, ...]) -> None:
    for parts in ("all", "upper", "lower", "table"):
        case = Case(drop=0.0, block="t5", parts=parts)  # type: ignore[arg-type]
        assert_agree(case, Way(pp=4, tp=2, cuts=cuts, micro_batch_size=2, sequence_parallel=True))


@pytest.mark.parametrize("parts", ["all", "upper", "lower", "factors"])
def test_a_parallel_residual_sends_as_often(parts: Literal["all", "upper", "lower", "factors"]) -> None:
    """As attention and MLP in turn; frozen parts let the gradient stop elsewhere."""
    assert_agree(Case(drop=0.0, block="neox", parts=parts), Way(tp=2, pp=2, sequence_parallel=True, micro_batch_size=2))


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("block", ["grouped", "window"])
def test_copied_heads_are_summed_over_tp(block: Literal["grouped", "window"], zero: Literal[0, 2]) -> None:
    way = Way(tp=4, dp=2 if zero else 1, zero=zero, micro_batch_size=2)
    assert_agree(Case(drop=0.0, block=block), way)
    summed = [
        flow.bytes
        for rank in range(way.layout.num_ranks)
        for flow in theory(Case(block=block), way, rank)
        if flow.what == "gradients of replicated weights"
    ]
    assert summed and all(summed), "of the slices that have such weights"


def test_an_embedding_is_a_unit_that_reads_tokens_wherever_it_stands() -> None:
    config = configured(Case(), Way(tp=2))
    step = Step(config.model, config.parallel, config.train, config.optim.name, VOCAB, 0, cuda=False)
    first, *blocks, head = step.architecture.units
    decoder = first._replace(name="decoder", kind="decoder")
    both = Step(config.model, config.parallel, config.train, config.optim.name, VOCAB, 0, cuda=False)
    both.__dict__["architecture"] = replace(step.architecture, units=(first, *blocks, decoder, *blocks, head))
    sent, twice = ([flow.count for flow in traffic(each) if flow.what == "embedding forward"] for each in (step, both))
    assert sent == [step.num_microbatches] and twice == [2 * sent[0]]


def drawn(chance: Random) -> tuple[Case, Way]:
    """A combination that can be."""
    pick = chance.choice
    pp = pick((1, 2, 4))
    schedule: Any = (
        pick(("naive", "gpipe", "1f1b", "zero_bubble", *(["interleaved"] if pp < 4 else []))) if pp > 1 else "1f1b"
    )
    way = Way(
        tp=pick((1, 2)),
        pp=pp,
        dp=pick((1, 2)),
        schedule=schedule,
        virtual_stages=2 if schedule == "interleaved" else 1,
        partition=pick(("layers", "parameters")),
        micro_batch_size=pick((1, 2)),
        sequence_parallel=pick((False, True)),
        zero=pick((0, 1, 2, 3)),
        recompute=pick(("none", "selective", "full")),
        recompute_every=pick((1, 2)),
        reduce_precision=pick(("fp32", "16-bit")),
    )
    case = Case(
        drop=0.0,
        tied=pick((False, True)),
        optimizer=pick(("adamw", "lamb")),
        precision=pick(("fp64", "fp32", "bf16", "fp16")),
        position=pick(("learned", "alibi")),
        norm_position=pick(("pre", "post")),
        embedding_norm=pick((False, True)),
        fp32_residual=pick((False, True)),
        num_layers=pick((2, 3)),
        block=pick(("gpt", "llama", "grouped", "window")),
        parts=pick([*PARTS, *LORA]),
    )
    return case, way


@pytest.mark.one_in(9)
@pytest.mark.parametrize("seed", range(40))
def test_theory_holds_in_any_combination(seed: int) -> None:
    assert_agree(*drawn(Random(seed)))


@pytest.mark.parametrize("limit", [150, 50], ids=["as many as fit", "fewer, for their spans are equal"])
def test_a_long_loss_is_gathered_in_chunks(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Of at most so many logits; and all ranks in as many, though the last has less of the vocabulary."""
    for module in (cross_entropy, planner_traffic):
        monkeypatch.setattr(module, "CHUNK_LOGITS", limit)
    for case, way in ((Case(drop=0.0), Way(tp=2, micro_batch_size=2)), (Case(drop=0.0), Way(tp=4, micro_batch_size=4))):
        gathered = of(theory(case, way, 0), "tp", "all_gather")
        assert gathered[0] > 2 * 8 // way.micro_batch_size
        assert_agree(case, way)


# --- theory against the papers ----------------------------------------------------------------------------------------


def of(flows: list[Flow], axis: str, operation: str) -> tuple[int, int]:
    return totals(flows).get((operation, axis), (0, 0))


GPT = ModelConfig(preset="gpt2-8.3b")
S_B_H = GPT.seq_length * 8 * GPT.hidden_size * 2  # bytes of [s, b, h] in bf16, b = 8


def large(**parallel: Any) -> Step:
    layout = ParallelConfig(**parallel)
    train = TrainConfig(steps=1, global_batch_size=64 * layout.dp, micro_batch_size=8, precision="bf16")
    return Step(GPT, layout, train, "adamw", 50257, rank=0, cuda=False)


def test_two_all_reduces_forward_and_two_backward_a_layer() -> None:
    """Megatron-LM paper, section 3: 4 all-reduces of s·b·h a layer; one for the embedding, one for the head."""
    count, size = of(traffic(large(tp=8)), "tp", "all_reduce")
    assert count == 8 * (4 * GPT.num_layers + 2) and size == count * S_B_H


def test_sequence_parallelism_sends_as_much_and_one_gather_more_before_each_weight_gradient() -> None:
    """Korthikanti et al., section 4.2.2. An all-reduce moves what a reduce-scatter and an all-gather move."""
    whole = of(traffic(large(tp=8)), "tp", "all_reduce")[0]
    flows = traffic(large(tp=8, sequence_parallel=True))
    scattered, size = of(flows, "tp", "reduce_scatter")
    gathered, parts = of([flow for flow in flows if "loss" not in flow.what], "tp", "all_gather")
    again = 8 * 2 * GPT.num_layers
    assert scattered == whole and size == scattered * S_B_H
    assert gathered == whole + again and parts == gathered * S_B_H // 8


def test_a_loss_is_computed_in_larger_chunks_on_cuda() -> None:
    """8,192 tokens of 6,288 rows each: one and a half times 2²⁵ logits, of which a GPU computes eight times as many."""
    gathers = [
        of([flow for flow in traffic(replace(large(tp=8), cuda=cuda)) if "loss" in flow.what], "tp", "all_gather")
        for cuda in (False, True)
    ]
    assert [count for count, _ in gathers] == [8 * 2, 8] and gathers[0][1] == gathers[1][1]


def test_zero_1_sends_what_zero_0_sends_in_two_halves() -> None:
    """Rajbhandari et al., section 7: an all-reduce is a reduce-scatter and an all-gather (here the second in bf16)."""
    _, reduced = of([f for f in traffic(large(dp=64)) if "gradients" in f.what], "dp", "all_reduce")
    _, scattered = of(traffic(large(dp=64, zero=1)), "dp", "reduce_scatter")
    _, gathered = of(traffic(large(dp=64, zero=1)), "dp", "all_gather")
    assert abs(scattered / reduced - 1) < 1e-3 and abs(gathered * 64 / (scattered / 2) - 1) < 1e-12


def test_zero_2_and_3_send_gradients_for_each_micro_batch() -> None:
    once = of(traffic(large(dp=8, zero=1)), "dp", "reduce_scatter")
    for zero in (2, 3):
        assert of(traffic(large(dp=8, zero=zero)), "dp", "reduce_scatter") == (8 * once[0], 8 * once[1])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_zero_3_gathers_blocks_forward_and_backward(recompute: str) -> None:
    """But not the head, nor the embedding of the next micro-batch, nor a layer computed again: they are still there."""
    step = large(dp=8, zero=3, recompute=recompute)
    step = replace(step, model=GPT.model_copy(update={"tie_embeddings": False}))
    times = {"embedding.tokens": 9, "embedding": 9, "head": 8}
    gathers = {part: times.get(part, 16) for part in step.lengths}
    size = sum(count * step.lengths[part] * 2 // 8 for part, count in gathers.items())
    assert of(traffic(step), "dp", "all_gather") == (sum(gathers.values()), size)


def test_a_stage_in_the_middle_sends_the_stream_on_and_its_gradient_back() -> None:
    flows = traffic(replace(large(pp=4), rank=2))
    assert of(flows, "pp", "send") == of(flows, "pp", "receive") == (16, 16 * S_B_H)
    assert of(traffic(replace(large(pp=4, tp=8, sequence_parallel=True), rank=16)), "pp", "send") == (16, 2 * S_B_H)


def test_a_table_at_both_ends_is_summed_once() -> None:
    tied = of(traffic(large(pp=4)), "ends", "all_reduce")
    assert tied == (1, 4 * 50304 * GPT.hidden_size)  # 50,257 rows in whole tiles
    assert of(traffic(replace(large(pp=4), rank=1)), "ends", "all_reduce") == (0, 0)


def test_the_serial_run_sends_nothing() -> None:
    assert traffic(large()) == []
