"""Timing units: all of them, in proportion to their work."""

from typing import Any

import pytest
import torch

from colonnade.architecture.families import architecture_of
from colonnade.architecture.statement import Unit
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.model.model import Transformer
from colonnade.pipeline.partition import cut
from colonnade.planner import measure
from colonnade.planner.measure import measured


@pytest.mark.slow
def test_a_heavy_head_is_seen() -> None:
    """A head of 64 blocks' work: no clock and no busy machine mistakes it for one."""
    model = ModelConfig(num_layers=4, hidden_size=64, num_heads=4, seq_length=32, dropout=0.0, attention_dropout=0.0)
    train = TrainConfig(steps=1, global_batch_size=8, micro_batch_size=8, device="cpu", threads=1)
    seconds = measured(model, ParallelConfig(), train, 12 * 64 * 64)
    assert list(seconds) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert len({seconds[f"blocks.{layer}"] for layer in range(4)}) == 1
    assert seconds["head"] > 4 * seconds["blocks.0"] > 0.0
    assert cut(list(seconds.values()), 2) == [5, 1]


def test_one_rank_of_the_configured_tp_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[tuple[str, int]] = []

    def seconds(model: Transformer, unit: Unit, inputs: Any, device: torch.device) -> float:
        shares.append((unit.name, sum(weight.numel() for weight in model.get_submodule(unit.name).parameters())))
        return 1.0

    monkeypatch.setattr(measure, "_seconds", seconds)
    model = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, seq_length=8, tie_embeddings=False, bias=False)
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1, device="cpu", threads=1)
    for tp in (1, 2):
        measured(model, ParallelConfig(tp=tp), train, 4_096)
    whole, half = dict(shares[:3]), dict(shares[3:])
    assert half["head"] < 0.51 * whole["head"] and half["blocks.0"] < 0.51 * whole["blocks.0"]


def test_both_stacks_are_timed() -> None:
    """Each unit of every kind, in the order of the model."""
    model = ModelConfig(kind="t5", num_layers=2, num_decoder_layers=3, hidden_size=16, num_heads=2, seq_length=8)
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1, device="cpu", threads=1)
    seconds = measured(model, ParallelConfig(), train, 30)
    assert list(seconds) == [unit.name for unit in architecture_of(model, 30).units]
    assert min(seconds.values()) > 0.0
