"""What a processor can do at most: how fast each kernel multiplies, and how fast memory is.

Matrices are slices of the reference model's own; rates are of one core, by the time of the core itself, so that other
programs hardly change them (`colonnade.kernels.timing`): of one that is alone at work, and of each while all are.
Memory is timed by a clock on the wall, with one core and with all.

`parts` says what a training step of that model needs at least of both, `roofline` how long that takes by these rates.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.colonnade_step import reference_config
from benchmarks.peers.reference import REPLICATED, Task
from colonnade.architecture.families import architecture_of
from colonnade.control_groups import num_cores
from colonnade.kernels.timing import Slices, measure
from colonnade.launch.freed_memory import keep_freed_memory
from colonnade.model.precision import DTYPES
from colonnade.train.products import LARGEST, prepare_here

Rates = Mapping[str, Mapping[str, float]]
"""[GFLOP/s] Of one core: use -> kernel -> rate."""
ARRAY = 1 << 26
"""Numbers of 4 bytes in each array that is copied: far more than any cache holds."""
PRECISIONS = ("fp32", "bf16")
OUTPUT, LINEAR, ATTENTION, UPDATE = "output layer and loss", "linear layers: products", "attention", "optimizer"


def measured() -> dict[str, Any]:
    """All of it, for a results file."""
    model = reference_config(Task()).model
    return {
        "gflops_per_core": all_rates(),
        "gflops_per_core_together": rates_together(),
        "memory_gb_per_second": round(copy_bandwidth(), 1),
        "best_memory_gb_per_second": {"one core": round(best_bandwidth(1), 1), "all cores": round(best_bandwidth(), 1)},
        "flops_per_token": architecture_of(model, Task().vocab_size).flops_per_token,
    }


@dataclass(frozen=True)
class Part:
    """What a part of a training step needs at least, over all ranks."""

    flops: float = 0.0
    """Of products."""
    bytes: float = 0.0
    """To and from memory, of what no cache holds."""


def parts(task: Task) -> dict[str, Part]:
    """The parts of one step that have products or such bytes, by name; `step_parts.py` sorts a profile into them.

    Products are those of a backward that keeps what it needs; attention's, of the causal half. AdamW reads weights,
    gradients and both means, and writes all but the gradients, in fp32; where there are replicas it reads the gradients
    of both, as if it added them up in the same pass, and without ZeRO both ranks do so. What else a step does takes no
    time: exponentials, activations, logits, the norm of gradients, their zeros, and the weights in 16 bits.
    """
    replicas, copies = 1 + (task.mode in REPLICATED), 1 + (task.mode == "dp")
    tokens = task.micro_batch_size * task.num_microbatches * task.seq_length * replicas
    h, s, layers = task.hidden_size, task.seq_length, task.num_layers
    return {
        OUTPUT: Part(flops=6.0 * tokens * h * task.vocab_size),
        LINEAR: Part(flops=6.0 * tokens * layers * 12 * h * h),
        ATTENTION: Part(flops=6.0 * tokens * layers * s * h),
        UPDATE: Part(bytes=4.0 * num_weights(task) * copies * (6 + replicas)),
    }


def num_weights(task: Task) -> int:
    return architecture_of(reference_config(task).model, task.vocab_size).num_parameters


def roofline(task: Task, limits: Mapping[str, Any]) -> dict[str, float]:
    """[s] That each of `parts` takes at least on this processor: one core, or all of them."""
    flops, memory = products_per_second(task, limits), bandwidth(task, limits)
    return {name: part.flops / flops + part.bytes / memory for name, part in parts(task).items()}


def bandwidth(task: Task, limits: Mapping[str, Any]) -> float:
    """[bytes/s] To and from memory, at best, by the one core, or the two, that a task has."""
    return float(limits["best_memory_gb_per_second"]["one core" if _is_alone(task) else "all cores"]) * 1e9


def products_per_second(task: Task, limits: Mapping[str, Any]) -> float:
    """[FLOP/s] Of the one core, or the two, that a task has, at the best rate."""
    alone = limits["gflops_per_core"]
    if _is_alone(task):
        return best_rate(alone[task.dtype]) * 1e9
    together = limits.get("gflops_per_core_together", alone)  # results that are older have none
    return 2 * best_rate(together[task.dtype]) * 1e9


def _is_alone(task: Task) -> bool:
    return task.mode == "one" and task.threads == 1


def all_rates() -> dict[str, Rates]:
    """Of one core, in each precision."""
    keep_freed_memory()  # as ranks of runs do
    prepare_here()
    return {precision: gemm_rates(precision) for precision in PRECISIONS}


def rates_together() -> dict[str, Rates]:
    """The mean of all cores while all of them multiply, each in a process of its own, in each precision."""
    command = [sys.executable, "-m", "benchmarks.limits"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_cores())]
    every = [json.loads(process.communicate()[0]) for process in started]
    return {precision: _mean([each[precision] for each in every]) for precision in PRECISIONS}


def _mean(every: Sequence[Rates]) -> Rates:
    """Of kernels that all of them have."""
    return {
        use: {
            kernel: round(statistics.mean(rates[use][kernel] for rates in every), 1)
            for kernel in of_use
            if all(kernel in rates[use] for rates in every)
        }
        for use, of_use in every[0].items()
    }


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


def copy_bandwidth(seconds: float = 1.0) -> float:
    """[GB/s] Bytes read and written by a copy, with all cores."""
    source, target = torch.ones(ARRAY), torch.ones(ARRAY)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), seconds) / 1e9


def best_bandwidth(cores: int | None = None, seconds: float = 1.0) -> float:
    """[GB/s] Bytes read and written by what moves them fastest: a copy, or numbers changed where they are, by others
    too, as in an update of weights. `cores`: so many (None: all).
    """
    x, y, z = torch.ones(ARRAY), torch.ones(ARRAY), torch.ones(ARRAY)
    tried: tuple[tuple[int, Callable[[], object]], ...] = (
        (2, lambda: x.copy_(y)),
        (2, lambda: x.mul_(1.0)),
        (4, lambda: x.addcmul_(y, z, value=0.0)),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(cores or num_cores())
    try:
        return max(times * x.nbytes / _best(operator, seconds) for times, operator in tried) / 1e9
    finally:
        torch.set_num_threads(threads)


def _best(operator: Callable[[], object], seconds: float) -> float:
    """[s] The least time of one call, of as many as fit into some seconds."""
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        started = time.perf_counter()
        operator()
        best = min(best, time.perf_counter() - started)
    return best


def described(limits: Mapping[str, Any]) -> str:
    """In lines, for people."""
    memory = limits["best_memory_gb_per_second"]
    lines = [
        f"memory {limits['memory_gb_per_second']} GB/s, read and written by a copy; by the fastest of some operators "
        f"{memory['all cores']}, with one core {memory['one core']}",
    ]
    for precision, rates in limits["gflops_per_core"].items():
        together = best_rate(limits["gflops_per_core_together"][precision])
        lines.append(f"{precision}, GFLOP/s of a core, {together:.0f} at most while all cores multiply:")
        for use, of_use in rates.items():
            kernels = ", ".join(f"{kernel} {rate:.0f}" for kernel, rate in of_use.items())
            lines.append(f"  {use.replace('_', ' '):<16} {kernels}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(all_rates()))
