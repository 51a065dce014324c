"""What units are predicted to keep beside the tensors that their forward and backward really leave behind."""

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Unit
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.kernels import choice
from colonnade.kernels.choice import Products
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.model.stack import Stack
from colonnade.pipeline.carry import Carry, backward_from, leaves
from colonnade.planner import operators
from colonnade.planner.example import example_inputs
from colonnade.planner.kept import Deferred, Kept, kept_of, most_of
from colonnade.planner.live import LiveTensors
from colonnade.planner.stand_in import META, StandIn
from colonnade.tasks.tasks import TASKS
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.train.state import DTYPES
from tests.blocks import LLAMA_BLOCK
from tests.distributed import run_on_ranks
from tests.parity.runs import Case, Way, configured

VOCAB, SEQ_LENGTH, BATCH = 50, 16, 3
MODELS: list[dict[str, Any]] = [
    {"dropout": 0.0, "attention_dropout": 0.0},
    {"dropout": 0.1, "attention_dropout": 0.0, "position": "alibi"},
    {"dropout": 0.0, "attention_dropout": 0.1, "norm_position": "post"},
    {"dropout": 0.1, "attention_dropout": 0.1, "embedding_norm": True, "fp32_residual": True},
    {"dropout": 0.1, "attention_dropout": 0.1, "norm_position": "post", "fp32_residual": True, "position": "alibi"},
    {"dropout": 0.1, "attention_dropout": 0.1, "ffn_hidden_size": 40},
]
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
LLAMA: dict[str, Any] = {
    **LLAMA_BLOCK,
    "tie_embeddings": False,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 40,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMAS: dict[str, dict[str, Any]] = {
    "rotary": {"position": "rotary"},
    "rmsnorm": {"norm": "rmsnorm"},
    "swiglu": {"activation": "swiglu", "dropout": 0.0},
    "grouped heads": {"num_key_value_heads": 2, "attention_dropout": 0.0},
    "one head of keys": {"num_key_value_heads": 1},
    "q/k norm": {"query_key_norm": True, "attention_dropout": 0.0},
    "window": {"window": 5, "attention_dropout": 0.0},
    "window and dropout": {"window": 5},
    "wide heads": {"head_dim": 24},
    "no bias": {"bias": False},
    "LLaMA": LLAMA,
    "LLaMA with dropout": {**LLAMA, "dropout": 0.1, "attention_dropout": 0.1},
    "LLaMA, everything": {**LLAMA, "window": 5, "query_key_norm": True, "head_dim": 12, "fp32_residual": True},
}


def model_of(keys: Mapping[str, Any]) -> ModelConfig:
    shape = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "seq_length": SEQ_LENGTH}
    return ModelConfig.model_validate({**shape, **keys})


def train_of(precision: str) -> TrainConfig:
    return TrainConfig.model_validate(
        {"steps": 1, "global_batch_size": BATCH, "micro_batch_size": BATCH, "precision": precision}
    )


def predicted(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: str,
    documents: bool = False,
    products: Products | None = None,
) -> dict[str, Kept]:
    given = {"vocab_size": VOCAB, "device": "cpu", "separate_documents": documents, "products": products}
    return kept_of(model, parallel, train_of(precision), **given)


def built(
    model: ModelConfig, parallel: ParallelConfig, precision: str, mesh: Mesh, products: Products | None = None
) -> Stack:
    dtype = DTYPES[precision]
    kernels = products or choice.usual()
    cut = Parallel(mesh.tp, parallel.sequence_parallel, parallel.recompute == "selective", products=kernels)
    stack: Stack = TASKS[model.kind_and_head].build(model, VOCAB, cut, None).to(dtype)
    for weight in stack.parameters():
        torch.nn.init.normal_(weight, std=0.02)
        weight.grad_dtype = torch.promote_types(dtype, torch.float32)
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    return stack


