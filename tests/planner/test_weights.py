"""Predicted weights and buffers beside those that the model and its flat buffers have."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.schema import ModelConfig, parameter_count
from colonnade.data_parallel.buckets import FlatUnit, Storage
from colonnade.mesh.mesh import Axis
from colonnade.model.gpt import GPT, TABLE, unit_names
from colonnade.planner import weights
from colonnade.tensor_parallel.embedding import vocab_rows_per_rank
from colonnade.tensor_parallel.placement import named_placements

VOCAB = 61
BASE = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "seq_length": 10}
MODELS = [
    ModelConfig(**BASE, tie_embeddings=tied, position=position, norm_position=norm, embedding_norm=embedding_norm)
    for tied, position, norm, embedding_norm in product(
        (True, False), ("learned", "alibi"), ("pre", "post"), (True, False)
    )
]
STAGES = [["embedding"], ["embedding", "blocks.0"], ["blocks.1"], ["blocks.1", "head"], ["head"], unit_names(2)]


def axis(name: str, size: int) -> Axis:
    return Axis(name, size, 1 % size)


@pytest.mark.parametrize(
    "model", MODELS, ids=lambda m: f"{m.tie_embeddings}-{m.position}-{m.norm_position}-{m.embedding_norm}"
)
def test_weights_and_buffers_of_every_part(model: ModelConfig) -> None:
    for units, tp, dp in product(STAGES, (1, 2), (1, 3)):
        built = GPT(model, VOCAB, axis("tp", tp), units=units)
        parts = named_placements(built.parts(), axis("tp", tp))
        assert sorted(weights.parts_of(model, units)) == sorted(parts)
        for unit in units:
            assert weights.needs(model, unit) == built.needs(unit)
        for name, places in parts.items():
            expected = weights.weights_of(model, name, vocab_size=VOCAB, tp=tp)
            assert sorted(expected) == sorted(place.parameter.numel() for place in places)
            flat = FlatUnit(name, places, axis("dp", dp), Storage(torch.float32, torch.device("cpu")))
            assert weights.buffer_length(expected, dp) == flat.size


def test_the_table_has_the_models_name() -> None:
    assert weights.TABLE == TABLE


@given(st.integers(1, 300_000), st.integers(1, 64))
def test_rows_of_the_table(vocab_size: int, tp: int) -> None:
    assert weights.table_rows(vocab_size, tp) == vocab_rows_per_rank(vocab_size, tp)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=20), st.integers(1, 512))
def test_every_slice_starts_on_a_multiple_of_16(lengths: list[int], dp: int) -> None:
    length = weights.buffer_length(lengths, dp)
    assert length % (16 * dp) == 0
    assert sum(lengths) <= length < sum(lengths) + 16 * (len(lengths) + dp)


@pytest.mark.parametrize("preset", ["gpt2-124m", "gpt2-8.3b"])
def test_all_weights_of_a_model(preset: str) -> None:
    model = ModelConfig(preset=preset)
    vocab_size = 128 * 400  # no padding
    parts = weights.parts_of(model, unit_names(model.num_layers))
    counts = [weights.weights_of(model, part, vocab_size=vocab_size, tp=1) for part in parts]
    assert sum(map(sum, counts)) == parameter_count(model, vocab_size)
