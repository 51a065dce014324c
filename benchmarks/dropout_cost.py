"""What dropout costs: the reference model's training step with dropout 0.1 and without, in turns, in one process.

python -m benchmarks.dropout_cost [--rounds 10] [--threads 2] [--precision fp32]
"""

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Literal

import torch

from benchmarks import hardware
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, OptimConfig, RunConfig, TrainConfig
from colonnade.data.loader import Batch
from colonnade.mesh.mesh import Mesh
from colonnade.train.products import settle
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step

VOCAB_SIZE, SEQ_LENGTH, MICRO_BATCH = 50304, 256, 4


def config_with(dropout: float, precision: Literal["fp32", "bf16"]) -> Config:
    """The reference model of the training benchmarks, with this dropout everywhere."""
    return Config(
        model=ModelConfig(
            num_layers=6,
            hidden_size=384,
            num_heads=6,
            seq_length=SEQ_LENGTH,
            dropout=dropout,
            attention_dropout=dropout,
        ),
        train=TrainConfig(
            steps=1000, global_batch_size=MICRO_BATCH, micro_batch_size=MICRO_BATCH, precision=precision, device="cpu"
        ),
        optim=OptimConfig(learning_rate=6e-4, warmup_steps=0, decay="constant"),
        run=RunConfig(folder="unused"),
    )


def fixed_batch() -> Batch:
    ids = torch.randint(0, VOCAB_SIZE, (SEQ_LENGTH + 1, MICRO_BATCH), generator=torch.Generator().manual_seed(0))
    return Batch(ids[:-1], ids[1:], torch.ones(SEQ_LENGTH, MICRO_BATCH), torch.arange(MICRO_BATCH))


def state_of(config: Config) -> TrainState:
    """With the kernels that a run of it chooses here."""
    device = torch.device("cpu")
    products = settle(config, VOCAB_SIZE, Mesh().world, device).products
    return build_state(config, Mesh(), VOCAB_SIZE, device, products=products)


def timed(state: TrainState, batch: Batch, config: Config) -> float:
    started = time.perf_counter()
    train_step(state, [batch], Mesh(), config.train)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    batch = fixed_batch()
    configs = {rate: config_with(rate, asked.precision) for rate in (0.0, 0.1)}
    states = {rate: state_of(config) for rate, config in configs.items()}
    seconds: dict[float, list[float]] = {rate: [] for rate in configs}
    for turn in range(2 + asked.rounds):  # two rounds warm up
        for rate in configs:
            took = timed(states[rate], batch, configs[rate])
            seconds[rate] += [took] if turn >= 2 else []
    ratios = [on / off for on, off in zip(seconds[0.1], seconds[0.0], strict=True)]
    result = {
        "without_ms": round(1e3 * statistics.median(seconds[0.0]), 1),
        "with_ms": round(1e3 * statistics.median(seconds[0.1]), 1),
        "cost_of_step": round(statistics.median(ratios) - 1, 4),
        "cost_of_step_low_high": [round(min(ratios) - 1, 4), round(max(ratios) - 1, 4)],
        "precision": asked.precision,
        "threads": asked.threads,
        "command": hardware.command_line(),
        **hardware.describe(),
    }
    name = f"{date.today()}-{hardware.machine_name()}-dropout-{asked.precision}.json"
    (Path(__file__).parent / "results" / name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