def left_by_each_unit(stack: Stack, inputs: Any) -> dict[str, tuple[int, int, int]]:
    """Bytes of every unit but its losses: after its forward; of another one's beside it; of deferred weight gradients,
    with what they share with the rest of the program.
    """
    found, carry = {}, ()
    for name in stack.units():
        (unit,) = stack.architecture.named([name])
        entry = leaves(carry)
        with LiveTensors() as live:
            carry = stack.run(name, entry, inputs)
            first = live.bytes.total()
            beside = stack.run(name, entry, inputs)
            second = live.bytes.total() - first
            del beside
        carry = tuple(x.detach() for x in carry)  # nothing of this unit is there when the next one runs
        losses = sum(x.untyped_storage().nbytes() for x in carry) if unit.is_loss else 0
        found[name] = first - losses, second - losses, left_behind(stack, unit, entry, inputs)
    return found


def left_behind(stack: Stack, unit: Unit, entry: Carry, inputs: Any) -> int:
    with LiveTensors() as live:
        fresh = tuple(torch.empty_like(x).copy_(x.detach()).requires_grad_(x.requires_grad) for x in entry)
        out = stack.run(unit.name, fresh, inputs)
        with stack.parallel.weight_gradients.deferred() as queue:
            backward_from(out, None if unit.is_loss else tuple(torch.ones_like(x) for x in out))
        del fresh, out
        left = live.bytes.total()
        queue.run()
    assert live.bytes.total() == 0
    return left


def compare(kept: Mapping[str, Kept], stack: Stack, inputs: Any) -> None:
    stream = 0
    for name, (first, second, left) in left_by_each_unit(stack, inputs).items():
        expected = kept[stack.architecture.named([name])[0].kind]
        made = sum(each.size for each in expected.out if each.source is None)
        assert second == expected.inside + made, name
        assert first == second + expected.shared, name
        deferred = expected.deferred
        held = deferred.inside + stream * len(deferred.inputs) + made * len(deferred.gradients)
        assert left == held, name
        stream = made


def check(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: str,
    documents: bool = False,
    products: Products | None = None,
) -> None:
    mesh = paper_mesh(Layout(tp=parallel.tp), parallel.tp - 1)
    stack = built(model, parallel, precision, mesh, products)
    inputs = example_inputs(model, train_of(precision), VOCAB, torch.device("cpu"), separate_documents=documents)
    compare(predicted(model, parallel, precision, documents, products), stack, inputs)


def test_the_most_of_a_run_is_its_own() -> None:
    """Not what was alive at once before it, nor what was there when it began."""
    with LiveTensors() as live:
        large = torch.zeros(1_000)
        small = torch.zeros(10)
        del large
        made, most = most_of(lambda: torch.zeros(5) + torch.zeros(5), live)
    assert most == 3 * 5 * 4 and len(made) == 5 and len(small) == 10


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("keys", MODELS, ids=lambda keys: "-".join(map(str, keys.values())))
def test_what_each_unit_keeps_to_the_byte(keys: dict[str, Any], precision: str) -> None:
    """Half of all combinations: every three of model, format, recomputation and tp together occur."""
    parity = (MODELS.index(keys) + PRECISIONS.index(precision)) % 2
    for (i, recompute), (j, tp) in product(enumerate(("none", "selective")), enumerate((1, 2))):
        if (i + j) % 2 == parity:
            check(model_of(keys), ParallelConfig.model_validate({"tp": tp, "recompute": recompute}), precision)


@pytest.mark.slow
@pytest.mark.parametrize("option", LLAMAS)
def test_what_each_option_of_llama_keeps_to_the_byte(option: str) -> None:
    """On four ranks there are more of them than heads of keys and values."""
    layouts: list[tuple[str, dict[str, Any]]] = [
        ("fp32", {}),
        ("bf16", {"recompute": "selective"}),
        ("bf16", {"tp": 2}),
        ("fp32", {"tp": 4, "sequence_parallel": True, "recompute": "selective"}),
    ]
    for precision, keys in layouts:
        check(model_of(LLAMAS[option]), ParallelConfig.model_validate(keys), precision)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("attention", "dropout"), [("compiled", 0.0), ("compiled", 0.1), ("blas", 0.1)])
