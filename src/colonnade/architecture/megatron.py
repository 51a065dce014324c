"""Megatron-LM's GPT and BERT (Shoeybi et al., 2019): how the arguments and the tensors of a run are ours.

The names are those of `language_model.encoder`, without a layout: `colonnade.megatron` brings the other spellings to
these, and joins what ranks have. Rows of q, k, v are [head, (q, k, v), d] by then, as ours.

Of the hundreds of arguments of a run, few say what the model computes. Those are read or must have the value that
changes nothing; a layer that is here without an argument shows by its tensors.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from colonnade.architecture.huggingface.keys import Keys, shown
from colonnade.architecture.huggingface.statement import Family, Place, Second, at
from colonnade.config.model import ModelConfig

WORDS = "language_model.embedding.word_embeddings"
HEAD_WORDS = "word_embeddings_for_head.weight"
_BLOCK = "language_model.encoder.layers.{i}"
_BOTH: Mapping[str, Place] = {
    "embedding.tokens": at(WORDS),
    "embedding.positions": at("language_model.embedding.position_embeddings"),
    "blocks.{i}.attention_norm": at(f"{_BLOCK}.input_layernorm"),
    "blocks.{i}.attention.qkv": at(f"{_BLOCK}.self_attention.query_key_value"),
    "blocks.{i}.attention.query": at(f"{_BLOCK}.self_attention.query"),
    "blocks.{i}.attention.key_value": at(f"{_BLOCK}.self_attention.key_value"),
    "blocks.{i}.attention.query_norm": at(f"{_BLOCK}.self_attention.q_layernorm"),
    "blocks.{i}.attention.key_norm": at(f"{_BLOCK}.self_attention.k_layernorm"),
    "blocks.{i}.attention.output": at(f"{_BLOCK}.self_attention.dense"),
    "blocks.{i}.mlp_norm": at(f"{_BLOCK}.post_attention_layernorm"),
    "blocks.{i}.mlp.gate": at(f"{_BLOCK}.mlp.gate"),
    "blocks.{i}.mlp.up": at(f"{_BLOCK}.mlp.dense_h_to_4h"),
    "blocks.{i}.mlp.down": at(f"{_BLOCK}.mlp.dense_4h_to_h"),
    "head.norm": at("language_model.encoder.final_layernorm"),
    "head.output": at("language_model.output_layer"),
}
_BERT: Mapping[str, Place] = {
    **_BOTH,
    "embedding.types": at("language_model.embedding.tokentype_embeddings"),
    "head": at("lm_head"),
    "head.dense": at("lm_head.dense"),
    "head.dense_norm": at("lm_head.layernorm"),
    "head.pooler": at("language_model.pooler.dense"),
    "head.order": at("binary_head"),
}
_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "apply_residual_connection_post_layernorm": ((False,), "the residual is taken before the norm here"),
    "apply_layernorm_1p": ((False,), "the weight of a norm is multiplied as it is here"),
    "num_experts": ((0, 1), "its MLP is a mixture of experts, and there are none here"),
    "multi_latent_attention": ((False,), "keys and values are projected in one step here"),
    "squared_relu": ((False,), "the activation is gelu or swiglu here"),
    "geglu": ((False,), "the activation is gelu or swiglu here"),
    "quick_geglu": ((False,), "the activation is gelu or swiglu here"),
    "activation_func_clamp_value": ((), "what goes into an activation is not clamped here"),
    "glu_linear_offset": ((0.0, 0), "a gate is multiplied by what it lets through as it is here"),
    "qk_l2_norm": ((False,), "queries and keys are normalised by a norm with weights here, or not at all"),
    "rotary_interleaved": ((False,), "features i and i + d/2 of a head turn together here"),
    "use_rope_scaling": ((False,), "its rule for longer texts is not read from these arguments"),
    "no_rope_freq": ((), "all layers have the same positions here"),
    "window_size": ((), "the window of its layers is not read from these arguments"),
    "retro_add_retriever": ((False,), "nothing is retrieved here"),
    "mtp_num_layers": ((0,), "one token is predicted at a time here"),
    "heterogeneous_layers_config_path": ((), "all layers are alike here"),
    "hybrid_override_pattern": ((), "all layers are alike here"),
    "softmax_type": (("vanilla",), "nothing is added to the softmax of attention here"),
    "attention_output_gate": ((False,), "the output of attention has no gate here"),
    "bert_binary_head": ((True,), "BERT tells the order of two texts here"),
}


def _activation(keys: Keys) -> str:
    """Its fused bias and GELU, and OpenAI's, are the approximation; plain, it is exact."""
    approximate = [
        keys.take(name, bool, default) for name, default in (("openai_gelu", False), ("bias_gelu_fusion", True))
    ]
    if keys.take("swiglu", bool, False):
        return "swiglu"
    return "gelu_tanh" if any(approximate) else "gelu"


