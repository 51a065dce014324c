"""Single operators beside what a machine's description says of them, by the time of this process's core.

    python -m benchmarks.planner_operators --hardware mine.toml

Prints a line an operator: measured, planned, and the ratio; then the machine's load.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from colonnade.planner.cost import Cost
from colonnade.planner.hardware import hardware
from colonnade.planner.operators import Operator

PRODUCTS = ((128, 64, 64), (128, 128, 256), (256, 384, 128), (256, 256, 256), (512, 512, 512), (256, 1536, 384))
"""(m, n, k)"""
LENGTHS = (16_384, 131_072, 1_048_576)
Case = tuple[str, Callable[[], object], Operator]


def cases() -> Iterator[Case]:
    """Name, call, and the operator as a plan has it."""
    for m, n, k in PRODUCTS:
        a, b, size = torch.randn(m, k), torch.randn(k, n), 4 * (m * n + m * k + n * k)
        yield f"mm {m} {n} {k}", partial(torch.mm, a, b), Operator("mm", 2 * m * n * k, size, "float32", (1, m, n, k))
    for length in LENGTHS:
        x, y = torch.randn(length), torch.randn(length)
        yield f"add {length}", partial(torch.add, x, y), Operator("add", 0, 12 * length, "float32")
        yield f"gelu {length}", partial(F.gelu, x), Operator("gelu", 0, 8 * length, "float32")
        tanh = Operator("gelu", 0, 8 * length, "float32")
        yield f"gelu tanh {length}", partial(F.gelu, x, approximate="tanh"), tanh
    x = torch.randn(256, 512)
    yield "layer_norm 256 512", partial(F.layer_norm, x, (512,)), Operator("norm", 0, 8 * x.numel(), "float32")
    q = torch.randn(2, 4, 128, 64)
    flops, size = 4 * 2 * 4 * 128 * 128 * 64, 16 * q.numel()
    causal = Operator("attention", flops, size, "float32", (8, 128, 128, 64), True, True)
    yield "attention 2 4 128 64", partial(F.scaled_dot_product_attention, q, q, q, is_causal=True), causal


def seconds(call: Callable[[], object]) -> float:
    """[s] Of the core, the fastest of seven rounds of a few milliseconds."""
    began = time.process_time()
    call()
    repeat = max(1, int(5e-3 / max(time.process_time() - began, 1e-6)))
    found = float("inf")
    for _ in range(7):
        began = time.process_time()
        for _ in range(repeat):
            call()
        found = min(found, (time.process_time() - began) / repeat)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="cpu")
    torch.set_num_threads(1)
    cost = Cost(hardware(parser.parse_args().hardware))
    print("| operator | measured | planned | measured ÷ planned |\n|---|---|---|---|")
    for name, call, operator in cases():
        took, planned = seconds(call), cost.operator(operator)
        print(f"| {name} | {took * 1e6:.1f} µs | {planned * 1e6:.1f} µs | {took / planned:.2f} |")
    print(f"\nload {', '.join(f'{each:.1f}' for each in os.getloadavg())}")


if __name__ == "__main__":
    main()