def test_what_compiled_kernels_keep_to_the_byte(attention: choice.Kernel, dropout: float, precision: str) -> None:
    """With dropout as much as without, but for the masks of the stream, and no matrix of queries and keys. Operands of
    attention with dropout are not widened, whatever attention without it does.
    """
    model = model_of({"dropout": dropout, "attention_dropout": dropout})
    kernels = choice.Kernels("native", "native", "compiled", "compiled", attention)
    products = Products(fp32=kernels, bf16=kernels)
    for keys in ({}, {"tp": 2, "recompute": "selective"}):
        check(model, ParallelConfig.model_validate(keys), precision, products=products)
    ours, usual = (predicted(model, ParallelConfig(), precision, products=each) for each in (products, None))
    matrices = BATCH * model.num_heads * SEQ_LENGTH**2
    assert usual["block"].inside - ours["block"].inside >= (4 * matrices if dropout else 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_bert_keeps_to_the_byte(dropout: float) -> None:
    """Padding is seen by all blocks; two losses, a pooler of linear layers that can wait."""
    model = model_of({"kind": "bert", "dropout": dropout, "attention_dropout": dropout, "norm_position": "post"})
    for precision, keys in [("fp32", {}), ("bf16", {"tp": 2, "sequence_parallel": True, "recompute": "selective"})]:
        check(model, ParallelConfig.model_validate(keys), precision)
    kept = predicted(model, ParallelConfig(), "fp32")
    assert (kept["head"].losses, kept["head"].deferred.inside > 0) == (2, True)
    assert kept["block"].shared == BATCH * SEQ_LENGTH**2


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_what_units_share_of_separate_documents(attention_dropout: float) -> None:
    model = model_of({**LLAMA, "attention_dropout": attention_dropout})
    check(model, ParallelConfig(), "fp32", documents=True)
    kept = predicted(model, ParallelConfig(), "fp32", documents=True)
    assert {kind: each.shared for kind, each in kept.items()} == {
        "embedding": 0,
        "block": BATCH * SEQ_LENGTH**2,
        "head": 0,
    }


def test_what_has_no_backward_leaves_nothing_behind() -> None:
    """Nor does the first block that is trained make a gradient of what it reads."""
    case, way = Case(drop=0.0, precision="bf16", parts="upper", num_layers=3, tied=False), Way(micro_batch_size=2)
    config = configured(case, way)
    stated = trained_architecture(config, VOCAB)
    kept = kept_of(config.model, config.parallel, config.train, vocab_size=VOCAB, device="cpu", architecture=stated)
    embedding, frozen, first, other, _ = (kept[unit.kind] for unit in stated.units)
    for each in (embedding, frozen):
        assert (each.inside, each.backward, each.deferred) == (0, 0, Deferred())
    assert [each.unread for each in (frozen, first, other)] == [(0,), (0,), ()], "places that get no gradient"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_that_really_talk_keep_as_much(sequence_parallel: bool) -> None:
    model = model_of(LLAMA)
    parallel = ParallelConfig(tp=2, sequence_parallel=sequence_parallel)
    kept = predicted(model, parallel, "fp32")

    def on_rank(rank: int, num_ranks: int) -> None:
        stack = built(model, parallel, "fp32", build_mesh(Layout(tp=2), rank))
        compare(kept, stack, example_inputs(model, train_of("fp32"), VOCAB, torch.device("cpu")))

    run_on_ranks(on_rank, 2)


def test_a_block_of_the_paper() -> None:
    """Korthikanti et al., table 2: 34·s·b·h + 5·n·s²·b bytes for bf16 on one rank.

    They keep the dropped probabilities beside softmax's result and the mask, of which these two make them; and leave
    the norms' statistics out.
    """
    h, n, s, b = 128, 8, 64, 2
    model = ModelConfig(num_layers=1, hidden_size=h, num_heads=n, seq_length=s, dropout=0.1, attention_dropout=0.1)
    train = TrainConfig(steps=1, global_batch_size=b, micro_batch_size=b, precision="bf16")
    ours = kept_of(model, ParallelConfig(), train, vocab_size=VOCAB, device="cuda")["block"]
    paper = 34 * s * b * h + 5 * n * s * s * b
    dropped = 2 * n * s * s * b
    statistics = 2 * 2 * 4 * s * b
    assert ours.inside + sum(each.size for each in ours.out) == paper - dropped + statistics


def test_a_block_of_llama() -> None:
    """The rows of docs/memory.md for LLaMA's options, for 16 bits on a GPU."""
    h, n, m, d, f, s, b, tp = 64, 8, 2, 16, 48, 32, 2, 2
    shape = {"num_layers": 1, "hidden_size": h, "num_heads": n, "head_dim": d, "seq_length": s, "ffn_hidden_size": f}
    model = ModelConfig.model_validate({**LLAMA, **shape, "query_key_norm": True})
    train = TrainConfig(steps=1, global_batch_size=b, micro_batch_size=b, precision="bf16")
    found = kept_of(model, ParallelConfig(tp=tp), train, vocab_size=VOCAB, device="cuda")["block"]
    c, e, tokens, heads = 2, 4, s * b, s * b * n * d // tp
    attention = 5 * heads * c + tokens * n * e // tp + 3 * 8  # the last: where torch's generator was
    query_key_norm = tokens * (n + 2 * m) * d * c // tp + tokens * (n + m) * e // tp
    rest = 2 * tokens * e + 2 * tokens * h * c + 4 * tokens * f * c // tp + s * d * e
    assert found.inside + found.out[0].size == 2 * tokens * h * c + attention + query_key_norm + rest


# --- kernels of a device that is not here -----------------------------------------------------------------------------


def attended(device: Any, precision: str, **mask: Any) -> int:
    """Bytes that attention keeps besides its operands, 2 samples of 4 heads of 8 features, 32 tokens."""
    heads = [torch.empty(2, 4, 32, 8, dtype=DTYPES[precision], device=META, requires_grad=True) for _ in range(3)]
    with StandIn(device), LiveTensors() as live:
        out = torch.nn.functional.scaled_dot_product_attention(*heads, **mask)
        return live.bytes.total() - out.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("device", "precision", "has_bias", "kept"),
    [
        ("cpu", "fp32", False, 4 * 2 * 4 * 32),  # a log-sum-exp a row
        ("cuda", "bf16", False, 4 * 2 * 4 * 32 + 8 * 3),  # and where torch's generator was
        ("cuda", "bf16", True, 4 * 2 * 4 * 32 + 8 * 2),
        ("cuda", "fp32", False, 4 * 2 * 4 * 32 + 8 * 2),
    ],
)
def test_fused_kernels_keep_no_matrix(device: str, precision: str, has_bias: bool, kept: int) -> None:
    bias = torch.zeros(32, 32, dtype=DTYPES[precision], device=META) if has_bias else None
    assert attended(device, precision, attn_mask=bias, is_causal=bias is None) == kept