def _positions(keys: Keys) -> dict[str, Any]:
    kind = keys.get("position_embedding_type") or "learned_absolute"
    if keys.take("use_rotary_position_embeddings", bool, False):
        kind = "rope"
    if kind not in ("learned_absolute", "rope"):
        keys.refuse(f"position_embedding_type = {shown(kind)}: learned_absolute and rope are read")
    if kind != "rope":
        return {}
    factor = keys.take("rotary_seq_len_interpolation_factor", int, None)
    scaling = {} if factor in (None, 1) else {"scaling": "linear", "factor": float(factor)}
    share, base = keys.take("rotary_percent", float, 1.0), float(keys.take("rotary_base", int, 10_000))
    return {"position": "rotary", "rotary": {"share": share, "base": base, **scaling}}


def _norm(keys: Keys) -> dict[str, Any]:
    kind = keys.take("normalization", str, "LayerNorm")
    if kind not in ("LayerNorm", "RMSNorm"):
        keys.refuse(f"normalization = {shown(kind)}: LayerNorm and RMSNorm are read")
    epsilon = keys.take("norm_epsilon", float, keys.take("layernorm_epsilon", float, 1e-5))
    return {"norm": "rmsnorm" if kind == "RMSNorm" else "layernorm", "norm_epsilon": epsilon}


def _read(kind: str, keys: Keys) -> dict[str, Any]:
    """The arguments of a run to [model]."""
    for name, (allowed, why) in _NEUTRAL.items():
        if kind == "bert" or name != "bert_binary_head":
            keys.fixed(name, *allowed, why=why)
    heads = keys.take("num_attention_heads", int)
    groups = keys.take("num_query_groups", int, 1) if keys.take("group_query_attention", bool, False) else heads
    bias = keys.take("add_bias_linear", bool, True)
    alone = {"query_key_value_bias": True} if not bias and keys.take("add_qkv_bias", bool, False) else {}
    std = keys.take("init_method_std", float, 0.02)
    return {
        "kind": kind,
        "num_layers": keys.take("num_layers", int),
        "hidden_size": keys.take("hidden_size", int),
        "num_heads": heads,
        "num_key_value_heads": None if groups == heads else groups,
        "head_dim": keys.take("kv_channels", int, None),
        "ffn_hidden_size": keys.take("ffn_hidden_size", int, None),
        "seq_length": keys.take("max_position_embeddings", int),
        "vocab_size": keys.take("padded_vocab_size", int),
        "activation": _activation(keys),
        "bias": bias,
        **alone,
        "query_key_norm": keys.take("qk_layernorm", bool, False),
        "tie_embeddings": not keys.take("untie_embeddings_and_output_weights", bool, False),
        **({"token_types": 2} if kind == "bert" else {}),
        **_norm(keys),
        **_positions(keys),
        **({"init_std": std} if std > 0 else {}),
    }


def _seconds(model: ModelConfig) -> tuple[Second, ...]:
    """The last of several stages has a copy of the token table."""
    return (Second(HEAD_WORDS, "embedding.tokens.weight", True, False),) if model.tie_embeddings else ()


def _not_written(model: ModelConfig) -> dict[str, Any]:
    raise AssertionError("checkpoints of Megatron-LM are read, not written")


def _family(kind: str, name: str, places: Mapping[str, Place]) -> Family:
    return Family(
        model_type=f"megatron-lm-{kind}",
        title=f"Megatron-LM {name}",
        architecture=f"{name}Model",
        others=(),
        base="",
        places=places,
        read=partial(_read, kind),
        write=_not_written,
        seconds=_seconds,
        constants=re.compile(r".*\.(inv_freq|masked_bias|attention\.bias)"),
    )


GPT = _family("gpt", "GPT", _BOTH)
BERT = _family("bert", "BERT", _BERT)
