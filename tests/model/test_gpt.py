"""The whole model against a plain one: logits, loss and every gradient, in float64, on any layout."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.kernels.choice import Kernels, Products
from colonnade.kernels.dropout import Masks
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh
from colonnade.model.attention import Attention, KeyValueCache
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.model.inputs import Inputs
from colonnade.model.mlp import MLP
from colonnade.tensor_parallel.distillation import SoftTargets
from colonnade.tensor_parallel.parallel import Parallel
from tests.distributed import run_on_ranks
from tests.emulated import emulated_amx
from tests.model.plain import Drops, leaves, plain_logits, plain_loss
from tests.model.whole import hidden, loss_of
from tests.tensor_parallel.shards import assert_gradients, drawn, load_shards_, sum_replicated_

S, B, VOCAB, SEED = 8, 3, 37, 99
SAMPLES = [5, 1_000_000, 6]


def configuration(**changes: Any) -> ModelConfig:
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "ffn_hidden_size": 24, "seq_length": 9}
    return ModelConfig(**{**shape, "dropout": 0.0, "attention_dropout": 0.0, **changes})


def whole_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Random numbers in every weight, biases and norms too."""
    gpt = GPT(config, VOCAB, Parallel(Mesh().tp))
    return {name: 0.3 * drawn(*w.shape, seed=i) for i, (name, w) in enumerate(gpt.named_parameters())}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, labels, loss weights), [s, b] each"""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (S + 1, B), generator=generator)
    return tokens[:-1], tokens[1:], torch.rand(S, B, dtype=torch.float64, generator=generator)


CONFIGURATIONS = {
    "no dropout": configuration(),
    "dropout": configuration(dropout=0.1, attention_dropout=0.2),
    "untied": configuration(tie_embeddings=False, dropout=0.1),
    "tanh": configuration(activation="gelu_tanh"),
    "large epsilon": configuration(norm_epsilon=0.5),
    "alibi": configuration(position="alibi"),
    "alibi, dropout": configuration(position="alibi", attention_dropout=0.2),
    "alibi, 6 heads": configuration(position="alibi", num_heads=6, hidden_size=24),
    "embedding norm": configuration(embedding_norm=True, dropout=0.1),
    "post": configuration(norm_position="post", dropout=0.1),
    "fp32 residual": configuration(fp32_residual=True),
    "all": configuration(
        position="alibi", embedding_norm=True, norm_position="post", dropout=0.1, attention_dropout=0.2
    ),
}


def beside_the_plain_model(rank: int, num_ranks: int, configs: list[ModelConfig], **how: Any) -> None:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    for config in configs:
        one_beside_the_plain_model(config, tp, **how)


def one_beside_the_plain_model(config: ModelConfig, tp: Axis, **how: Any) -> None:
    whole, (tokens, labels, weights) = whole_weights(config), inputs()
    plain = leaves(whole)
    expected = plain_loss(plain_logits(config, plain, tokens.t(), Drops(SEED, SAMPLES)), labels.t(), weights.t(), 1.0)
    expected.backward()
    gpt = GPT(config, VOCAB, Parallel(tp, **how)).double()
    load_shards_(gpt, tp, whole)
    loss = loss_of(gpt, tokens, labels, weights, Masks(SEED, torch.tensor(SAMPLES).numpy()))
    loss.backward()
    if how.get("sequence_parallel"):
        sum_replicated_(gpt, tp)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert_gradients(gpt, tp, {name: w.grad for name, w in plain.items() if w.grad is not None}, 1e-10)


@pytest.mark.parametrize("what", CONFIGURATIONS)
def test_loss_and_gradients_are_the_plain_models(what: str) -> None:
    one_beside_the_plain_model(CONFIGURATIONS[what], Mesh().tp)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_cut_models_are_the_plain_model_too(tp_size: int) -> None:
    run_on_ranks(beside_the_plain_model, tp_size, [CONFIGURATIONS[what] for what in ("dropout", "alibi", "all")])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tp_size", [2, 4])
def test_models_cut_along_the_sequence_are_the_plain_model_too(tp_size: int) -> None:
    configs = [CONFIGURATIONS[what] for what in ("dropout", "untied", "embedding norm", "all")]
    run_on_ranks(partial(beside_the_plain_model, sequence_parallel=True), tp_size, configs)


@pytest.mark.parametrize("what", ["dropout", "alibi", "all"])
def test_recomputed_attention_changes_nothing(what: str) -> None:
    one_beside_the_plain_model(CONFIGURATIONS[what], Mesh().tp, recompute_attention=True)


def serial(config: ModelConfig) -> GPT:
    gpt = GPT(config, VOCAB, Parallel(Mesh().tp)).double()
    load_shards_(gpt, Mesh().tp, whole_weights(config))
    return gpt


@torch.no_grad()
def test_no_masks_no_dropout() -> None:
    tokens, labels, weights = inputs()
    expected = loss_of(serial(CONFIGURATIONS["no dropout"]), tokens, labels, weights)
    assert torch.equal(loss_of(serial(CONFIGURATIONS["dropout"]), tokens, labels, weights), expected)


@torch.no_grad()
def test_logits_and_token_losses() -> None:
    config, (tokens, labels, weights) = configuration(), inputs()
    gpt = serial(config)
    stream = hidden(gpt, tokens)
    plain = plain_logits(config, whole_weights(config), tokens.t()).transpose(0, 1)
    torch.testing.assert_close(gpt.head.logits(stream), plain, rtol=1e-12, atol=1e-12)
    losses = gpt.head.token_losses(stream, labels)
    torch.testing.assert_close((losses * weights).sum(), loss_of(gpt, tokens, labels, weights), rtol=1e-12, atol=0)


@torch.no_grad()
def test_a_token_changes_nothing_before_it() -> None:
    tokens, _, _ = inputs()
    gpt, changed = serial(configuration()), tokens.clone()
    changed[4] = (changed[4] + 1) % VOCAB
    before, after = hidden(gpt, tokens), hidden(gpt, changed)
    assert torch.equal(before[:4], after[:4]) and not torch.isclose(before[4:], after[4:]).all(-1).any()


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[0, 3, 8], [*range(9)], [0, 8]])
def test_cached_pieces_are_the_whole(cuts: list[int]) -> None:
    tokens, _, _ = inputs()
    gpt = serial(configuration())
    caches = [KeyValueCache(torch.zeros(B, 4, 9, 4).double(), torch.zeros(B, 4, 9, 4).double()) for _ in range(2)]
    pieces = [hidden(gpt, tokens[start:stop], caches=caches) for start, stop in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces), hidden(gpt, tokens), rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[0, 3, 21], [0, 21], [0, 20, 21]])
def test_alibi_reads_beyond_the_trained_length(cuts: list[int]) -> None:
    config = configuration(position="alibi", embedding_norm=True)
    tokens = torch.randint(0, VOCAB, (21, B), generator=torch.Generator().manual_seed(4))
    assert len(tokens) > config.seq_length
    gpt = serial(config)
    expected = plain_logits(config, whole_weights(config), tokens.t()).transpose(0, 1)
    torch.testing.assert_close(gpt.head.logits(hidden(gpt, tokens)), expected, rtol=1e-12, atol=1e-12)
    caches = [KeyValueCache(torch.zeros(B, 4, 21, 4).double(), torch.zeros(B, 4, 21, 4).double()) for _ in range(2)]
    pieces = [hidden(gpt, tokens[start:stop], caches=caches) for start, stop in pairwise(cuts)]
    torch.testing.assert_close(gpt.head.logits(torch.cat(pieces)), expected, rtol=1e-12, atol=1e-12)


def test_the_longest_text() -> None:
    assert GPT(configuration(), VOCAB, Parallel(Mesh().tp)).longest == 9
    alibi = GPT(configuration(position="alibi"), VOCAB, Parallel(Mesh().tp))
    assert alibi.longest is None and alibi.seq_length == 9 and alibi.embedding.positions is None


# --- 16 bits ---------------------------------------------------------------------------------------------------------


def loss_and_gradient(
    config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(loss, all gradients in a row), divided by the scale that the loss is computed with."""
    tokens, labels, loss_weights = inputs()
    gpt = GPT(config, VOCAB, Parallel(Mesh().tp)).double()
    load_shards_(gpt, Mesh().tp, weights)
    gpt = gpt.to(dtype)
    loss = loss_of(gpt, tokens, labels, loss_weights * scale, Masks(SEED, torch.tensor(SAMPLES).numpy()))
    loss.backward()
    gradients = [w.grad for w in gpt.parameters() if w.grad is not None]
    assert len(gradients) == len(list(gpt.parameters()))
    assert all(gradient.dtype is torch.promote_types(dtype, torch.float32) for gradient in gradients)
    return loss.detach().double() / scale, torch.cat([gradient.double().flatten() for gradient in gradients]) / scale


