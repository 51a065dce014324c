"""Predicted memory beside that of a training step: any rank of any layout, in one process, on paper collectives.

Buffers are exact to the byte; so are activations here, on this machine's kernels, but for the losses. The project
promises 5 %.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.architecture.block import block_weights
from colonnade.architecture.families import architecture_of
from colonnade.architecture.parts import trained_architecture
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, ParallelConfig, TrainConfig
from colonnade.data.loader import Batch
from colonnade.kernels.choice import BF16_UNITS, WIDENED, Products
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.planner.memory import Memory, buffer_bytes, rank_memory, resident
from colonnade.planner.predict import predict
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from colonnade.verify.memory import measure
from tests.blocks import LLAMA_BLOCK
from tests.distributed import run_on_ranks
from tests.planner.once import units_run_once, weights_drawn_once

VOCAB, SEQ_LENGTH, SAMPLES, MICROBATCHES, CPU = 50, 16, 2, 4, torch.device("cpu")
SLACK = 8 * MICROBATCHES  # bytes: the losses


@pytest.fixture(scope="module", autouse=True)
def _once() -> Iterator[None]:
    """Stages, schedules and stages of ZeRO have units and weights in common."""
    with units_run_once(), weights_drawn_once():
        yield


def config(
    parallel: Mapping[str, Any],
    *,
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    documents: str = "joined",
    parts: Mapping[str, Any] | None = None,
    lora: Mapping[str, Any] | None = None,
) -> Config:
    shape = {"num_layers": 6, "hidden_size": 32, "num_heads": 4, "seq_length": SEQ_LENGTH}
    shape |= {"dropout": 0.1, "attention_dropout": 0.1}
    batch = SAMPLES * MICROBATCHES * parallel.get("dp", 1)
    length = {"steps": 3, "global_batch_size": batch, "micro_batch_size": SAMPLES}
    sections = {"model": {**shape, **(model or {})}, "parallel": dict(parallel), "train": {**length, **(train or {})}}
    sections |= {"data": {"documents": documents}, "parts": dict(parts or {}), "lora": dict(lora or {})}
    return Config.model_validate({**sections, "optim": {"learning_rate": 1e-3}, "run": {"folder": "unused"}})


def measured(run: Config, mesh: Mesh) -> Memory:
    """Of the second step."""
    state = build_state(run, mesh, VOCAB, CPU)

    def step() -> object:
        s = run.model.seq_length
        tokens = torch.randint(0, VOCAB, (MICROBATCHES, s + 1, SAMPLES))
        mask, samples = torch.ones(s, SAMPLES), torch.arange(SAMPLES)
        documents = None
        if run.data.documents == "separate":
            documents = (torch.arange(s) * 3 // s)[:, None].expand(-1, SAMPLES).contiguous()
        batches = [Batch(each[:-1], each[1:], mask, samples, documents, documents) for each in tokens]
        return train_step(state, batches, mesh, run.train)

    step()
    return measure(state, step)[1]


def compare(predicted: Memory, found: Memory, tp: int = 1) -> None:
    for kind in ("parameters", "gradients", "optimizer", "host"):
        assert getattr(predicted, kind) == getattr(found, kind), kind
    assert predicted.buffers == found.buffers
    assert 0 <= found.activations - predicted.activations <= SLACK
    unknown = SAMPLES * SEQ_LENGTH * (2 * 32 * 4 + 16) if tp > 1 else 0  # whose labels are this rank's: all, at most
    assert 0 <= predicted.operators - found.operators <= SLACK + unknown


def check(run: Config) -> None:
    parallel = run.parallel
    layout = Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    for stage in range(parallel.pp):
        mesh = paper_mesh(layout, layout.rank_at(pp=stage, dp=parallel.dp - 1, tp=parallel.tp - 1))
        compare(predict(run, VOCAB, stage=stage, device=CPU), measured(run, mesh), parallel.tp)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("fp64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_stage_of_zero(zero: int, precision: str) -> None:
    check(config({"dp": 3, "zero": zero}, train={"precision": precision}))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zero_bubble"])
def test_every_schedule(schedule: str, zero: int) -> None:
    check(config({"pp": 2, "dp": 2, "zero": zero, "schedule": schedule}))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("pp", "virtual_stages"), [(1, 2), (2, 2), (4, 2)])
def test_virtual_stages(pp: int, virtual_stages: int, zero: int) -> None:
    check(config({"pp": pp, "dp": 2, "zero": zero, "schedule": "interleaved", "virtual_stages": virtual_stages}))


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
def test_tensor_and_sequence_parallel(pp: int, sequence_parallel: bool) -> None:
    check(config({"tp": 2, "pp": pp, "sequence_parallel": sequence_parallel}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute",
    [{"recompute": "selective"}, {"recompute": "full"}, {"recompute": "full", "recompute_every": 2}],
    ids=["selective", "full", "every-2"],
)
@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_recomputation(pp: int, recompute: dict[str, Any]) -> None:
    check(config({"pp": pp, "dp": 2, "zero": 3, **recompute}))


FROZEN = {
    "upper": ["embedding*", "blocks.[0-2].*"],
    "lower": ["blocks.[2-5].*", "head.*"],
    "biases": ["*.weight", "!*norm.weight"],
}


@pytest.mark.slow
@pytest.mark.parametrize("which", [*FROZEN, "lora"])
@pytest.mark.parametrize(
    ("parallel", "precision"),
    [
        ({"pp": 2, "schedule": "zero_bubble"}, "bf16"),
        ({"dp": 2, "zero": 1}, "fp32"),
        ({"dp": 2, "zero": 3, "recompute": "full", "recompute_every": 2}, "bf16"),
        ({"tp": 2, "sequence_parallel": True}, "fp32"),
    ],
    ids=["zero_bubble", "zero 1", "zero 3, full", "tp"],
)
def test_frozen_parts(which: str, parallel: dict[str, Any], precision: str) -> None:
    lora = {"rank": 4, "dropout": 0.1, "targets": ["attention.qkv", "mlp.*"]} if which == "lora" else {}
    parts = {"frozen": FROZEN.get(which, [])}
    check(config(parallel, parts=parts, lora=lora, train={"precision": precision}))


@pytest.mark.slow
def test_what_is_frozen_takes_parameters_alone() -> None:
    """In bf16 a trained weight takes 2 bytes, 4 of gradient, 4 of master weight and 8 of moments; a frozen one 2."""
    every, half = (
        predict(config({}, parts={"frozen": frozen}, train={"precision": "bf16"}), VOCAB, stage=0, device=CPU)
        for frozen in ([], ["blocks.[0-2].*"])
    )
    assert half.parameters == every.parameters
    frozen = 3 * sum(weight.size for weight in block_weights(config({}).model))
    assert every.gradients - half.gradients == 4 * frozen
    assert every.optimizer - half.optimizer == 12 * frozen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero_3_shares_out_what_is_frozen_too(precision: str) -> None:
    """Below it every rank keeps all of it."""
    kept = {}
    for zero in (0, 2, 3):
        run = config({"dp": 4, "zero": zero}, parts={"frozen": ["blocks.*"]}, train={"precision": precision})
        kept[zero] = resident(trained_architecture(run, VOCAB), run.parallel, run.train, stage=0).parameters
    assert kept[0] == kept[2] == 4 * kept[3]


def test_offload_takes_the_optimizer_off_the_device_that_a_search_counts() -> None:
    """In bf16 parameters of 2 bytes, gradients of 4, and 12 for the fp32 weights and both moments."""
    for offload, num_bytes in ((False, 18_000), (True, 6_000)):
        run = config({"dp": 1, "offload": offload}, train={"precision": "bf16"})
        assert buffer_bytes(1_000, run.parallel, run.train) == num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_offload(zero: int) -> None:
    run = config({"dp": 2, "zero": zero, "offload": True}, train={"precision": "bf16"})
    check(run)
    assert predict(run, VOCAB, stage=0, device=CPU).optimizer == 0


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_offload_from_a_gpu_brings_gradients_along(zero: int) -> None:
    """Beside the master weights and two moments: four times the fp32 numbers of this rank's slice."""
    run = config({"dp": 2, "zero": zero, "offload": True}, train={"precision": "bf16"})
    held = predict(run, VOCAB, stage=0, device=torch.device("cuda"))
    assert held.host == 4 * 2 * held.parameters // (2 if zero else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        {"tie_embeddings": False, "norm_position": "post"},
        {"position": "alibi", "embedding_norm": True, "dropout": 0.0, "attention_dropout": 0.0},
        {"fp32_residual": True},
    ],
    ids=["untied-post", "bloom", "yalm"],
)
def test_other_models(model: dict[str, Any]) -> None:
    check(config({"tp": 2, "pp": 2, "dp": 2, "zero": 2}, model=model, train={"precision": "bf16"}))


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_deferred_weight_gradients_share_memory_with_the_rest(norm_position: str) -> None:
    """Without dropout the gradient that comes to a block is that of its last product; post-norm, what comes in is the
    input of its first.
    """
    plain = {"dropout": 0.0, "attention_dropout": 0.0, "norm_position": norm_position}
    check(config({"pp": 2, "schedule": "zero_bubble"}, model=plain))


