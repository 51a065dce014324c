"""GPT-2 (Radford et al., 2019). Its matrices are Conv1D's: [in, out], applied as x·W."""

import re
from typing import Any

from colonnade.architecture.huggingface.common import UNGATED, activation, standard_deviation, their_activation
from colonnade.architecture.huggingface.keys import Keys
from colonnade.architecture.huggingface.statement import Family, at, tied_output
from colonnade.config.model import ModelConfig

_BLOCK = "transformer.h.{i}"
PLACES = {
    "embedding.tokens": at("transformer.wte"),
    "embedding.positions": at("transformer.wpe"),
    "blocks.{i}.attention_norm": at(f"{_BLOCK}.ln_1"),
    "blocks.{i}.attention.qkv": at(f"{_BLOCK}.attn.c_attn", conv=True, fused=3),
    "blocks.{i}.attention.output": at(f"{_BLOCK}.attn.c_proj", conv=True),
    "blocks.{i}.mlp_norm": at(f"{_BLOCK}.ln_2"),
    "blocks.{i}.mlp.up": at(f"{_BLOCK}.mlp.c_fc", conv=True),
    "blocks.{i}.mlp.down": at(f"{_BLOCK}.mlp.c_proj", conv=True),
    "head.norm": at("transformer.ln_f"),
    "head.output": at("lm_head"),
}


def _read(keys: Keys) -> dict[str, Any]:
    length = keys.take("n_positions", int, 1024)
    keys.fixed("n_ctx", length, why=f"it is not n_positions = {length}")
    keys.fixed("scale_attn_weights", True, why="scores are divided by √d here")
    keys.fixed("scale_attn_by_inverse_layer_idx", False, why="scores are scaled alike in all layers here")
    keys.fixed("reorder_and_upcast_attn", False, why="attention is computed in the model's number format here")
    keys.fixed("add_cross_attention", False, why="a decoder with an encoder is another model")
    keys.ignore("resid_pdrop", "embd_pdrop", "attn_pdrop", *_SUMMARY)
    return {
        "num_layers": keys.take("n_layer", int, 12),
        "hidden_size": keys.take("n_embd", int, 768),
        "num_heads": keys.take("n_head", int, 12),
        "ffn_hidden_size": keys.take("n_inner", int, None),
        "seq_length": length,
        "vocab_size": keys.take("vocab_size", int, 50257),
        "activation": activation(keys, "activation_function", "gelu_new", UNGATED),
        "norm_epsilon": keys.take("layer_norm_epsilon", float, 1e-5),
        "tie_embeddings": keys.take("tie_word_embeddings", bool, True),
        **standard_deviation(keys),
    }


_SUMMARY = tuple(f"summary_{key}" for key in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"))


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.seq_length,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.ffn,
        "activation_function": their_activation(model, UNGATED),
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }


GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    architecture="GPT2LMHeadModel",
    others=("GPT2Model",),
    base="transformer.",
    places=PLACES,
    read=_read,
    write=_write,
    seconds=tied_output,
    also={"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    | {"n_positions": "max_position_embeddings"},
    constants=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
)
