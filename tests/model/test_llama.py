"""The LLaMA block beside Hugging Face's own model: logits, loss and every gradient, in float64 and odd sizes."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.config.model import ModelConfig, RotaryConfig
from colonnade.mesh.mesh import Mesh
from colonnade.model.attention import KeyValueCache
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.model.inputs import Inputs
from colonnade.model.rotary import attention_scale, inverse_wavelengths
from colonnade.tensor_parallel.parallel import Parallel
from tests.blocks import LLAMA_BLOCK
from tests.model.theirs import joined
from tests.model.whole import hidden

transformers = pytest.importorskip("transformers")

VOCAB, S, B = 61, 13, 3
SHAPE: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 36,
    "num_heads": 6,
    "ffn_hidden_size": 50,
    "seq_length": 16,
    **LLAMA_BLOCK,
    "tie_embeddings": False,
    "init_std": 0.3,
}


def theirs(model: ModelConfig) -> nn.Module:
    """Hugging Face's model of these sizes."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_width,
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "attn_implementation": "sdpa",  # the spelled-out one has a softmax in float32
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary.base},
    }
    if model.query_key_norm:
        return exact(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)), model)
    if model.window is not None:
        config = transformers.MistralConfig(**shape, sliding_window=model.window)
        return exact(transformers.MistralForCausalLM(config), model)
    return exact(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)), model)


def exact(twin: nn.Module, model: ModelConfig) -> nn.Module:
    """In float64 throughout: they compute norms and angles in float32, whatever the model's type."""
    twin = twin.double()
    for module in twin.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm_in_float64(module)  # type: ignore[method-assign]
    inverse = model.rotary.base ** -(torch.arange(0, model.head_width, 2, dtype=torch.float64) / model.head_width)

    def angles(x: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        half = position_ids[..., None].double() * inverse
        both = torch.cat([half, half], -1)
        return both.cos(), both.sin()

    twin.model.rotary_emb.forward = angles  # type: ignore[union-attr, method-assign]
    return twin


def norm_in_float64(module: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return out

    return forward


def names(model: ModelConfig) -> dict[str, list[str]]:
    """Our weights, and those of theirs that lie in them."""
    found = {"embedding.tokens.weight": ["model.embed_tokens.weight"], "head.norm.weight": ["model.norm.weight"]}
    if not model.tie_embeddings:
        found["head.output.weight"] = ["lm_head.weight"]
    for layer in range(model.num_layers):
        ours, their = f"blocks.{layer}", f"model.layers.{layer}"
        q, k, v = (f"{their}.self_attn.{part}_proj.weight" for part in "qkv")
        grouped = model.key_value_heads != model.num_heads
        found |= (
            {f"{ours}.attention.query.weight": [q], f"{ours}.attention.key_value.weight": [k, v]} if grouped else {}
        )
        found |= {} if grouped else {f"{ours}.attention.qkv.weight": [q, k, v]}
        found[f"{ours}.attention.output.weight"] = [f"{their}.self_attn.o_proj.weight"]
        found[f"{ours}.attention_norm.weight"] = [f"{their}.input_layernorm.weight"]
        found[f"{ours}.mlp_norm.weight"] = [f"{their}.post_attention_layernorm.weight"]
        for part in ("gate", "up", "down"):
            found[f"{ours}.mlp.{part}.weight"] = [f"{their}.mlp.{part}_proj.weight"]
        if model.query_key_norm:
            found[f"{ours}.attention.query_norm.weight"] = [f"{their}.self_attn.q_norm.weight"]
            found[f"{ours}.attention.key_norm.weight"] = [f"{their}.self_attn.k_norm.weight"]
    return found


NEOX = ModelConfig(
    **{**SHAPE, "hidden_size": 48, "norm": "layernorm", "activation": "gelu", "bias": True, "parallel_residual": True},
    rotary=RotaryConfig(share=0.5),
)
MODELS = {
    "llama": ModelConfig(**SHAPE),
    "grouped": ModelConfig(**{**SHAPE, "num_key_value_heads": 2}),
    "one head of keys": ModelConfig(**{**SHAPE, "num_key_value_heads": 1, "tie_embeddings": True}),
    "qwen": ModelConfig(**{**SHAPE, "num_key_value_heads": 3, "query_key_norm": True, "head_dim": 10}),
    "mistral": ModelConfig(**{**SHAPE, "num_key_value_heads": 2, "window": 4}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_are_hugging_faces(name: str) -> None:
    model = MODELS[name].model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
    gpt, tp = GPT(model, VOCAB, Parallel(Mesh().tp)).double(), Mesh().tp
    initialize_(gpt, tp, 1)
    twin = theirs(model)
    for weight in twin.parameters():
        if weight.ndim == 1:  # norms, which begin as 1
            weight.data += torch.linspace(-0.3, 0.3, len(weight), dtype=weight.dtype)
    state, mine = twin.state_dict(), {}
    for part, module in gpt.bucket_modules().items():
        mine |= {f"{part}.{key}": weight for key, weight in module.named_parameters()}
    with torch.no_grad():
        for ours, parts in names(model).items():
            mine[ours].copy_(joined([state[part] for part in parts], model.head_width))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (S + 1, B), generator=generator)
    weights = torch.full((S, B), 1.0 / (S * B), dtype=torch.float64)

    carry: tuple[Tensor, ...] = ()
    inputs = Inputs(tokens[:-1], tokens[1:], weights)
    for unit in gpt.units():
        if unit == "head":
            logits = gpt.head.logits(carry[0].detach())
        carry = gpt.run(unit, carry, inputs)
    (loss,) = carry
    loss.backward()

    expected = twin(tokens[:-1].t()).logits.transpose(0, 1)
    expected_loss = nn.functional.cross_entropy(expected.flatten(0, 1), tokens[1:].flatten())
    expected_loss.backward()
    torch.testing.assert_close(logits, expected.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0.0)
    gradients = {key: parameter.grad for key, parameter in twin.named_parameters()}
    for ours, parts in names(model).items():
        reference = joined([gradients[part] for part in parts], model.head_width)
        torch.testing.assert_close(
            mine[ours].grad, reference, rtol=1e-10, atol=1e-12, msg=lambda m, n=ours: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("ours", "rope"),
    [
        (RotaryConfig(base=5e5), {"rope_type": "default", "rope_theta": 5e5}),
        (RotaryConfig(scaling="linear", factor=4.0), {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
        (
            RotaryConfig(base=5e5, scaling="llama3", factor=8.0, original_length=8192),
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (
            RotaryConfig(base=1e6, scaling="yarn", factor=4.0, original_length=4096),
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
        (  # even the slowest plane turns within so long a text
            RotaryConfig(base=1e4, scaling="yarn", factor=4.0, original_length=65536),
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 65536},
        ),
        (  # even the fastest plane turns seldom within so short a text
            RotaryConfig(base=1e4, scaling="yarn", factor=4.0, original_length=100),
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 100},
        ),
        (  # the ramp's end is before the first plane
            RotaryConfig(base=1e4, scaling="yarn", factor=4.0, original_length=4),
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4},
        ),
        (  # and its start behind the last
            RotaryConfig(base=3.0, scaling="yarn", factor=4.0, original_length=8192),
            {"rope_type": "yarn", "rope_theta": 3.0, "factor": 4.0, "original_max_position_embeddings": 8192},
        ),
    ],
    ids=[
        "plain",
        "linear",
        "llama3",
        "yarn",
        "yarn of a long text",
        "yarn of a short text",
        "yarn of a few tokens",
        "yarn of a small base",
    ],
)
def test_angles_are_hugging_faces(ours: RotaryConfig, rope: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=16384, rope_parameters=rope
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    torch.testing.assert_close(inverse_wavelengths(ours, 64).float(), rotary.inv_freq, rtol=2e-6, atol=0.0)
    assert attention_scale(ours) == pytest.approx(rotary.attention_scaling, rel=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "grouped", "mistral", "side by side"])
@pytest.mark.parametrize("cuts", [[0, 3, 8, S], [*range(S + 1)]])
def test_cached_pieces_are_the_whole(name: str, cuts: list[int]) -> None:
    model = MODELS.get(name, NEOX)
    gpt = GPT(model, VOCAB, Parallel(Mesh().tp)).double()
    initialize_(gpt, Mesh().tp, 1)
    tokens = torch.randint(0, VOCAB, (S, 1), generator=torch.Generator().manual_seed(0))
    shape = 1, model.key_value_heads, S, model.head_width
    caches = [KeyValueCache(*torch.zeros(2, *shape, dtype=torch.float64)) for _ in range(model.num_layers)]
    pieces = [hidden(gpt, tokens[start:stop], caches=caches) for start, stop in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces), hidden(gpt, tokens), rtol=1e-12, atol=1e-12)