LLAMA = {
    **LLAMA_BLOCK,
    "tie_embeddings": False,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 40,
    "query_key_norm": True,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


@pytest.mark.one_in(11)
@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({}, {}),
        ({"tp": 4, "sequence_parallel": True}, {"dropout": 0.1}),
        ({"tp": 2, "pp": 2, "schedule": "zero_bubble"}, {"window": 5}),
        ({"pp": 2, "dp": 2, "zero": 3, "recompute": "full"}, {"attention_dropout": 0.1}),
        ({"pp": 2, "schedule": "gpipe", "recompute": "selective"}, {"attention_dropout": 0.1, "window": 5}),
    ],
    ids=["one", "tp beyond heads", "zero_bubble", "full", "selective"],
)
@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_llama(parallel: dict[str, Any], model: dict[str, Any], documents: str) -> None:
    precision = "bf16" if parallel.get("tp") else "fp32"
    check(config(parallel, model={**LLAMA, **model}, train={"precision": precision}, documents=documents))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("attention_dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"pp": 2},
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        {"tp": 2, "recompute": "full"},
        {"schedule": "zero_bubble"},
    ],
    ids=["one", "1f1b", "interleaved", "full", "zero_bubble"],
)
def test_documents_that_do_not_see_each_other(parallel: dict[str, Any], attention_dropout: float) -> None:
    long = {"num_layers": 2, "hidden_size": 16, "seq_length": 128, "attention_dropout": attention_dropout}
    if "virtual_stages" in parallel:
        long["num_layers"] = 6
    check(config(parallel, model=long, documents="separate"))


