"""The spellings of one module in versions of Megatron-LM, brought to one, and how tensor parallelism cuts it."""

import re

from colonnade.architecture.megatron import HEAD_WORDS, WORDS

_SPELLINGS = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^language_model\.transformer\.", "language_model.encoder."),  # before 2021
        (r"^decoder\.|^encoder\.", "language_model.encoder."),  # megatron.core
        (r"^embedding\.", "language_model.embedding."),
        (r"^output_layer\.", "language_model.output_layer."),
        (r"^pooler\.", "language_model.pooler."),
        (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".post_attention_layernorm.\1"),
        (r"\.self_attention\.linear_qkv\.", ".self_attention.query_key_value."),
        (r"\.self_attention\.linear_proj\.", ".self_attention.dense."),
        (r"\.mlp\.linear_fc1\.", ".mlp.dense_h_to_4h."),
        (r"\.mlp\.linear_fc2\.", ".mlp.dense_4h_to_h."),
        (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
        (r"(layers\.\d+)\.attention\.(query_key_value|dense)\.", r"\1.self_attention.\2."),
        (r"\.(input|post_attention|final)_norm\.(weight|bias)$", r".\1_layernorm.\2"),
        (r"^lm_head\.(norm|layer_norm)\.", "lm_head.layernorm."),
    )
)
OUTPUT = "language_model.output_layer.weight"
TABLES = (HEAD_WORDS, OUTPUT)
"""What the last stage has of a vocabulary: the copy of a tied table, or an output layer."""
LAYER = re.compile(r"(language_model\.encoder\.layers\.)(\d+)(\..*)")
_QUERY_KEY_VALUE = ".self_attention.query_key_value."
_GATED = ".mlp.dense_h_to_4h."
_ROWS = re.compile(
    rf".*{re.escape(_QUERY_KEY_VALUE)}.*|.*{re.escape(_GATED)}.*|{re.escape(WORDS)}\.weight|lm_head\.bias"
    rf"|{re.escape(OUTPUT)}|{re.escape(HEAD_WORDS)}"
)
_COLUMNS = re.compile(r".*\.(self_attention\.dense|mlp\.dense_4h_to_h)\.weight")


def spelled(name: str) -> str:
    """The name of a tensor as `language_model.encoder` of 2021 to 2023 has it."""
    for pattern, new in _SPELLINGS:
        name = pattern.sub(new, name)
    return name


def cut_dim(name: str) -> int | None:
    """The dim that tensor parallelism cuts; None: every rank has all of it."""
    return 0 if _ROWS.fullmatch(name) else 1 if _COLUMNS.fullmatch(name) else None


def is_query_key_value(name: str) -> bool:
    return _QUERY_KEY_VALUE in name


def is_first_of_mlp(name: str) -> bool:
    return _GATED in name
