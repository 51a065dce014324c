"""The tables of docs/memory.md hold what the planner says."""

from pathlib import Path
from typing import Any

import pytest

from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.kernels import choice
from colonnade.planner.memory import Memory, rank_memory
from tests.planner.test_memory import bloom

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
COLUMNS = ("parameters", "gradients", "optimizer", "buffers", "activations", "operators")
EXAMPLES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (0, {}),
    "zero 1": (0, {"zero": 1}),
    "zero 2": (0, {"zero": 2}),
    "zero 3": (0, {"zero": 3}),
    "zero 3, offload": (0, {"zero": 3, "offload": True}),
    "recompute selective": (0, {"recompute": "selective"}),
    "recompute full": (0, {"recompute": "full"}),
    "recompute full, every 4": (0, {"recompute": "full", "recompute_every": 4}),
    "tp 2, dp 2": (0, {"tp": 2, "dp": 2}),
    "tp 2, dp 2, sequence_parallel": (0, {"tp": 2, "dp": 2, "sequence_parallel": True}),
    "pp 4, dp 1, first stage": (0, {"pp": 4, "dp": 1}),
    "pp 4, dp 1, last stage": (3, {"pp": 4, "dp": 1}),
    "pp 4, dp 1, zero_bubble, first stage": (0, {"pp": 4, "dp": 1, "schedule": "zero_bubble"}),
    "pp 4, dp 1, zero_bubble, last stage": (3, {"pp": 4, "dp": 1, "schedule": "zero_bubble"}),
}
BLOOM: dict[str, tuple[int, dict[str, Any]]] = {
    "first stage": (0, {}),
    "a middle stage": (5, {}),
    "last stage": (11, {}),
    "first stage, zero 0": (0, {"zero": 0}),
    "first stage, no recomputation": (0, {"recompute": "none"}),
}


def small(stage: int, keys: dict[str, Any]) -> Memory:
    model = ModelConfig(num_layers=8, hidden_size=256, num_heads=8, seq_length=256, dropout=0.1, attention_dropout=0.1)
    parallel = ParallelConfig.model_validate({"dp": 4, **keys})
    train = TrainConfig(steps=1, global_batch_size=32 * parallel.dp, micro_batch_size=4, precision="bf16")
    with pytest.MonkeyPatch.context() as patch:  # a CPU that widens bf16
        patch.setattr(choice, "has_bf16_units", lambda: False)
        return rank_memory(model, parallel, train, vocab_size=8192, stage=stage, device="cpu")


def cells(label: str) -> list[str]:
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("label", EXAMPLES)
def test_the_example(label: str) -> None:
    memory = small(*EXAMPLES[label])
    expected = [f"{getattr(memory, column) / 1e6:.1f}" for column in COLUMNS]
    assert cells(label) == [*expected, f"{memory.total / 1e6:.1f}"]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("label", BLOOM)
def test_bloom(label: str) -> None:
    stage, keys = BLOOM[label]
    memory = bloom(stage, **keys)
    expected = [f"{getattr(memory, column) / 1e9:.1f}" for column in COLUMNS if column != "buffers"]
    assert cells(label) == [*expected, f"{memory.total / 1e9:.1f}"]