@pytest.mark.parametrize("what", ["dropout", "all", "fp32 residual"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2.0**-5), (torch.float16, 2.0**-8)])
def test_16_bits_are_near_the_exact_model(what: str, dtype: torch.dtype, bound: float) -> None:
    """Bounds: a unit in the last place (2⁻⁸, 2⁻¹¹) times 8, for the dozen roundings between input and gradient."""
    config = CONFIGURATIONS[what]
    weights = {name: w.to(dtype).double() for name, w in whole_weights(config).items()}
    loss, gradient = loss_and_gradient(config, weights, dtype, scale=256.0)
    exact, exact_gradient = loss_and_gradient(config, weights, torch.float64)
    assert abs(loss - exact) <= bound * exact.abs()
    assert (gradient - exact_gradient).norm() <= bound * exact_gradient.norm()


@pytest.mark.parametrize("change", [{}, {"norm_position": "post"}, {"embedding_norm": True}])
def test_an_fp32_stream_is_never_rounded(change: dict[str, Any]) -> None:
    """What a bf16 stream would round away is still there behind every unit."""
    tokens, _, _ = inputs()
    for fp32, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        gpt = GPT(configuration(fp32_residual=fp32, **change), VOCAB, Parallel(Mesh().tp))
        initialize_(gpt, Mesh().tp, 1)
        gpt, carry = gpt.bfloat16(), ()
        for unit in ("embedding", "blocks.0", "blocks.1"):
            carry = gpt.run(unit, carry, Inputs(tokens))
            (x,) = carry
            assert x.dtype is dtype
            assert torch.equal(x, x.bfloat16().to(dtype)) != fp32, unit
        assert gpt.head.normed(x).dtype is torch.bfloat16


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_layers_multiply_an_fp32_stream_in_the_type_of_their_weights(norm_position: Any) -> None:
    """A GPU multiplies no numbers of two types."""
    gpt = GPT(configuration(fp32_residual=True, norm_position=norm_position), VOCAB, Parallel(Mesh().tp))
    initialize_(gpt, Mesh().tp, 1)
    gpt, read = gpt.bfloat16(), list[torch.dtype]()
    for module in gpt.modules():
        if isinstance(module, Attention | MLP):
            module.register_forward_pre_hook(lambda module, given: read.append(given[0].dtype))
    hidden(gpt, inputs()[0])
    assert read == [torch.bfloat16] * 4


