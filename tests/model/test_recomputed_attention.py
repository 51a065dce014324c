"""What attention keeps of a whole block where its probabilities are computed again."""

from typing import Any

import numpy as np
import pytest
import torch

from colonnade.config.model import ModelConfig
from colonnade.kernels.dropout import Masks
from colonnade.mesh.mesh import Mesh
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.model.t5 import T5, T5Inputs
from colonnade.pipeline.carry import leaves
from colonnade.tensor_parallel.parallel import Parallel
from tests.model.kept import Kept

S, HEADS, VOCAB = 128, 2, 11
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_heads": HEADS, "ffn_hidden_size": 8, "seq_length": S}
T5_SHAPE = {**SHAPE, "kind": "t5", "num_decoder_layers": 2, "decoder_seq_length": S}
MASK = HEADS * S * S
"""Bytes of what attention drops; everything else that is kept of so narrow a model is smaller."""


def largest_kept(unit: str, drop: float, recompute: bool) -> int:
    """Bytes of the largest piece of memory that one block keeps for backward, of one text."""
    given = T5_SHAPE if "coder" in unit else SHAPE
    model, parallel = ModelConfig(**given, attention_dropout=drop), Parallel(Mesh().tp, recompute_attention=recompute)
    whole: GPT | T5 = T5(model, VOCAB, parallel) if model.kind == "t5" else GPT(model, VOCAB, parallel)
    initialize_(whole, Mesh().tp, 1)
    tokens = torch.arange(S)[:, None] % VOCAB
    inputs = T5Inputs(tokens, masks=Masks(1, np.arange(1)), decoder_tokens=tokens)
    carry = leaves(tuple(torch.ones(S, 1, 8) for _ in whole.stated[unit].takes))
    with Kept() as kept:
        out = whole.run(unit, carry, inputs)
    assert out[0].grad_fn is not None
    return kept.largest


@pytest.mark.parametrize(
    ("unit", "drop"),
    [("blocks.1", 0.5), ("encoder.blocks.1", 0.5), ("decoder.blocks.1", 0.5), ("decoder.blocks.0", 0.0)],
)
def test_nothing_of_queries_times_keys_is_kept_where_it_is_computed_again(unit: str, drop: float) -> None:
    assert largest_kept(unit, drop, recompute=True) < MASK
    assert largest_kept(unit, drop, recompute=False) >= 4 * MASK, "probabilities, else"
