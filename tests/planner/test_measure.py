"""Timing units: all of them, in proportion to their work."""

from typing import Any

import pytest
import torch

from colonnade.architecture.adapters import with_adapters
from colonnade.architecture.families import architecture_of
from colonnade.architecture.parts import with_parts
from colonnade.architecture.statement import Unit
from colonnade.config.model import ModelConfig
from colonnade.config.parts import LoraConfig, PartsConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.mesh.mesh import Axis
from colonnade.model.model import Transformer
from colonnade.pipeline.partition import cut
from colonnade.planner import measure
from colonnade.planner.example import example_inputs
from colonnade.planner.measure import measured
from colonnade.tasks.tasks import TASKS
from colonnade.tensor_parallel.parallel import Parallel


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


def seen(
    monkeypatch: pytest.MonkeyPatch, model: ModelConfig, **train: Any
) -> list[tuple[str, torch.device, torch.dtype]]:
    """The units that are timed, where, and in which numbers."""
    found: list[tuple[str, torch.device, torch.dtype]] = []

    def seconds(built: Transformer, unit: Unit, inputs: Any, device: torch.device) -> float:
        weight = next(built.parameters())
        assert weight.device == device and inputs.tokens.device == device
        found.append((unit.name, device, weight.dtype))
        return float(len(found))

    monkeypatch.setattr(measure, "_seconds", seconds)
    sizes = {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "device": "cpu"}
    times = measured(model, ParallelConfig(), TrainConfig.model_validate({**sizes, **train}), 30)
    assert list(times) == [unit.name for unit in architecture_of(model, 30).units]
    return found


def test_one_block_of_each_kind_is_timed_in_the_numbers_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU where the run is to compute there, though there is a GPU; by as many threads."""
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = ModelConfig(kind="t5", num_layers=2, num_decoder_layers=3, hidden_size=16, num_heads=2, seq_length=8)
    found = seen(monkeypatch, model, precision="bf16", threads=1)
    assert [name for name, *_ in found] == [
        "embedding",
        "encoder.blocks.0",
        "decoder.embedding",
        "decoder.blocks.0",
        "head",
    ]
    assert {each[1:] for each in found} == {(torch.device("cpu"), torch.bfloat16)} and threads == [1]
    assert {dtype for *_, dtype in seen(monkeypatch, model, precision="fp32")} == {torch.float32} and threads == [1]


def test_the_fastest_of_three_runs_behind_a_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []

    def now(device: torch.device) -> float:
        times.append(1.0)
        return {1: 0.0, 2: 0.5, 3: 1.0, 4: 6.0, 5: 10.0, 6: 13.0, 7: 20.0, 8: 24.0}[len(times)]

    monkeypatch.setattr(measure, "_now", now)
    model = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, seq_length=8)
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1, device="cpu")
    built = TASKS[model.kind_and_head].build(model, 30, Parallel(Axis("tp")), None)
    inputs = example_inputs(model, train, 30, torch.device("cpu"))
    (unit,) = built.architecture.named(["blocks.0"])
    assert measure._seconds(built, unit, inputs, torch.device("cpu")) == 3.0 and len(times) == 8


@pytest.mark.parametrize(
    ("keys", "frozen", "backward", "sent_back"),
    [
        ({}, ["embedding*", "blocks.0.*", "blocks.1.*"], ["blocks.2", "blocks.3", "head"], ["blocks.3", "head"]),
        (
            {"kind": "t5", "num_decoder_layers": 1},
            ["embedding*", "encoder.*"],
            ["decoder.blocks.0", "head"],
            ["head"],
        ),
    ],
    ids=["first blocks", "an encoder"],
)
def test_what_is_frozen_runs_forward_alone(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], frozen: list[str], backward: list[str], sent_back: list[str]
) -> None:
    """Blocks that are not trained alike are timed apart; gradients go no further back than somebody wants them."""
    monkeypatch.setattr(measure, "_TIMES", 1)
    at, ran, wanted = [""], list[str](), list[str]()
    run, seconds, started = measure.backward_from, measure._seconds, measure.leaves

    def timed(model: Transformer, unit: Unit, inputs: Any, device: torch.device) -> float:
        at[0] = unit.name
        seconds(model, unit, inputs, device)
        return float(len(ran))

    def back(*of: Any) -> Any:
        ran.extend([at[0]] * any(x.requires_grad for x in of[0]))
        return run(*of)

    def begun(carry: Any, *, gradients: bool = True) -> Any:
        wanted.extend([at[0]] * gradients)
        return started(carry, gradients=gradients)

    monkeypatch.setattr(measure, "_seconds", timed)
    monkeypatch.setattr(measure, "backward_from", back)
    monkeypatch.setattr(measure, "leaves", begun)
    model = ModelConfig(num_layers=4, hidden_size=16, num_heads=2, seq_length=8, **keys)
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1, device="cpu", threads=1)
    stated = with_parts(architecture_of(model, 30), PartsConfig(frozen=tuple(frozen)))
    found = measured(model, ParallelConfig(), train, 30, architecture=stated)
    assert list(found) == [unit.name for unit in stated.units]
    assert list(dict.fromkeys(ran)) == backward and list(dict.fromkeys(wanted)) == sent_back
    assert len(set(found.values())) == 1 + len(backward), "one time for all that run forward alone"


def test_adapters_are_timed_with_what_they_adapt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all blocks the one that is timed is built."""
    model = ModelConfig(num_layers=3, hidden_size=16, num_heads=2, seq_length=8)
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1, device="cpu", threads=1)
    stated = with_adapters(architecture_of(model, 30), LoraConfig(rank=2, targets=("*.attention.*",)))
    trained: dict[str, list[str]] = {}

    def seconds(built: Transformer, unit: Unit, inputs: Any, device: torch.device) -> float:
        trained[unit.name] = [
            name for name, each in built.get_submodule(unit.name).named_parameters() if each.requires_grad
        ]
        assert not any(name.startswith(("blocks.1.", "blocks.2.")) for name, _ in built.named_parameters())
        return 1.0

    monkeypatch.setattr(measure, "_seconds", seconds)
    measured(model, ParallelConfig(), train, 30, architecture=stated)
    assert len(trained["blocks.0"]) == 4 and all("lora" in name for name in trained["blocks.0"])
