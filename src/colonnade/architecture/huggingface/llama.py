"""LLaMA (Touvron et al., 2023) and those that are built as it: SmolLM, Mistral, Qwen 2 and 3. Features i and i + d/2 of
a head turn together, theirs as ours, so rows of q and k stay in their order.
"""

import re
from collections.abc import Callable
from typing import Any

from colonnade.architecture.huggingface.common import (
    GATES,
    activation,
    rotary,
    standard_deviation,
    their_activation,
    their_rotary,
)
from colonnade.architecture.huggingface.keys import Keys, shown
from colonnade.architecture.huggingface.statement import Family, at, tied_output
from colonnade.config.model import ModelConfig

_BLOCK = "model.layers.{i}"
_Q, _K, _V = (f"{_BLOCK}.self_attn.{part}_proj" for part in "qkv")
PLACES = {
    "embedding.tokens": at("model.embed_tokens"),
    "blocks.{i}.attention_norm": at(f"{_BLOCK}.input_layernorm"),
    "blocks.{i}.attention.qkv": at(_Q, _K, _V),
    "blocks.{i}.attention.query": at(_Q),
    "blocks.{i}.attention.key_value": at(_K, _V),
    "blocks.{i}.attention.query_norm": at(f"{_BLOCK}.self_attn.q_norm"),
    "blocks.{i}.attention.key_norm": at(f"{_BLOCK}.self_attn.k_norm"),
    "blocks.{i}.attention.output": at(f"{_BLOCK}.self_attn.o_proj"),
    "blocks.{i}.mlp_norm": at(f"{_BLOCK}.post_attention_layernorm"),
    "blocks.{i}.mlp.gate": at(f"{_BLOCK}.mlp.gate_proj"),
    "blocks.{i}.mlp.up": at(f"{_BLOCK}.mlp.up_proj"),
    "blocks.{i}.mlp.down": at(f"{_BLOCK}.mlp.down_proj"),
    "head.norm": at("model.norm"),
    "head.output": at("lm_head"),
}
_ALL_ALIKE = "all linear layers of a model have a bias here, or none has"


def _block(keys: Keys, *, key_value_heads: int | None = None, length: int) -> dict[str, Any]:
    """What all of them say alike."""
    length = keys.take("max_position_embeddings", int, length)
    keys.ignore("attention_dropout")
    heads = keys.take("num_attention_heads", int)
    alike = key_value_heads is None or keys.has("num_key_value_heads")  # be it as null
    return {
        "num_layers": keys.take("num_hidden_layers", int),
        "hidden_size": keys.take("hidden_size", int),
        "num_heads": heads,
        "num_key_value_heads": keys.take("num_key_value_heads", int, heads if alike else key_value_heads),
        "head_dim": keys.take("head_dim", int, None),
        "ffn_hidden_size": keys.take("intermediate_size", int),
        "seq_length": length,
        "vocab_size": keys.take("vocab_size", int),
        "position": "rotary",
        "rotary": rotary(keys, length),
        "norm": "rmsnorm",
        "norm_epsilon": keys.take("rms_norm_eps", float, 1e-6),
        "activation": activation(keys, "hidden_act", "silu", GATES),
        "tie_embeddings": keys.take("tie_word_embeddings", bool, False),
        "bias": False,
        **standard_deviation(keys),
    }


def _llama(keys: Keys) -> dict[str, Any]:
    found = _block(keys, length=2048)
    in_attention, in_mlp = (keys.take(f"{part}_bias", bool, False) for part in ("attention", "mlp"))
    if in_attention != in_mlp:
        keys.refuse(f"attention_bias = {shown(in_attention)}, mlp_bias = {shown(in_mlp)}: {_ALL_ALIKE}")
    keys.fixed("rope_interleaved", False, why="features i and i + d/2 of a head turn together here")
    keys.ignore("is_llama_config")
    return {**found, "bias": in_attention}


