"""T5 (Raffel et al., 2020) and its version 1.1: one family, whose config.json says which MLP and which output layer."""

import re
from collections.abc import Mapping
from typing import Any

from colonnade.architecture.huggingface.common import GELUS, activation
from colonnade.architecture.huggingface.keys import Keys, shown
from colonnade.architecture.huggingface.statement import Family, Place, Second, at
from colonnade.config.model import ModelConfig

ACTIVATIONS: Mapping[str, str] = {"relu": "relu", "gated-gelu": "geglu_tanh"}


def _attention(ours: str, theirs: str, norm: str) -> dict[str, Place]:
    return {
        f"{ours}_norm": at(norm),
        f"{ours}.query": at(f"{theirs}.q"),
        f"{ours}.key_value": at(f"{theirs}.k", f"{theirs}.v"),
        f"{ours}.output": at(f"{theirs}.o"),
    }


def _stack(name: str, mlp: int) -> dict[str, Place]:
    """`mlp`: the number of the sublayer that is the MLP."""
    ours, block = f"{name}.blocks.{{i}}", f"{name}.block.{{i}}.layer"
    return {
        f"{name}.positions": at(f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        **_attention(f"{ours}.attention", f"{block}.0.SelfAttention", f"{block}.0.layer_norm"),
        f"{ours}.mlp_norm": at(f"{block}.{mlp}.layer_norm"),
        f"{ours}.mlp.up": at(f"{block}.{mlp}.DenseReluDense.wi"),
        f"{ours}.mlp.down": at(f"{block}.{mlp}.DenseReluDense.wo"),
    }


def _gated(name: str, mlp: int) -> dict[str, Place]:
    ours, theirs = f"{name}.blocks.{{i}}.mlp", f"{name}.block.{{i}}.layer.{mlp}.DenseReluDense"
    return {f"{ours}.gate": at(f"{theirs}.wi_0"), f"{ours}.up": at(f"{theirs}.wi_1")}


_CROSS = "decoder.block.{i}.layer.1"
PLACES: Mapping[str, Place] = {
    "embedding.tokens": at("shared"),
    **_stack("encoder", 1),
    "encoder.norm": at("encoder.final_layer_norm"),
    **_stack("decoder", 2),
    **_attention("decoder.blocks.{i}.cross", f"{_CROSS}.EncDecAttention", f"{_CROSS}.layer_norm"),
    "head.norm": at("decoder.final_layer_norm"),
    "head.output": at("lm_head"),
}


def _read(keys: Keys) -> dict[str, Any]:
    keys.ignore("dropout_rate")
    keys.fixed("is_decoder", False, why="the encoder's part says it of itself alone")
    layers, tied = keys.take("num_layers", int), keys.take("tie_word_embeddings", bool, True)
    decoder = keys.take("num_decoder_layers", int, None)
    factor = keys.take("initializer_factor", float, 1.0)
    return {
        "kind": "t5",
        "num_layers": layers,
        "num_decoder_layers": None if decoder == layers else decoder,
        "hidden_size": keys.take("d_model", int),
        "num_heads": keys.take("num_heads", int),
        "head_dim": keys.take("d_kv", int, 64),
        "ffn_hidden_size": keys.take("d_ff", int),
        "seq_length": keys.take("n_positions", int, 512),
        "vocab_size": keys.take("vocab_size", int),
        "activation": _activation(keys),
        "relative_buckets": keys.take("relative_attention_num_buckets", int, 32),
        "relative_distance": keys.take("relative_attention_max_distance", int, 128),
        "norm_epsilon": keys.take("layer_norm_epsilon", float, 1e-6),
        # transformers 5 writes every model as tied, and whether the output layer's input is scaled
        "tie_embeddings": keys.take("scale_decoder_outputs", bool, tied),
        **({"init_std": factor} if factor > 0 else {}),
    }


def _activation(keys: Keys) -> str:
    """Of feed_forward_proj. Two other keys follow from it, take precedence for transformers, and may not differ."""
    ours, given = activation(keys, "feed_forward_proj", "relu", ACTIVATIONS), keys.get("feed_forward_proj")
    if given not in (None, *ACTIVATIONS):
        keys.ignore("dense_act_fn", "is_gated_act")
        return ours
    is_gated, why = ours == "geglu_tanh", f"feed_forward_proj = {shown(given or 'relu')} says otherwise"
    names = [name for name, each in GELUS.items() if each == "gelu_tanh"] if is_gated else ["relu"]
    keys.fixed("dense_act_fn", *names, why=why)
    keys.fixed("is_gated_act", is_gated, why=why)
    return ours


def _write(model: ModelConfig) -> dict[str, Any]:
    theirs = {ours: name for name, ours in ACTIVATIONS.items()}
    return {
        "is_encoder_decoder": True,
        "vocab_size": model.vocab_size,
        "d_model": model.hidden_size,
        "d_kv": model.head_width,
        "d_ff": model.ffn,
        "num_layers": model.num_layers,
        "num_decoder_layers": model.decoder_layers or model.num_layers,
        "num_heads": model.num_heads,
        "n_positions": model.seq_length,
        "feed_forward_proj": theirs.get(model.activation, "relu"),
        "relative_attention_num_buckets": model.relative_buckets,
        "relative_attention_max_distance": model.relative_distance,
        "dropout_rate": model.dropout,
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_factor": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _seconds(model: ModelConfig) -> tuple[Second, ...]:
    """Both stacks look tokens up in the one table; tied, the output layer is the table too."""
    names = ("encoder.embed_tokens", "decoder.embed_tokens", *(("lm_head",) if model.tie_embeddings else ()))
    return tuple(Second(f"{name}.weight", "embedding.tokens.weight", True, False) for name in names)


T5 = Family(
    model_type="t5",
    title="T5",
    architecture="T5ForConditionalGeneration",
    others=("T5WithLMHeadModel",),
    base="",
    places=PLACES,
    gated_places={**_gated("encoder", 1), **_gated("decoder", 2)},
    read=_read,
    write=_write,
    seconds=_seconds,
    constants=re.compile(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"),
    has_decoder=True,
)
