"""What a processor can do at most: how fast each kernel multiplies, and how fast memory is.

Matrices are slices of the reference model's own; rates are of one core, by the time of the core itself, so that other
programs hardly change them (`colonnade.kernels.timing`). Memory is timed by a clock on the wall, with all cores.
"""

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


def measured() -> dict[str, Any]:
    """All of it, for a results file."""
    keep_freed_memory()  # as ranks of runs do
    prepare_here()
    rates = {precision: gemm_rates(precision) for precision in ("fp32", "bf16")}
    model = reference_config(Task()).model
    flops = architecture_of(model, Task().vocab_size).flops_per_token
    return {"gflops_per_core": rates, "memory_gb_per_second": round(bandwidth(), 1), "flops_per_token": flops}


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
        lines.append(f"{precision}, GFLOP/s of a core:")
        for use, of_use in rates.items():
            kernels = ", ".join(f"{kernel} {rate:.0f}" for kernel, rate in of_use.items())
            lines.append(f"  {use.replace('_', ' '):<16} {kernels}")
    return "\n".join(lines)
