"""GPT-NeoX (Black et al., 2022), Pythia and RedPajama-INCITE: with attention and MLP side by side or in turn.

Rows of its q, k, v are [head, (q, k, v), d], as ours.
"""

import re
from functools import partial
from typing import Any

from colonnade.architecture.huggingface.common import (
    UNGATED,
    activation,
    rotary,
    standard_deviation,
    their_activation,
    their_rotary,
)
from colonnade.architecture.huggingface.keys import Keys
from colonnade.architecture.huggingface.statement import Family, at, tied_output
from colonnade.config.model import ModelConfig

_BLOCK = "gpt_neox.layers.{i}"
PLACES = {
    "embedding.tokens": at("gpt_neox.embed_in"),
    "blocks.{i}.attention_norm": at(f"{_BLOCK}.input_layernorm"),
    "blocks.{i}.attention.qkv": at(f"{_BLOCK}.attention.query_key_value"),
    "blocks.{i}.attention.output": at(f"{_BLOCK}.attention.dense"),
    "blocks.{i}.mlp_norm": at(f"{_BLOCK}.post_attention_layernorm"),
    "blocks.{i}.mlp.up": at(f"{_BLOCK}.mlp.dense_h_to_4h"),
    "blocks.{i}.mlp.down": at(f"{_BLOCK}.mlp.dense_4h_to_h"),
    "head.norm": at("gpt_neox.final_layer_norm"),
    "head.output": at("embed_out"),
}


def _read(keys: Keys) -> dict[str, Any]:
    keys.fixed("attention_bias", True, why="all linear layers of a model have a bias here, or none has")
    keys.fixed("is_decoder", False, True, why="it is no truth value")
    keys.ignore("attention_dropout", "hidden_dropout")
    length = keys.take("max_position_embeddings", int, 2048)
    return {
        "num_layers": keys.take("num_hidden_layers", int, 44),
        "hidden_size": keys.take("hidden_size", int, 6144),
        "num_heads": keys.take("num_attention_heads", int, 64),
        "ffn_hidden_size": keys.take("intermediate_size", int, 24_576),
        "seq_length": length,
        "vocab_size": keys.take("vocab_size", int, 50_432),
        "position": "rotary",
        "rotary": rotary(
            keys, length, keys.take("rotary_emb_base", float, 10_000.0), share=keys.take("rotary_pct", float, 0.25)
        ),
        "parallel_residual": keys.take("use_parallel_residual", bool, True),
        "activation": activation(keys, "hidden_act", "gelu", UNGATED),
        "norm_epsilon": keys.take("layer_norm_eps", float, 1e-5),
        "tie_embeddings": keys.take("tie_word_embeddings", bool, False),
        **standard_deviation(keys),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    rope = their_rotary(model.rotary)
    rope["rope_parameters"]["partial_rotary_factor"] = model.rotary.share
    if "rope_scaling" in rope:
        rope["rope_scaling"] = {**rope["rope_scaling"], "partial_rotary_factor": model.rotary.share}
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn,
        "hidden_act": their_activation(model, UNGATED),
        "max_position_embeddings": model.seq_length,
        "initializer_range": model.init_std,
        "layer_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": True,
        "rotary_pct": model.rotary.share,
        "rotary_emb_base": model.rotary.base,
        **rope,
    }


NEOX = Family(
    model_type="gpt_neox",
    title="GPT-NeoX",
    architecture="GPTNeoXForCausalLM",
    others=("GPTNeoXModel",),
    base="gpt_neox.",
    places=PLACES,
    read=_read,
    write=_write,
    seconds=partial(tied_output, name="embed_out.weight"),
    constants=re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)
