"""How long flat buffers are, beside those that are made."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.architecture.families import architecture_of
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig
from colonnade.data_parallel.buckets import Storage, flatten
from colonnade.data_parallel.lengths import buffer_length
from colonnade.mesh.mesh import Axis
from colonnade.model.gpt import GPT
from colonnade.planner.memory import bucket_length
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import named_placements

VOCAB = 61


@pytest.mark.parametrize(("tp_size", "dp_size"), [(1, 1), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("tied", [True, False])
def test_every_bucket_is_as_long_as_stated(tied: bool, tp_size: int, dp_size: int) -> None:
    model = ModelConfig(num_layers=2, hidden_size=24, num_heads=4, seq_length=10, tie_embeddings=tied)
    tp, dp = Axis("tp", tp_size, 1 % tp_size), Axis("dp", dp_size, 1 % dp_size)
    places = named_placements(GPT(model, VOCAB, Parallel(tp)).bucket_modules(), tp)
    parallel = ParallelConfig(tp=tp_size, dp=dp_size)
    for bucket in flatten(places, dp, Storage(torch.float32, torch.device("cpu"))):
        assert bucket.size == bucket_length(architecture_of(model, VOCAB), bucket.name, parallel)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=20), st.integers(1, 512))
def test_every_slice_starts_on_a_multiple_of_16(lengths: list[int], dp: int) -> None:
    length = buffer_length(lengths, dp)
    assert length % (16 * dp) == 0
    assert sum(lengths) <= length < sum(lengths) + 16 * (len(lengths) + dp)
