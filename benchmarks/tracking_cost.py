"""What tracking costs a step: steps of some arithmetic, with trackers and without, in turns.

    python -m benchmarks.tracking_cost [--pairs 20] [--steps 40] [--with prometheus wandb mlflow]

Prints, as one JSON object, the median ratio of a block of steps with trackers to the one without beside it, the
quartiles, and what the call itself takes. A program that is not installed is left out.
"""

import argparse
import json
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from colonnade.train.monitor import Monitor
from colonnade.train.trackers import Mlflow, Prometheus, Wandb
from colonnade.train.tracking import Tracker

PACKAGES = {"prometheus": "prometheus_client", "wandb": "wandb", "mlflow": "mlflow"}


def monitor(folder: Path, names: list[str]) -> Monitor:
    folder.mkdir(parents=True)
    every: dict[str, Tracker] = {
        "prometheus": Prometheus(str(folder / "metrics.prom"), "run"),
        "wandb": Wandb(folder, "project", "run", "offline"),
        "mlflow": Mlflow(folder, f"sqlite:///{folder / 'mlflow.db'}", "experiment", "run"),
    }
    trackers = [every[name] for name in names]
    made = Monitor(
        folder,
        active=True,
        steps=10**9,
        log_every=10**9,
        tokens_per_step=1000,
        flops_per_token=1.0,
        peak_flops=None,
        trackers=trackers,
        tracking_patience=60.0,
    )
    made.resume(0)
    return made


def block(told: Monitor, first: int, steps: int, x: torch.Tensor) -> tuple[float, float]:
    """[seconds] Of the steps, and of the calls in them."""
    began, calls = time.perf_counter(), 0.0
    for step in range(first, first + steps):
        for _ in range(4):
            x @ x
        call = time.perf_counter()
        told.step({"step": step, "loss": 1.0, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens": step}, 0.1)
        calls += time.perf_counter() - call
    return time.perf_counter() - began, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--with", dest="names", nargs="*", default=list(PACKAGES), choices=list(PACKAGES))
    options = parser.parse_args()
    names = [name for name in options.names if find_spec(PACKAGES[name]) is not None]
    torch.set_num_threads(1)
    x = torch.randn(512, 512)
    with tempfile.TemporaryDirectory() as folder:
        plain, tracked = monitor(Path(folder) / "plain", []), monitor(Path(folder) / "tracked", names)
        block(tracked, 1, 5, x)
        time.sleep(10)  # programs start
        ratios, calls = [], []
        for pair in range(options.pairs):
            first = 10 + pair * options.steps
            order = [plain, tracked] if pair % 2 else [tracked, plain]
            found = {id(each): block(each, first, options.steps, x) for each in order}
            ratios.append(found[id(tracked)][0] / found[id(plain)][0])
            calls.append((found[id(tracked)][1] - found[id(plain)][1]) / options.steps)
        step = found[id(plain)][0] / options.steps
        tracked.close()
        quartiles = statistics.quantiles(ratios, n=4)
    told = {"trackers": names, "pairs": options.pairs, "milliseconds_of_a_step": round(1e3 * step, 2)}
    told |= {
        "ratio": [round(each, 4) for each in quartiles],
        "call_microseconds": round(1e6 * statistics.median(calls), 1),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