def _mistral(keys: Keys) -> dict[str, Any]:
    found = _block(keys, key_value_heads=8, length=131_072)
    window = keys.get("sliding_window") if keys.has("sliding_window") else 4096
    return {**found, "window": window}


def _qwen2(keys: Keys) -> dict[str, Any]:
    """Its queries, keys and values have a bias, which no key says."""
    found = _block(keys, key_value_heads=32, length=32_768)
    keys.ignore("use_mrope")
    return {**found, "query_key_value_bias": True, "window": _qwen_window(keys, found["num_layers"])}


def _qwen3(keys: Keys) -> dict[str, Any]:
    keys.fixed("attention_bias", False, why=_ALL_ALIKE)
    found = _block(keys, key_value_heads=32, length=32_768)
    found["head_dim"] = 128 if found["head_dim"] is None else found["head_dim"]
    return {**found, "query_key_norm": True, "window": _qwen_window(keys, found["num_layers"])}


def _qwen_window(keys: Keys, layers: int) -> int | None:
    """That of all layers; None where none has one, as where it is null."""
    window: int | None = keys.take("sliding_window", int, None if keys.has("sliding_window") else 4096)
    first = keys.take("max_window_layers", int, 28)
    uses = keys.take("use_sliding_window", bool, False)
    kinds = keys.take("layer_types", list, None)
    kinds = _qwen_kinds(layers, first if uses else layers) if kinds is None else kinds
    if len({*map(str, kinds)}) > 1 or not {*map(str, kinds)} <= {"full_attention", "sliding_attention"}:
        keys.refuse(f"layer_types = {shown(kinds)}: all layers have the same window here, or none has one")
    if "sliding_attention" in kinds and not uses:
        keys.refuse("layer_types has sliding_attention, and use_sliding_window = false")
    return window if "sliding_attention" in kinds else None


def _qwen_kinds(layers: int, first: int) -> list[str]:
    """Which layers have the window: those from `first` on."""
    return ["full_attention"] * min(first, layers) + ["sliding_attention"] * max(0, layers - first)


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_width,
        "hidden_act": their_activation(model, GATES),
        "max_position_embeddings": model.seq_length,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": model.attention_dropout,
        **their_rotary(model.rotary),
    }


def _write_llama(model: ModelConfig) -> dict[str, Any]:
    return {**_write(model), "attention_bias": model.bias, "mlp_bias": model.bias}


def _write_mistral(model: ModelConfig) -> dict[str, Any]:
    return {**_write(model), "sliding_window": model.window}


def _write_qwen2(model: ModelConfig) -> dict[str, Any]:
    """No key of its own says how wide a head is; where it is not what follows from others, `head_dim` is read too."""
    follows = model.hidden_size == model.num_heads * model.head_width
    leave_out = ("attention_bias", "head_dim") if follows else ("attention_bias",)
    return {key: value for key, value in _write_qwen3(model).items() if key not in leave_out}


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    kind = "full_attention" if model.window is None else "sliding_attention"
    return {
        **_write(model),
        "attention_bias": False,
        "use_sliding_window": model.window is not None,
        "sliding_window": model.window,
        "max_window_layers": 0 if model.window is not None else model.num_layers,
        "layer_types": [kind] * model.num_layers,
    }


def _family(
    model_type: str,
    title: str,
    name: str,
    read: Callable[[Keys], dict[str, Any]],
    write: Callable[[ModelConfig], dict[str, Any]],
) -> Family:
    return Family(
        model_type=model_type,
        title=title,
        architecture=f"{name}ForCausalLM",
        others=(f"{name}Model",),
        base="model.",
        places=PLACES,
        read=read,
        write=write,
        seconds=tied_output,
        constants=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    )


LLAMA = _family("llama", "LLaMA", "Llama", _llama, _write_llama)
MISTRAL = _family("mistral", "Mistral", "Mistral", _mistral, _write_mistral)
QWEN2 = _family("qwen2", "Qwen 2", "Qwen2", _qwen2, _write_qwen2)
QWEN3 = _family("qwen3", "Qwen 3", "Qwen3", _qwen3, _write_qwen3)
