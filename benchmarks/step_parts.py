"""Where the time of a training step goes, and what the processor would allow: `python -m benchmarks.step_parts`

One process with one thread, the reference model. Operators are timed by torch's profiler and sorted into parts; beside
each part stands the least time that its arithmetic takes at the best rate of products measured here, or that its bytes
take at the measured bandwidth.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks import limits
from benchmarks.colonnade_step import build_step, reference_config
from benchmarks.hardware import commit, describe
from benchmarks.limits import best_rate
from benchmarks.peers.reference import DTYPES, Task
from colonnade.architecture.families import architecture_of

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "colonnade::product_", "colonnade::output_exponentials_")
OUTPUT, LINEAR, ATTENTION, UPDATE, REST = (
    "output layer and loss",
    "linear layers: products",
    "attention",
    "optimizer",
    "all else: norms, activations, copies, embedding",
)
Shapes = list[list[int]]


def part_of(name: str, shapes: Shapes, vocab_size: int) -> str:
    """The part of a step that an operator belongs to."""
    at_output = any(vocab_size in shape for shape in shapes)
    if name in PRODUCTS:
        return OUTPUT if at_output else LINEAR
    if "adam" in name:
        return UPDATE
    if "attend" in name or "attention" in name:
        return ATTENTION
    inside = at_output and all(len(shape) < 2 or vocab_size == shape[1] for shape in shapes)
    return OUTPUT if inside else REST


def measured(step: Callable[[], float], vocab_size: int, steps: int) -> dict[str, float]:
    """[ms] of one step, by part."""
    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(steps):
            step()
    found: dict[str, float] = defaultdict(float)
    for event in recorded.key_averages(group_by_input_shape=True):
        found[part_of(event.key, event.input_shapes, vocab_size)] += event.self_cpu_time_total / 1e3 / steps
    return dict(found)


def allowed(task: Task, limit: Mapping[str, Any]) -> dict[str, float]:
    """[ms] that the arithmetic or the bytes of a step's parts take at least; what has neither is left out."""
    tokens, h, v, s = task.tokens_per_step, task.hidden_size, task.vocab_size, task.seq_length
    rate = best_rate(limit["gflops_per_core"][task.dtype]) * 1e6  # a millisecond
    bandwidth = limit["memory_gb_per_second"] * 1e6
    model = reference_config(task).model
    weights = architecture_of(model, v).num_parameters
    linear = task.num_layers * 12 * h * h
    of_update = weights * ((4 + 4) * 2 + 4 + 4 + 4 + (2 if task.bf16 else 0))
    return {
        OUTPUT: 6 * tokens * h * v / rate,
        LINEAR: 6 * tokens * linear / rate,
        ATTENTION: 7 * task.num_layers * tokens * s * h / rate,
        UPDATE: of_update / bandwidth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of a training step beside what the processor allows.")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--steps", type=int, default=4)
    line = parser.parse_args()
    task, limit = Task(dtype=line.dtype, threads=1), limits.measured()
    found, least = measured(build_step(task), task.vocab_size, line.steps), allowed(task, limit)
    machine = describe()
    print(f"{machine['cpu']}, one core, torch {machine['torch']}, commit {commit()}, {line.dtype}")
    print("| part of a step | ms | ms at least | share of that |\n|---|---|---|---|")
    for part in (OUTPUT, LINEAR, ATTENTION, UPDATE, REST):
        known = f"{least[part]:.0f} | {least[part] / found[part]:.0%}" if part in least else "– | –"
        print(f"| {part} | {found.get(part, 0.0):.0f} | {known} |")
    whole, bound = sum(found.values()), sum(least.values())
    print(f"| all | {whole:.0f} | {bound:.0f} | {bound / whole:.0%} |")


if __name__ == "__main__":
    main()
