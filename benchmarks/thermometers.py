"""What thermometers cost: measured steps and others, in turns, in one process.

python -m benchmarks.thermometers [--rounds 12] [--threads 2] [--device cpu] [--precision fp32]

6 layers, hidden 384, 6 heads, sequence 256, vocabulary 50,304, micro-batch 4, one micro-batch a step. Prints a JSON
object: seconds of a step of either kind, the median of the ratios of neighbours, and what that is of a run with
thermometers.every = 10, in percent.
"""

import argparse
import json
import os
import statistics
import time
from datetime import date

import torch

from benchmarks import hardware
from colonnade.config.load import loads
from colonnade.config.schema import Config
from colonnade.data.loader import Batch
from colonnade.mesh.mesh import Mesh
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step

VOCAB, S, B, EVERY = 50_304, 256, 4, 10
CONFIG = """
model = {{ num_layers = 6, hidden_size = 384, num_heads = 6, seq_length = 256 }}
data = {{ train = "unused" }}
train = {{ steps = 100_000, global_batch_size = 4, micro_batch_size = 4, precision = "{precision}" }}
optim = {{ learning_rate = 1e-4 }}
thermometers = {{ every = 2 }}
run = {{ folder = "unused" }}
"""


def timed(state: TrainState, batch: Batch, config: Config) -> float:
    """[s] Of a step."""
    if batch.tokens.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    train_step(state, [batch], Mesh(), config.train)
    if batch.tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def pairs(config: Config, device: torch.device, rounds: int) -> list[tuple[float, float]]:
    """[s] Of a step that is not measured and the measured one behind it; two rounds warm up."""
    state = build_state(config, Mesh(), VOCAB, device)
    tokens = torch.randint(VOCAB, (S + 1, B), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:-1], tokens[1:], torch.ones(S, B), torch.arange(B)).to(device)
    found = [(timed(state, batch, config), timed(state, batch, config)) for _ in range(rounds + 2)]
    return found[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found = pairs(loads(CONFIG.format(precision=asked.precision)), torch.device(asked.device), asked.rounds)
    ratio = statistics.median(measured / plain for plain, measured in found)
    result = {
        "plain_seconds": round(statistics.median(plain for plain, _ in found), 5),
        "measured_seconds": round(statistics.median(measured for _, measured in found), 5),
        "ratio": round(ratio, 4),
        "percent_of_a_run": round(100 * (ratio - 1) / EVERY, 2),
        "rounds": asked.rounds,
        "threads": asked.threads,
        "precision": asked.precision,
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if asked.device == "cuda" else None,
        "date": date.today().isoformat(),
        "command": hardware.command_line(),
        **hardware.describe(),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