def test_a_branch_of_cuda_is_taken_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that widens bf16 keeps fp32 gradients for later, a GPU those that came."""
    monkeypatch.setattr(choice, "has_bf16_units", lambda: False)
    model, train = model_of({"dropout": 0.0, "attention_dropout": 0.0}), train_of("bf16")
    tokens = SEQ_LENGTH * BATCH
    cpu, cuda = (
        kept_of(model, ParallelConfig(), train, vocab_size=VOCAB, device=device)["block"].deferred
        for device in ("cpu", "cuda")
    )
    inputs = 2 * tokens * (32 + 32 + 32 + 4 * 32)
    assert (cpu.inside, cpu.gradients) == (inputs + 4 * tokens * (3 * 32 + 32 + 4 * 32 + 32), ())
    assert (cuda.inside, cuda.gradients) == (inputs + 2 * tokens * (3 * 32 + 32 + 4 * 32), (0,))


def test_what_operators_make_of_the_same_sizes_is_asked_of_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output layer computes logits in many chunks, and a search asks for many sizes of micro-batches."""
    asked, recipe = list[str](), operators._recipe
    monkeypatch.setattr(operators, "_recipe", lambda *given: asked.append("") or recipe(*given))
    monkeypatch.setattr(operators, "_known_operators", cache(dict))
    config = configured(Case(precision="bf16"), Way(micro_batch_size=2))
    first, second = (
        (kept_of(config.model, config.parallel, config.train, vocab_size=VOCAB, device="cuda"), len(asked))
        for _ in range(2)
    )
    assert second == first and first[1] > 0
