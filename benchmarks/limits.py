"""What a processor can do at most: how fast each kernel multiplies, and how fast memory is.

Matrices are slices of the reference model's own; rates are of one core, by the time of the core itself, so that other
programs hardly change them (`colonnade.kernels.timing`): of one that is alone at work, and of each while all are.
Memory is timed by a clock on the wall, with all cores.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.colonnade_step import reference_config
from benchmarks.peers.reference import Task
from colonnade.architecture.families import architecture_of
from colonnade.kernels.timing import Slices, measure
from colonnade.launch.freed_memory import keep_freed_memory
from colonnade.model.precision import DTYPES
from colonnade.train.products import LARGEST, prepare_here

Rates = Mapping[str, Mapping[str, float]]
"""[GFLOP/s] Of one core: use -> kernel -> rate."""
ARRAY = 1 << 26
"""Numbers of 4 bytes in each array that is copied: far more than any cache holds."""
PRECISIONS = ("fp32", "bf16")


def measured() -> dict[str, Any]:
    """All of it, for a results file."""
    model = reference_config(Task()).model
    return {
        "gflops_per_core": all_rates(),
        "gflops_per_core_together": rates_together(),
        "memory_gb_per_second": round(bandwidth(), 1),
        "flops_per_token": architecture_of(model, Task().vocab_size).flops_per_token,
    }


def all_rates() -> dict[str, Rates]:
    """Of one core, in each precision."""
    keep_freed_memory()  # as ranks of runs do
    prepare_here()
    return {precision: gemm_rates(precision) for precision in PRECISIONS}


def rates_together() -> dict[str, Rates]:
    """Of the slowest core while all of them multiply, each in a process of its own, in each precision."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    command = [sys.executable, "-m", "benchmarks.limits"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(cores)]
    every = [json.loads(process.communicate()[0]) for process in started]
    return {precision: min((each[precision] for each in every), key=best_rate) for precision in PRECISIONS}


def best_rate(rates: Rates) -> float:
    """[GFLOP/s] By the kernel and the product that reach most."""
    return max(rate for use, of_use in rates.items() if use != "attention" for rate in of_use.values())


def gemm_rates(precision: str) -> Rates:
    """Of every kernel that is exact, for each kind of product of the reference model."""
    task = Task()
    linear, output = (task.hidden_size, task.ffn_hidden_size), (task.vocab_size, task.hidden_size)
    tokens = task.micro_batch_size * task.seq_length
    whole = Slices(tokens, *linear, *output, task.num_heads, task.seq_length, task.head_dim)
    sizes = Slices(*map(min, whole, LARGEST))
    found = measure(DTYPES[precision], sizes)
    return {
        use: {kernel: round(sizes.flops[use] / seconds / 1e9, 1) for kernel, seconds in times.items()}
        for use, times in found.items()
    }


def bandwidth(seconds: float = 1.0) -> float:
    """[GB/s] Bytes read and written by a copy, the best of what fits into some seconds."""
    source, target = torch.ones(ARRAY), torch.ones(ARRAY)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return 2 * source.nbytes / best / 1e9


def described(limits: Mapping[str, Any]) -> str:
    """In lines, for people."""
    lines = [f"memory {limits['memory_gb_per_second']} GB/s, read and written by a copy"]
    for precision, rates in limits["gflops_per_core"].items():
        together = best_rate(limits["gflops_per_core_together"][precision])
        lines.append(f"{precision}, GFLOP/s of a core, {together:.0f} at most while all cores multiply:")
        for use, of_use in rates.items():
            kernels = ", ".join(f"{kernel} {rate:.0f}" for kernel, rate in of_use.items())
            lines.append(f"  {use.replace('_', ' '):<16} {kernels}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(all_rates()))
