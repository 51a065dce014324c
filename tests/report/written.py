"""Folders of runs as training writes them, made without training."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CONFIG = """
[model]
num_layers = 4
[data]
train = "s3://somebody:topsecret@bucket/tokens?token=alsosecret"
[train]
steps = {steps}
[optim]
learning_rate = 3e-4
[run]
folder = "runs/<b>bold</b>"
"""


def lines(content: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(each) + "\n" for each in content)


def metrics(steps: int) -> list[dict[str, Any]]:
    found = [
        {
            "step": step,
            "loss": 2 + 5 * math.exp(-5 * step / steps),
            "learning_rate": 1e-3 * step / steps,
            "grad_norm": 1.0 + step % 3,
            "tokens": step * 1000,
            "tokens_per_second": 500.0,
            "seconds": 2.0,
            "mfu": 0.4,
        }
        for step in range(1, steps + 1)
    ]
    for line in found[:: max(1, steps // 10)]:
        line["validation_loss"] = line["loss"] + 0.1
    return found


def events(steps: int) -> list[dict[str, Any]]:
    return [
        {"time": 1000.0, "event": "started", "version": "0.1.0"},
        {"time": 1001.0, "event": "setup", "layout": "tp2 pp2", "parameters": 11_248, "notes": ["a note of the run"]},
        {"time": 1100.0, "event": "saved", "step": steps // 2, "checkpoint": "step_1"},
        {"time": 1150.0, "event": "rank lost", "rank": 3},
        {"time": 1200.0, "event": "saved", "step": steps, "checkpoint": "step_2"},
        {"time": 1201.0, "event": "resumed", "step": steps // 2, "changed": ["optim.learning_rate: 0.001 -> 0.0005"]},
        {"time": 1300.0, "event": "finished", "step": steps},
    ]


def thermometers(steps: int, layers: int = 4) -> list[dict[str, Any]]:
    numbers = {"minimum": -2.0, "maximum": 3.0, "rms": 1.0, "zeros": 0.0, "non_finite": 0, "near_limit": 0.0}
    units = [f"blocks.{layer}" for layer in range(layers)]
    return [
        {
            "step": step,
            "activations": {
                unit: {"attention_logits": {**numbers, "maximum": 3.0 + step * (unit == units[-1])}} for unit in units
            },
            "gradients": {unit: {"norm": 1.0 / (1 + row), "maximum": 0.1} for row, unit in enumerate(units)},
            "updates": {unit: 1e-3 * (1 + row) for row, unit in enumerate(units)},
        }
        for step in range(1, steps + 1, 2)
    ]


PREDICTION = {
    "memory": {"total_bytes": 6e9, "by_kind": {"parameters": 2e9, "optimizer": 4e9}, "rank": 0},
    "tokens_per_second": 600.0,
    "seconds_per_step": 1.5,
    "bytes_sent": {"tp": 1e9},
}
COMPARISON = {
    "memory": {"total_bytes": {"predicted": 6e9, "measured": 7.5e9}},
    "tokens_per_second": {"predicted": 600.0, "measured": 500.0},
    "bytes_sent": {"predicted": {"tp": 1e9}, "measured": {"tp": 1e9}},
}
PROFILE = {
    "steps": [5, 6],
    "gantt": {
        "step": 5,
        "seconds": 2.0,
        "rows": [
            {
                "name": "stage 0",
                "actions": [
                    {"kind": "F", "microbatch": 0, "chunk": 0, "start": 0.1, "end": 0.7},
                    {"kind": "B", "microbatch": 0, "chunk": 0, "start": 0.7, "end": 1.7},
                ],
            }
        ],
    },
    "ranks": [
        {"name": "rank 0", "parts": {"forward": 0.6, "backward": 1.0, "rest": 0.4}, "units": {"head": {"F": 0.1}}}
    ],
}


def run(folder: Path, steps: int = 40) -> Path:
    """A folder with every file that a run can have."""
    folder.mkdir(parents=True)
    files = {
        "metrics.jsonl": lines(metrics(steps)),
        "events.jsonl": lines(events(steps)),
        "thermometers.jsonl": lines(thermometers(min(steps, 40))),
        "prediction.json": json.dumps(PREDICTION),
        "comparison.json": json.dumps(COMPARISON),
        "profile.json": json.dumps(PROFILE),
        "config.toml": CONFIG.format(steps=steps),
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder
