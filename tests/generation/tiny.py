"""A GPT small enough for tests, with weights large enough that it prefers some tokens to others."""

import torch

from colonnade.config.model import ModelConfig
from colonnade.kernels.choice import Products, usual
from colonnade.mesh.mesh import Axis
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.tensor_parallel.parallel import Parallel


def tiny_gpt(
    tp: Axis,
    *,
    vocab_size: int = 21,
    seq_length: int = 12,
    tie_embeddings: bool = True,
    seed: int = 7,
    units: list[str] | None = None,
    products: Products | None = None,
) -> GPT:
    """float64, 2 layers, 4 heads, with wide initial weights; the same logical weights for every tp and all stages."""
    model = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        seq_length=seq_length,
        init_std=0.5,
        tie_embeddings=tie_embeddings,
        dropout=0.1,
        attention_dropout=0.1,
    )
    gpt = GPT(model, vocab_size, Parallel(tp, products=products or usual()), units=units).double()
    initialize_(gpt, tp, seed)
    if units is None or "embedding" in units:
        assert gpt.embedding.positions is not None
        with torch.no_grad():
            gpt.embedding.positions.weight.mul_(3.0)  # else greedy text repeats one token
    return gpt
