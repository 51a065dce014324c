"""Shards of all ranks, laid together, are the logical weight: nothing twice, nothing missing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.model import ModelConfig
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import paper_mesh
from colonnade.model.gpt import GPT
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import placements
from tests.blocks import LLAMA_BLOCK
from tests.tensor_parallel.shards import window


def model(vocab_size: int, tp_size: int, rank: int, *, tied: bool = True) -> GPT:
    config = ModelConfig(num_layers=1, hidden_size=16, num_heads=8, seq_length=4, tie_embeddings=tied)
    return GPT(config, vocab_size, Parallel(paper_mesh(Layout(tp=tp_size), rank).tp))


@given(st.integers(1, 70), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_every_element_is_on_one_rank_or_on_all(vocab_size: int, tp_size: int, tied: bool) -> None:
    counts: dict[str, torch.Tensor] = {}
    cut: dict[str, bool] = {}
    for rank in range(tp_size):
        tp = paper_mesh(Layout(tp=tp_size), rank).tp
        for place in placements(model(vocab_size, tp_size, rank, tied=tied), tp):
            count = counts.setdefault(place.name, torch.zeros(place.shape))
            box = window(place, count)
            assert box.shape == place.real(place.parameter).shape, "a box lies within the logical weight"
            box += 1
            assert cut.setdefault(place.name, place.dim is not None) == (place.dim is not None)
    for name, count in counts.items():
        assert (count == (1 if cut[name] else tp_size)).all(), name


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_weight_is_looked_up_in_its_layer(tp_size: int) -> None:
    """As it is there now, whether it is cut or not."""
    gpt = model(37, tp_size, 0)
    tp = paper_mesh(Layout(tp=tp_size), 0).tp
    found = list(placements(gpt, tp))
    assert {place.dim is None for place in found} == {True, False}
    assert all(place.held_in[place.key] is place.parameter for place in found)
    gpt.load_state_dict(gpt.state_dict(), assign=True)
    assert not any(place.held_in[place.key] is place.parameter for place in found)


def test_names_and_shapes_are_the_logical_ones() -> None:
    expected = {
        "embedding.tokens.weight": (37, 16),
        "embedding.positions.weight": (4, 16),
        "blocks.0.attention_norm.weight": (16,),
        "blocks.0.attention_norm.bias": (16,),
        "blocks.0.attention.qkv.weight": (48, 16),
        "blocks.0.attention.qkv.bias": (48,),
        "blocks.0.attention.output.weight": (16, 16),
        "blocks.0.attention.output.bias": (16,),
        "blocks.0.mlp_norm.weight": (16,),
        "blocks.0.mlp_norm.bias": (16,),
        "blocks.0.mlp.up.weight": (64, 16),
        "blocks.0.mlp.up.bias": (64,),
        "blocks.0.mlp.down.weight": (16, 64),
        "blocks.0.mlp.down.bias": (16,),
        "head.norm.weight": (16,),
        "head.norm.bias": (16,),
    }
    tp = paper_mesh(Layout(tp=4), 3).tp
    assert {place.name: place.shape for place in placements(model(37, 4, 3), tp)} == expected
    untied = {place.name: place.shape for place in placements(model(37, 4, 3, tied=False), tp)}
    assert untied == {**expected, "head.output.weight": (37, 16)}


@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_what_is_replicated(tp_size: int) -> None:
    """Norms, positions, and the biases that are added after a sum; everything else is cut."""
    tp = paper_mesh(Layout(tp=tp_size), 0).tp
    whole = {
        place.name.removeprefix("blocks.0.") for place in placements(model(37, tp_size, 0), tp) if place.dim is None
    }
    norms = {f"{norm}.{key}" for norm in ("attention_norm", "mlp_norm", "head.norm") for key in ("weight", "bias")}
    assert whole == norms | {"embedding.positions.weight", "attention.output.bias", "mlp.down.bias"}


def test_a_rank_without_tokens_has_an_empty_box() -> None:
    tp = paper_mesh(Layout(tp=4), 3).tp
    table = next(place for place in placements(model(3, 4, 3), tp) if place.name == "embedding.tokens.weight")
    assert table.extent == 0 and table.real(table.parameter).numel() == 0 and table.offset == 3


@pytest.mark.parametrize("tp_size", [2, 4])
def test_gradients_of_what_ranks_share_by_heads_are_partial_sums(tp_size: int) -> None:
    """Norms of heads on any number of ranks; keys and values where there are more ranks than heads of them, of which
    every rank then has all.
    """
    config = ModelConfig(
        **{
            **LLAMA_BLOCK,
            "num_layers": 1,
            "hidden_size": 16,
            "num_heads": 8,
            "num_key_value_heads": 2,
            "seq_length": 4,
        },
        query_key_norm=True,
        query_key_value_bias=True,
    )
    for rank in range(tp_size):
        tp = paper_mesh(Layout(tp=tp_size), rank).tp
        found = {place.name: place for place in placements(GPT(config, 37, Parallel(tp)), tp)}
        shared = [f"blocks.0.attention.key_value.{key}" for key in ("weight", "bias")]
        norms = [f"blocks.0.attention.{which}_norm.weight" for which in ("query", "key")]
        partial = [name for name, place in found.items() if place.is_partial]
        assert sorted(partial) == sorted(norms + shared * (tp_size > 2))
        assert [len(found[name].parameter) for name in shared] == [4 if tp_size == 2 else 8] * 2
