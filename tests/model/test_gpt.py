"""The whole model against a plain one and against Hugging Face's GPT-2: logits, loss and every gradient, in float64."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.config.schema import ModelConfig
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.model.attention import KeyValueCache
from colonnade.model.dropout import Masks
from colonnade.model.gpt import GPT
from tests.distributed import run_on_ranks
from tests.model.plain import Drops, leaves, plain_logits, plain_loss
from tests.tensor_parallel.shards import assert_gradients, drawn, load_shards_

S, B, VOCAB, SEED = 7, 3, 37, 99
SAMPLES = [5, 1_000_000, 6]


def configuration(**changes: Any) -> ModelConfig:
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "ffn_hidden_size": 24, "seq_length": 9}
    return ModelConfig(**{**shape, "dropout": 0.0, "attention_dropout": 0.0, **changes})


def whole_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Random numbers in every weight, biases and norms too."""
    gpt = GPT(config, VOCAB, Mesh().tp)
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
}


def beside_the_plain_model(rank: int, num_ranks: int, config: ModelConfig) -> None:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    whole, (tokens, labels, weights) = whole_weights(config), inputs()
    plain = leaves(whole)
    expected = plain_loss(plain_logits(config, plain, tokens.t(), Drops(SEED, SAMPLES)), labels.t(), weights.t(), 1.0)
    expected.backward()
    gpt = GPT(config, VOCAB, tp).double()
    load_shards_(gpt, tp, whole)
    loss = gpt(tokens, labels, weights, Masks(SEED, torch.tensor(SAMPLES).numpy()))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert_gradients(gpt, tp, {name: w.grad for name, w in plain.items() if w.grad is not None}, 1e-10)


@pytest.mark.parametrize("what", CONFIGURATIONS)
def test_loss_and_gradients_are_the_plain_models(what: str) -> None:
    run_on_ranks(beside_the_plain_model, 1, CONFIGURATIONS[what])


@pytest.mark.parametrize("tp_size", [2, 4])
def test_cut_models_are_the_plain_model_too(tp_size: int) -> None:
    run_on_ranks(beside_the_plain_model, tp_size, CONFIGURATIONS["dropout"])


def serial(config: ModelConfig) -> GPT:
    gpt = GPT(config, VOCAB, Mesh().tp).double()
    load_shards_(gpt, Mesh().tp, whole_weights(config))
    return gpt


@torch.no_grad()
def test_no_masks_no_dropout() -> None:
    tokens, labels, weights = inputs()
    expected = serial(CONFIGURATIONS["no dropout"])(tokens, labels, weights)
    assert torch.equal(serial(CONFIGURATIONS["dropout"])(tokens, labels, weights), expected)


@torch.no_grad()
def test_logits_and_token_losses() -> None:
    config, (tokens, labels, weights) = configuration(), inputs()
    gpt = serial(config)
    hidden = gpt.hidden(tokens)
    plain = plain_logits(config, whole_weights(config), tokens.t()).transpose(0, 1)
    torch.testing.assert_close(gpt.head.logits(hidden), plain, rtol=1e-12, atol=1e-12)
    losses = gpt.head.token_losses(hidden, labels)
    torch.testing.assert_close((losses * weights).sum(), gpt(tokens, labels, weights), rtol=1e-12, atol=0)


@torch.no_grad()
def test_a_token_changes_nothing_before_it() -> None:
    tokens, _, _ = inputs()
    gpt, changed = serial(configuration()), tokens.clone()
    changed[4] = (changed[4] + 1) % VOCAB
    before, after = gpt.hidden(tokens), gpt.hidden(changed)
    assert torch.equal(before[:4], after[:4]) and not torch.isclose(before[4:], after[4:]).all(-1).any()


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[0, 3, 7], [0, 1, 2, 3, 4, 5, 6, 7], [0, 7]])
def test_cached_pieces_are_the_whole(cuts: list[int]) -> None:
    tokens, _, _ = inputs()
    gpt = serial(configuration())
    caches = [KeyValueCache(torch.zeros(B, 4, 9, 4).double(), torch.zeros(B, 4, 9, 4).double()) for _ in range(2)]
    pieces = [gpt.hidden(tokens[start:stop], caches=caches) for start, stop in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces), gpt.hidden(tokens), rtol=1e-12, atol=1e-12)


def test_units_name_every_weight_in_forward_order() -> None:
    gpt = GPT(configuration(tie_embeddings=False), VOCAB, Mesh().tp)
    units = gpt.units()
    assert list(units) == ["embedding", "blocks.0", "blocks.1", "head"]
    named = {f"{unit}.{name}" for unit, module in units.items() for name, _ in module.named_parameters()}
    assert named == {name for name, _ in gpt.named_parameters()}


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def from_hugging_face(named: dict[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """GPT-2's weights (or their gradients) under our names. Its matrices are [in, out]; q, k, v lie apart."""
    ours = {
        "embedding.tokens.weight": named["transformer.wte.weight"],
        "embedding.positions.weight": named["transformer.wpe.weight"],
        "head.norm.weight": named["transformer.ln_f.weight"],
        "head.norm.bias": named["transformer.ln_f.bias"],
    }
    parts = {"attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj"}
    parts |= {"mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for layer in range(sum(name.endswith("ln_1.bias") for name in named)):
        for mine, theirs in parts.items():
            for key in ("weight", "bias"):
                t = named[f"transformer.h.{layer}.{theirs}.{key}"].t()
                if mine == "attention.qkv":
                    t = t.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)
                ours[f"blocks.{layer}.{mine}.{key}"] = t
    return ours


@pytest.mark.filterwarnings("default")
def test_hugging_face_gpt2() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra `test`: pip install colonnade[test]")
    config = configuration(activation="gelu_tanh")
    theirs_config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=9,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_inner=24,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    theirs = transformers.GPT2LMHeadModel(theirs_config).double().eval()
    with torch.no_grad():
        for i, (_, parameter) in enumerate(theirs.named_parameters()):
            parameter.copy_(0.3 * drawn(*parameter.shape, seed=i))
    tokens = torch.randint(0, VOCAB, (S + 1, B), generator=torch.Generator().manual_seed(2))
    output = theirs(input_ids=tokens.t(), labels=tokens.t())
    logits = output.logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, tokens[1:].t().flatten())  # its own loss is computed in fp32
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=0)
    expected.backward()

    gpt, tp = GPT(config, VOCAB, Mesh().tp).double(), Mesh().tp
    load_shards_(gpt, tp, from_hugging_face(dict(theirs.named_parameters()), 4))
    ours = gpt.head.logits(gpt.hidden(tokens)).transpose(0, 1)
    torch.testing.assert_close(ours, output.logits, rtol=1e-10, atol=1e-10)
    loss = gpt(tokens[:-1], tokens[1:], torch.full((S, B), 1 / (S * B), dtype=torch.float64))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert_gradients(gpt, tp, from_hugging_face(gradients, 4), 1e-10)
