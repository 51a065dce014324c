"""What others have written: Hugging Face's GPT-2 and BLOOM, torch's encoder layer; logits and every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.config.model import ModelConfig
from colonnade.mesh.mesh import Mesh
from colonnade.model.gpt import GPT
from colonnade.model.transformer import Block
from colonnade.tensor_parallel.parallel import Parallel
from tests.model.test_attention import HIDDEN, N, renamed
from tests.model.test_gpt import VOCAB, B, S, configuration
from tests.model.whole import hidden, loss_of
from tests.tensor_parallel.shards import assert_gradients, drawn, load_shards_


def from_gpt2(named: dict[str, Tensor], num_heads: int) -> dict[str, Tensor]:
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
def test_gpt2() -> None:
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
    compare(theirs, config, lambda named: from_gpt2(named, 4), tolerance=1e-10)


def from_bloom(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """BLOOM's weights (or their gradients) under our names; its q, k, v rows are ordered as ours."""
    names = {"word_embeddings.": "embedding.tokens.", "word_embeddings_layernorm.": "embedding.norm."}
    names |= {"ln_f.": "head.norm.", "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    names |= {"self_attention.query_key_value": "attention.qkv", "self_attention.dense": "attention.output"}
    names |= {"dense_h_to_4h": "up", "dense_4h_to_h": "down", "h.": "blocks."}
    ours = {}
    for theirs, t in named.items():
        name = theirs.removeprefix("transformer.")
        for old, new in names.items():
            name = name.replace(old, new)
        ours[name] = t
    return ours


@pytest.mark.filterwarnings("default")
def test_bloom(monkeypatch: pytest.MonkeyPatch) -> None:
    """ALiBi with a number of heads that is no power of two, and the norm behind the embedding."""
    transformers = pytest.importorskip("transformers", reason="needs the extra `test`: pip install colonnade[test]")
    from transformers.models.bloom import modeling_bloom

    softmax = nn.functional.softmax  # theirs is computed in fp32, whatever the model's type
    monkeypatch.setattr(modeling_bloom.F, "softmax", lambda x, dim, dtype: softmax(x, dim))
    config = configuration(
        hidden_size=24,
        num_heads=6,
        ffn_hidden_size=96,
        position="alibi",
        embedding_norm=True,
        activation="gelu_tanh",
    )
    theirs_config = transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=24, n_layer=2, n_head=6, bos_token_id=None, eos_token_id=None
    )
    theirs = transformers.BloomForCausalLM(theirs_config).double().eval()
    compare(theirs, config, from_bloom, tolerance=1e-8)  # its GELU has √(2/π) with 8 digits


def compare(theirs: Any, config: ModelConfig, renamed: Any, *, tolerance: float) -> None:
    """Random weights in both; logits, loss and gradients of a few tokens."""
    with torch.no_grad():
        for i, (_, parameter) in enumerate(theirs.named_parameters()):
            parameter.copy_(0.3 * drawn(*parameter.shape, seed=i))
    tokens = torch.randint(0, VOCAB, (S + 1, B), generator=torch.Generator().manual_seed(2))
    output = theirs(input_ids=tokens.t(), labels=tokens.t())
    logits = output.logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, tokens[1:].t().flatten())  # its own loss is computed in fp32
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=0)
    expected.backward()

    gpt, tp = GPT(config, VOCAB, Parallel(Mesh().tp)).double(), Mesh().tp
    load_shards_(gpt, tp, renamed(dict(theirs.named_parameters())))
    ours = gpt.head.logits(hidden(gpt, tokens)).transpose(0, 1)
    torch.testing.assert_close(ours, output.logits, rtol=tolerance, atol=tolerance)
    loss = loss_of(gpt, tokens[:-1], tokens[1:], torch.full((S, B), 1 / (S * B), dtype=torch.float64))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert_gradients(gpt, tp, renamed(gradients), tolerance)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_torchs_encoder_layer(position: str) -> None:
    """Where the norms stand, by torch's own layer, made causal."""
    config = configuration(norm_position=position, hidden_size=HIDDEN, num_heads=N, ffn_hidden_size=24)
    twin = nn.TransformerEncoderLayer(HIDDEN, N, 24, 0.0, "gelu", norm_first=position == "pre").double()
    with torch.no_grad():
        for i, parameter in enumerate(twin.parameters()):
            parameter.copy_(0.3 * drawn(*parameter.shape, seed=i))
    x, twins = (drawn(5, B, HIDDEN, seed=9).requires_grad_() for _ in range(2))
    expected = twin(twins, src_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
    block = Block(config, 0, Parallel(Mesh().tp)).double()
    load_shards_(block, Mesh().tp, from_encoder_layer(twin, gradients=False))
    y = block(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for out in (y, expected):
        out.backward(drawn(5, B, HIDDEN, seed=10))
    torch.testing.assert_close(x.grad, twins.grad, rtol=1e-10, atol=1e-10)
    assert_gradients(block, Mesh().tp, from_encoder_layer(twin, gradients=True), 1e-11)


def from_encoder_layer(twin: Any, *, gradients: bool) -> dict[str, Tensor]:
    """The layer's weights, or their gradients, under our names."""
    modules = {"attention_norm": twin.norm1, "mlp.up": twin.linear1, "mlp.down": twin.linear2, "mlp_norm": twin.norm2}
    ours = {f"attention.{name}": t for name, t in renamed(twin.self_attn, gradients).items()}
    for name, module in modules.items():
        for key, parameter in module.named_parameters():
            ours[f"{name}.{key}"] = parameter.grad if gradients else parameter.detach()
    return ours
