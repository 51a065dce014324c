"""The spellings of one module, how each tensor is cut, and arguments of which only one value is computed here."""

from typing import Any

import pytest
import torch

from colonnade.architecture import megatron
from colonnade.architecture.huggingface.keys import Keys, Refused
from colonnade.megatron.joined import half, heads_first, keys_and_values, queries
from colonnade.megatron.names import LAYER, cut_dim, spelled
from tests.megatron.written import GPT

LAYERS = "language_model.encoder.layers.3"


@pytest.mark.parametrize(
    ("theirs", "one"),
    [
        ("language_model.transformer.layers.3.attention.dense.weight", f"{LAYERS}.self_attention.dense.weight"),
        ("language_model.transformer.layers.3.attention.query_key_value.bias",
         f"{LAYERS}.self_attention.query_key_value.bias"),
        ("decoder.layers.3.self_attention.linear_qkv.weight", f"{LAYERS}.self_attention.query_key_value.weight"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", f"{LAYERS}.input_layernorm.weight"),
        ("encoder.layers.3.self_attention.linear_proj.bias", f"{LAYERS}.self_attention.dense.bias"),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_bias", f"{LAYERS}.post_attention_layernorm.bias"),
        ("decoder.layers.3.mlp.linear_fc1.weight", f"{LAYERS}.mlp.dense_h_to_4h.weight"),
        ("decoder.layers.3.mlp.linear_fc2.weight", f"{LAYERS}.mlp.dense_4h_to_h.weight"),
        ("decoder.layers.3.pre_mlp_layernorm.weight", f"{LAYERS}.post_attention_layernorm.weight"),
        ("language_model.encoder.layers.3.input_norm.weight", f"{LAYERS}.input_layernorm.weight"),
        ("language_model.encoder.layers.3.post_attention_norm.bias", f"{LAYERS}.post_attention_layernorm.bias"),
        ("language_model.encoder.final_norm.weight", "language_model.encoder.final_layernorm.weight"),
        ("decoder.final_layernorm.weight", "language_model.encoder.final_layernorm.weight"),
        ("embedding.word_embeddings.weight", "language_model.embedding.word_embeddings.weight"),
        ("output_layer.weight", "language_model.output_layer.weight"),
        ("pooler.dense.weight", "language_model.pooler.dense.weight"),
        ("lm_head.norm.weight", "lm_head.layernorm.weight"),
        ("lm_head.layer_norm.bias", "lm_head.layernorm.bias"),
        ("word_embeddings_for_head.weight", "word_embeddings_for_head.weight"),
    ],
)  # fmt: skip
def test_the_spellings_of_versions_are_brought_to_one(theirs: str, one: str) -> None:
    """Which stays as it is."""
    assert spelled(theirs) == spelled(one) == one
    found = LAYER.fullmatch(one)
    assert (found is None) == (LAYERS not in one) and (found is None or found[2] == "3")


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        (f"{LAYERS}.self_attention.query_key_value.weight", 0),
        (f"{LAYERS}.self_attention.query_key_value.bias", 0),
        (f"{LAYERS}.self_attention.dense.weight", 1),
        (f"{LAYERS}.self_attention.dense.bias", None),
        (f"{LAYERS}.mlp.dense_h_to_4h.weight", 0),
        (f"{LAYERS}.mlp.dense_h_to_4h.bias", 0),
        (f"{LAYERS}.mlp.dense_4h_to_h.weight", 1),
        (f"{LAYERS}.mlp.dense_4h_to_h.bias", None),
        (f"{LAYERS}.input_layernorm.weight", None),
        ("language_model.embedding.word_embeddings.weight", 0),
        ("language_model.embedding.position_embeddings.weight", None),
        ("language_model.output_layer.weight", 0),
        ("word_embeddings_for_head.weight", 0),
        ("lm_head.bias", 0),
        ("lm_head.dense.weight", None),
        ("lm_head.layernorm.bias", None),
        ("binary_head.weight", None),
    ],
)
def test_the_dim_that_ranks_share(name: str, dim: int | None) -> None:
    assert cut_dim(name) == dim


@pytest.mark.parametrize(
    ("version", "order"),
    [(0, "part head d"), (0.5, "part head d"), (1, "head d part"), (1.5, "head d part"), (2, "head part d"),
     (3.0, "head part d")],
)  # fmt: skip
@pytest.mark.parametrize("columns", [(), (4,)])
def test_rows_of_each_version_come_by_heads(version: float, order: str, columns: tuple[int, ...]) -> None:
    sizes = {"head": 2, "part": 3, "d": 5}
    ours = torch.arange(30 * 4).view(2, 3, 5, 4)[..., : columns[0] if columns else 1]
    places = [["head", "part", "d"].index(name) for name in order.split()]
    theirs = ours.permute(*places, 3).reshape(30, *columns)
    assert torch.equal(heads_first(version, sizes["d"])(theirs), ours.reshape(30, *columns))


def test_of_grouped_heads_queries_and_pairs_of_keys_and_values_are_told_apart() -> None:
    rows = torch.arange(2 * 5 * 4).view(2, 5, 4)  # 2 groups of 3 queries, a key and a value, of 4 features each
    assert torch.equal(queries(3, 4)(rows.flatten()), rows[:, :3].flatten())
    assert torch.equal(keys_and_values(3, 4)(rows.flatten()), rows[:, 3:].flatten())
    assert [half(number)(torch.arange(6)).tolist() for number in (0, 1)] == [[0, 1, 2], [3, 4, 5]]


OTHER_MODELS: list[tuple[str, Any]] = [
    ("apply_layernorm_1p", True),
    ("multi_latent_attention", True),
    ("squared_relu", True),
    ("geglu", True),
    ("quick_geglu", True),
    ("rotary_interleaved", True),
    ("use_rope_scaling", True),
    ("no_rope_freq", 4),
    ("window_size", [128, 0]),
    ("retro_add_retriever", True),
    ("mtp_num_layers", 1),
    ("heterogeneous_layers_config_path", "layers.json"),
    ("hybrid_override_pattern", "M-M*"),
    ("softmax_type", "learnable"),
    ("attention_output_gate", True),
]


@pytest.mark.parametrize(("name", "value"), OTHER_MODELS)
def test_an_argument_that_makes_it_another_model_is_refused_by_its_name(name: str, value: Any) -> None:
    keys = Keys({**GPT, "padded_vocab_size": 64, name: value})
    megatron.GPT.read(keys)
    with pytest.raises(Refused, match=f"{name} = .*: .* here|{name} = .*: .* is not read from these arguments"):
        keys.finish(unknown=False)


def test_arguments_that_change_nothing_are_let_pass() -> None:
    said: dict[str, Any] = {name: False if value is True else None for name, value in OTHER_MODELS}
    plain = {**GPT, "padded_vocab_size": 64}
    keys = Keys({**plain, **said, "mtp_num_layers": 0, "softmax_type": "vanilla"})
    assert megatron.GPT.read(keys) == megatron.GPT.read(Keys(plain))
    keys.finish(unknown=False)
