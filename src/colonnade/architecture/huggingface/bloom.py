"""BLOOM (arXiv 2211.05100): ALiBi, and a norm behind the embedding. Rows of its q, k, v are [head, (q, k, v), d]."""

from typing import Any

from colonnade.architecture.huggingface.common import standard_deviation
from colonnade.architecture.huggingface.keys import Keys
from colonnade.architecture.huggingface.statement import Family, at, tied_output
from colonnade.config.model import ModelConfig

_BLOCK = "transformer.h.{i}"
PLACES = {
    "embedding.tokens": at("transformer.word_embeddings"),
    "embedding.norm": at("transformer.word_embeddings_layernorm"),
    "blocks.{i}.attention_norm": at(f"{_BLOCK}.input_layernorm"),
    "blocks.{i}.attention.qkv": at(f"{_BLOCK}.self_attention.query_key_value"),
    "blocks.{i}.attention.output": at(f"{_BLOCK}.self_attention.dense"),
    "blocks.{i}.mlp_norm": at(f"{_BLOCK}.post_attention_layernorm"),
    "blocks.{i}.mlp.up": at(f"{_BLOCK}.mlp.dense_h_to_4h"),
    "blocks.{i}.mlp.down": at(f"{_BLOCK}.mlp.dense_4h_to_h"),
    "head.norm": at("transformer.ln_f"),
    "head.output": at("lm_head"),
}


def _read(keys: Keys) -> dict[str, Any]:
    width = keys.take("hidden_size", int, 64)
    keys.fixed("n_inner", 4 * width, why="BLOOM's MLP is four times as wide as the residual stream")
    why = "the residual is taken before the norm here"
    keys.fixed("apply_residual_connection_post_layernorm", False, why=why)
    keys.ignore("hidden_dropout", "attention_dropout", "attention_softmax_in_fp32", "masked_softmax_fusion")
    keys.ignore("bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi")
    return {
        "num_layers": keys.take("n_layer", int, 2),
        "hidden_size": width,
        "num_heads": keys.take("n_head", int, 8),
        "seq_length": keys.take("seq_length", int, 2048),
        "vocab_size": keys.take("vocab_size", int, 250_880),
        "position": "alibi",
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "norm_epsilon": keys.take("layer_norm_epsilon", float, 1e-5),
        "tie_embeddings": keys.take("tie_word_embeddings", bool, True),
        **standard_deviation(keys),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "seq_length": model.seq_length,
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_std,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": model.tie_embeddings,
    }


BLOOM = Family(
    model_type="bloom",
    title="BLOOM",
    architecture="BloomForCausalLM",
    others=("BloomModel",),
    base="transformer.",
    places=PLACES,
    read=_read,
    write=_write,
    seconds=tied_output,
    also={"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
)