def test_overflow_reaches_every_gradient_before_it() -> None:
    tokens, labels, weights = inputs()
    gpt = GPT(configuration(dropout=0.1, attention_dropout=0.1), VOCAB, Parallel(Mesh().tp))
    initialize_(gpt, Mesh().tp, 1)
    gpt = gpt.half()
    loss_of(gpt, tokens, labels, weights * 2.0**40, Masks(SEED, torch.tensor(SAMPLES).numpy())).backward()
    for name, weight in gpt.named_parameters():
        if name != "embedding.tokens.weight":
            assert weight.grad is not None and not weight.grad.isfinite().all(), name


def by_the_output_layer(what: str, products: Products) -> Tensor:
    """In fp32, of a CPU that rounds the operands of oneDNN's products to bf16."""
    head = GPT(CONFIGURATIONS["untied"], VOCAB, Parallel(Mesh().tp, products=products)).head
    head.output.weight.data.copy_(drawn(VOCAB, 16, seed=1))
    x, (_, labels, weights) = drawn(S, B, 16, seed=2).float(), inputs()
    soft = SoftTargets(weights.float(), 2.0, drawn(S, B, 16, seed=3).float(), drawn(VOCAB, 16, seed=4).float())
    with emulated_amx(), torch.no_grad():
        return {
            "loss": lambda: head.loss_of(head.normed(x), labels, weights.float()),
            "taught": lambda: head.loss_of(head.normed(x), labels, torch.zeros(S, B), soft=soft),
            "token losses": lambda: head.token_losses(x, labels),
            "guesses": lambda: head.guesses_of(head.normed(x), labels)[0],
            "logits": lambda: head.logits(x),
        }[what]()


@pytest.mark.parametrize("what", ["loss", "taught", "token losses", "guesses", "logits"])
def test_the_output_layer_multiplies_by_the_kernel_that_was_decided(what: str) -> None:
    """In training, and wherever a trained model is used."""
    plain = by_the_output_layer(what, Products())
    rounded = by_the_output_layer(what, Products(fp32=Kernels(output="onednn")))
    assert plain.isfinite().all() and 1e-5 < ((rounded - plain).abs() / plain.abs().mean()).max() < 0.05


@pytest.mark.parametrize("how", ["plain", "dropout", "cache"])
def test_attention_multiplies_by_the_kernel_that_was_decided(how: str) -> None:
    """In bf16 as it is, or widened, on a processor that has no other way to tell."""
    found = []
    for kernel in ("native", "blas"):
        products = Products(bf16=Kernels(attention=kernel))
        gpt = GPT(CONFIGURATIONS["dropout"], VOCAB, Parallel(Mesh().tp, products=products)).bfloat16()
        load_shards_(gpt, Mesh().tp, whole_weights(CONFIGURATIONS["dropout"]))
        attention = gpt.blocks["0"].attention
        masks = Masks(SEED, torch.tensor(SAMPLES).numpy()) if how == "dropout" else None
        cache = attention.empty_cache(S) if how == "cache" else None
        with torch.no_grad():
            found.append(attention(drawn(S, 1 if how == "cache" else B, 16, seed=5).bfloat16(), 0, masks, cache))
    assert not torch.equal(*found)