@pytest.mark.slow
def test_uneven_cuts() -> None:
    check(config({"pp": 3, "cuts": [1, 6, 1]}))


@pytest.mark.slow
def test_gradients_that_cross_ranks_in_16_bits_take_a_copy() -> None:
    run = config({"dp": 2, "zero": 3}, train={"precision": "bf16", "reduce_precision": "16-bit"})
    narrow, wide = (
        predict(each, VOCAB, stage=0, device=CPU)
        for each in (run, config({"dp": 2, "zero": 3}, train={"precision": "bf16"}))
    )
    found = measured(run, paper_mesh(Layout(dp=2), 0))  # on paper the copy is gone at once
    assert found.buffers <= narrow.buffers < wide.buffers + narrow.parameters


def test_operands_that_the_chosen_kernels_widen_are_there_while_they_run() -> None:
    """And are kept for backward; whatever this processor would choose by itself."""
    run = config({}, train={"precision": "bf16"})
    widened, as_they_are = (
        predict(run, VOCAB, stage=0, device=CPU, products=Products(bf16=kernels)) for kernels in (WIDENED, BF16_UNITS)
    )
    assert widened.operators > as_they_are.operators and widened.state == as_they_are.state


def test_ranks_that_really_talk() -> None:
    run = config({"dp": 2, "zero": 3})
    predicted = predict(run, VOCAB, stage=0, device=CPU)

    def on_rank(rank: int, num_ranks: int) -> Memory:
        return measured(run, build_mesh(Layout(dp=2), rank))

    for found in run_on_ranks(on_rank, 2):
        compare(predicted, found)


# --- properties of the formulas --------------------------------------------------------------------------------------

PARALLEL = st.builds(
    lambda tp, pp, dp, zero: ParallelConfig(tp=tp, pp=pp, dp=dp, zero=zero),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.integers(1, 64),
    st.sampled_from([0, 1, 2, 3]),
)
MODEL = ModelConfig(num_layers=8, hidden_size=64, num_heads=8, seq_length=32, dropout=0.1, attention_dropout=0.1)


