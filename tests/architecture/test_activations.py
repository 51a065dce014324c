"""Predicted activations beside the tensors that a unit's forward really leaves behind."""

from itertools import product

import numpy as np
import pytest
import torch

from colonnade.architecture.activations import Microbatch, Precision, block_kept
from colonnade.architecture.families import kept_of
from colonnade.config.schema import ModelConfig, ParallelConfig
from colonnade.mesh.mesh import Axis
from colonnade.model.dropout import Masks
from colonnade.model.gpt import GPT, Inputs
from colonnade.pipeline.carry import Carry, leaves
from colonnade.planner.live import LiveTensors
from colonnade.tensor_parallel.gemm import WeightGradients, multiplies_natively
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.train.state import DTYPES

VOCAB, SEQ_LENGTH, BATCH = 50, 16, 3
SLACK = 64  # bytes: the loss and its like
MODELS = [
    {"dropout": 0.0, "attention_dropout": 0.0},
    {"dropout": 0.1, "attention_dropout": 0.0, "position": "alibi"},
    {"dropout": 0.0, "attention_dropout": 0.1, "norm_position": "post"},
    {"dropout": 0.1, "attention_dropout": 0.1, "embedding_norm": True, "fp32_residual": True},
    {"dropout": 0.1, "attention_dropout": 0.1, "norm_position": "post", "fp32_residual": True, "position": "alibi"},
    {"dropout": 0.1, "attention_dropout": 0.1, "ffn_hidden_size": 40},
]


def microbatch(keys: dict[str, object], precision: Precision, recompute: str, tp: int) -> Microbatch:
    shape = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "seq_length": SEQ_LENGTH}
    model = ModelConfig.model_validate(shape | keys)
    parallel = ParallelConfig.model_validate({"tp": tp, "recompute": recompute})
    return Microbatch(model, parallel, BATCH, precision, widened=not multiplies_natively(DTYPES[precision], "cpu"))


def built(batch: Microbatch) -> GPT:
    """Rank 0 of tp ranks that do not talk: each collective is the identity."""
    dtype, tp = DTYPES[batch.precision], Axis("tp", batch.parallel.tp)
    gpt = GPT(batch.model, VOCAB, Parallel(tp, recompute_attention=batch.parallel.recompute == "selective")).to(dtype)
    for weight in gpt.parameters():
        weight.grad_dtype = torch.promote_types(dtype, torch.float32)
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    return gpt


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("keys", MODELS, ids=lambda keys: "-".join(map(str, keys.values())))
def test_what_each_unit_keeps_to_the_byte(keys: dict[str, object], precision: Precision) -> None:
    for recompute, tp in product(("none", "selective"), (1, 2)):
        batch = microbatch(keys, precision, recompute, tp)
        gpt = built(batch)
        tokens = torch.randint(0, VOCAB, (SEQ_LENGTH, BATCH))
        weights = torch.full(tokens.shape, 1.0 / tokens.numel(), dtype=torch.float64)
        inputs = Inputs(tokens, tokens, weights, Masks(1, np.arange(BATCH)))
        carry: Carry = ()
        for unit in gpt.units():
            entry = leaves(carry)
            with LiveTensors() as live:
                carry = gpt.run(unit, entry, inputs)
            expected = kept_of(batch)[gpt.architecture.named([unit])[0].kind]
            assert abs(live.bytes.total() - expected.inside - expected.made) <= SLACK, (unit, recompute, tp)


def test_deferred_weight_gradients() -> None:
    """What zero-bubble's W holds on to, once backward has let go of everything else."""
    batch = microbatch(MODELS[-1], "fp32", "none", 1)
    later = WeightGradients()
    gpt = GPT(batch.model, VOCAB, Parallel(Axis("tp"), weight_gradients=later), units=["blocks.0"])
    for weight in gpt.parameters():
        weight.grad = torch.zeros_like(weight)
    x = torch.randn(SEQ_LENGTH, BATCH, 32, requires_grad=True)
    grad = torch.randn(SEQ_LENGTH, BATCH, 32)
    with LiveTensors() as live:
        (y,) = gpt.run("blocks.0", (x,), Inputs(masks=Masks(1, np.arange(BATCH))))
        with later.deferred() as queue:
            y.backward(grad)
        del y
        x.grad = None
        assert live.bytes.total() == block_kept(batch).deferred
        queue.run()
    assert live.bytes.total() == 0


def test_a_block_of_the_paper() -> None:
    """Korthikanti et al., table 2: 34·s·b·h + 5·n·s²·b bytes for bf16 on one rank.

    They keep the dropped probabilities beside softmax's result and the mask, of which these two make them; and leave
    the norms' statistics out.
    """
    h, n, s, b = 128, 8, 64, 2
    model = ModelConfig(num_layers=1, hidden_size=h, num_heads=n, seq_length=s, dropout=0.1, attention_dropout=0.1)
    ours = block_kept(Microbatch(model, ParallelConfig(), b, "bf16"))
    paper = 34 * s * b * h + 5 * n * s * s * b
    dropped = 2 * n * s * s * b
    statistics = 2 * 2 * 4 * s * b
    assert ours.inside + ours.made == paper - dropped + statistics
