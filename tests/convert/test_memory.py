"""Memory is a few tensors, however many there are: of a model that is large without being there (a sparse file)."""

from pathlib import Path

import pytest
import torch

from benchmarks.convert import both_ways, taken_by
from colonnade.config.model import ModelConfig
from tests.blocks import LLAMA_BLOCK

SHAPE = {**LLAMA_BLOCK, "hidden_size": 512, "num_heads": 8, "ffn_hidden_size": 2048, "vocab_size": 8192}


@pytest.mark.slow
def test_seventeen_times_the_layers_take_no_more_memory(tmp_path: Path) -> None:
    """Of 16.8 MB each layer, and 16.8 MB the largest tensor: 268 MB more of weights, and less than 2 tensors more."""
    one, many = (
        both_ways(tmp_path, ModelConfig(num_layers=layers, seq_length=128, **SHAPE), torch.float32)
        for layers in (1, 17)
    )
    table = 8192 * 512 * 4
    assert many[0] - one[0] > 15 * table
    for little, much in zip(one[1:], many[1:], strict=True):
        assert much.peak_bytes - little.peak_bytes < 2 * table


def test_the_memory_of_who_measures_is_not_counted() -> None:
    size = 1 << 30
    torch.ones(size, dtype=torch.uint8)
    assert 0 < taken_by("--version").peak_bytes < size