def held(parallel: ParallelConfig, precision: str = "bf16") -> list[Memory]:
    train = TrainConfig.model_validate(
        {"steps": 1, "global_batch_size": 4 * parallel.dp, "micro_batch_size": 1, "precision": precision}
    )
    return [resident(architecture_of(MODEL, 1000), parallel, train, stage=stage) for stage in range(parallel.pp)]


@pytest.mark.slow
@settings(deadline=None)
@given(PARALLEL)
def test_a_higher_stage_of_zero_keeps_less(parallel: ParallelConfig) -> None:
    kept = []
    for zero in (0, 1, 2, 3):
        stages = held(parallel.model_copy(update={"zero": zero}))
        kept.append(sum(each.parameters + each.gradients + each.optimizer for each in stages))
    assert kept == sorted(kept, reverse=True)
    if parallel.dp > 1:
        assert len(set(kept)) == 4


@settings(deadline=None)
@given(PARALLEL, st.sampled_from(["fp32", "bf16", "fp64"]))
def test_16_bytes_an_element(parallel: ParallelConfig, precision: str) -> None:
    """Parameters, gradients, master weights and moments, all slices of all dp ranks joined."""
    whole = held(parallel.model_copy(update={"zero": 0}), precision)
    per_element = {"fp32": 16, "bf16": 18, "fp64": 32}[precision]
    elements = {"fp32": 4, "bf16": 2, "fp64": 8}[precision]
    for each in whole:
        total = each.parameters + each.gradients + each.optimizer
        assert total * elements == each.parameters * per_element
    cut = held(parallel.model_copy(update={"zero": 3}), precision)
    for one, of_all in zip(cut, whole, strict=True):
        assert (one.parameters + one.gradients + one.optimizer) * parallel.dp == (
            of_all.parameters + of_all.gradients + of_all.optimizer
        )


@pytest.mark.slow
def test_recomputation_and_sequence_parallelism_keep_less() -> None:
    less = [
        {},
        {"recompute": "selective"},
        {"recompute": "full", "recompute_every": 4},
        {"recompute": "full"},
        {"recompute": "full", "sequence_parallel": True},
    ]
    train = TrainConfig(steps=1, global_batch_size=4, micro_batch_size=1, precision="bf16")
    kept = [
        rank_memory(MODEL, ParallelConfig.model_validate({"tp": 2, **keys}), train, vocab_size=1000).activations
        for keys in less
    ]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


# --- BLOOM-176B ------------------------------------------------------------------------------------------------------

BLOOM = ModelConfig(
    num_layers=70,
    hidden_size=14336,
    num_heads=112,
    seq_length=2048,
    vocab_size=250_880,
    position="alibi",
    embedding_norm=True,
    dropout=0.0,
    attention_dropout=0.0,
)


def bloom(stage: int, **keys: Any) -> Memory:
    parallel = ParallelConfig.model_validate({"tp": 4, "pp": 12, "dp": 8, "zero": 1, "recompute": "full", **keys})
    train = TrainConfig(steps=1, global_batch_size=512, micro_batch_size=2, precision="bf16")
    return rank_memory(BLOOM, parallel, train, vocab_size=250_880, stage=stage)


@pytest.mark.slow
def test_bloom_fits_its_machine_with_zero_1_and_not_without() -> None:
    """384 A100 of 80 GB as tp 4 × pp 12 × dp 8, ZeRO stage 1."""
    assert bloom(0).total < 50e9
    assert bloom(0, zero=0).total > 80e9
    assert bloom(0, recompute="none").total > 80e9


@pytest.mark.slow
def test_blooms_parts_weigh_what_was_published() -> None:
    """In bf16 the embedding weighs 7.2 GB and a block 4.9 GB; the model has 176B parameters."""
    first, middle, last = (bloom(stage).parameters * 4 for stage in (0, 5, 11))  # over tp
    block, table = middle / 6, first - 5 * middle / 6
    assert block / 1e9 == pytest.approx(4.9, abs=0.05)
    assert table / 1e9 == pytest.approx(7.2, abs=0.05)
    assert (first + 10 * middle + last - table) / 2 / 1e9 == pytest.approx(176, abs=0.5)  # tied: both ends hold it
