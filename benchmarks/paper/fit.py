"""Constants of the V100's description that bring the plan nearest to Megatron-LM's weak scaling.

    python -m benchmarks.paper.fit [--tries 600] [--seed 0]

Fitted to seven efficiencies of table 1 and to the first row's 39 TFLOP/s, recomputed work counted. Left out is the row
of 2.5B on 128 devices, whose published 83 % is 12 points below the same model on two: its neighbours lose 3 or 4. A
random search from the bundled file's figures, on one thread. Attention heads and strong scaling are no part of what is
fitted: they show whether the constants hold elsewhere.
"""

import argparse
import math
import random
from collections.abc import Iterator

import torch

from benchmarks.paper.__main__ import LEFT_OUT, WEAK, efficiency, megatron, seconds, walked
from colonnade.planner.hardware import FIGURES, Hardware, hardware

PUBLISHED = 39.0
"""[TFLOP/s] Of 1.2B on one device."""
LIMITS = {
    "products.efficiency": (0.3, 1.0),
    "products.half_area": (1e4, 2e7),
    "products.half_depth": (1.0, 1024.0),
    "products.memory": (0.3, 1.0),
    "device.kernel_seconds": (1e-6, 2e-5),
    "island.bandwidth": (1e10, 1.5e11),
    "island.latency": (1e-6, 2e-4),
    "network.bandwidth": (1e10, 1e11),
}
"""What may change, and how far: what links and memory can do is not exceeded."""
WITHIN, SHARE = 3.0, 0.05
"""An efficiency that is off by so many points counts as much as a rate that is off by this share."""


def misses(machine: Hardware) -> Iterator[float]:
    """Of each row, in units of what counts as much."""
    for dp in (1, 64):
        for row in WEAK:
            if (row.name, dp) != LEFT_OUT:
                yield (efficiency(megatron(row, tp=row.tp, dp=dp), machine) - row.published(dp)) / WITHIN
    first = megatron(WEAK[0], tp=1)
    yield (walked(first).flops / seconds(first, machine) / 1e12 / PUBLISHED - 1) / SHARE


def loss(machine: Hardware) -> float:
    """Mostly of the largest miss."""
    return math.fsum(each**4 for each in misses(machine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    line = parser.parse_args()
    torch.set_num_threads(1)
    machine, draw, spread = hardware("v100-dgx2h"), random.Random(line.seed), 0.5
    best = loss(machine)
    for tried in range(1, line.tries + 1):
        changed = {key: moved(key, machine[key], draw, spread) for key in draw.sample(list(LIMITS), draw.randint(1, 3))}
        other = machine.having(**{key.replace(".", "__"): value for key, value in changed.items()})
        if (found := loss(other)) < best:
            best, machine = found, other
            print(f"{tried}: {best:.3f} {', '.join(f'{key} {machine[key]:.3g}' for key in LIMITS)}", flush=True)
        if tried % 40 == 0:
            spread = max(0.05, 0.85 * spread)


def moved(key: str, value: float, draw: random.Random, spread: float) -> float:
    low, high = LIMITS[key]
    assert FIGURES[key].low <= low and high <= FIGURES[key].high
    return min(high, max(low, value * math.exp(draw.gauss(0.0, spread))))


if __name__ == "__main__":
    main()
