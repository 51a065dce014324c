"""Where the time of a training step goes, and what the processor would allow: `python -m benchmarks.step_parts`

One process, the reference model. Operators are timed by torch's profiler and sorted into parts; beside each part stands
the least time that its products, or its bytes, take at the best rates measured here (`limits.roofline`). Of parts that
`roofline` leaves out it is what their tensors take through memory, each once (`bytes_of_the_rest`): a cache, which
holds some of them, is faster.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks import limits
from benchmarks.colonnade_step import build_step
from benchmarks.hardware import commit, describe
from benchmarks.limits import ATTENTION, LINEAR, OUTPUT, UPDATE, bandwidth, num_weights, roofline
from benchmarks.peers.reference import DTYPES, Task
from colonnade.model import precision

PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::addmm_",
    "colonnade::product_",
    "colonnade::products_",
    "colonnade::output_exponentials_",
)
NORMS, ACTIVATION, GRADIENTS = "norms", "activation function", "gradients: zeros, and their norm"
REST = "all else: additions, copies, embedding, autograd itself"
NAMES = {"norm_backward": NORMS, "layer_norm": NORMS, "gelu": ACTIVATION, "fill_": GRADIENTS, "vector_norm": GRADIENTS}
"""Part of an operator with such a piece of a name."""
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
    if at_output and all(len(shape) < 2 or vocab_size == shape[1] for shape in shapes):
        return OUTPUT
    return next((part for piece, part in NAMES.items() if piece in name), REST)


def bytes_of_the_rest(task: Task) -> dict[str, float]:
    """To and from memory in a step, by part. Forward reads an input and writes a result, backward reads a gradient and
    the input and writes a gradient; gradients of weights are set to zero and read for their norm, in fp32.
    """
    tokens = task.num_microbatches * task.micro_batch_size * task.seq_length
    of_activations = 5 * precision.DTYPES[task.dtype].itemsize * tokens
    return {
        NORMS: of_activations * task.hidden_size * (2 * task.num_layers + 1),
        ACTIVATION: of_activations * task.ffn_hidden_size * task.num_layers,
        GRADIENTS: 2 * 4.0 * num_weights(task),
    }


def least_ms(task: Task, limit: Mapping[str, Any]) -> dict[str, float]:
    """[ms] That each part takes at least, but for `REST`."""
    rest = {part: needed / bandwidth(task, limit) for part, needed in bytes_of_the_rest(task).items()}
    return {part: 1e3 * seconds for part, seconds in {**roofline(task, limit), **rest}.items()}


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


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of a training step beside what the processor allows.")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, choices=(1, 2))
    line = parser.parse_args()
    task, limit = Task(dtype=line.dtype, threads=line.threads), limits.measured()
    found = measured(build_step(task), task.vocab_size, line.steps)
    least = least_ms(task, limit)
    machine = describe()
    print(f"{machine['cpu']}, {line.threads} of its cores, torch {machine['torch']}, commit {commit()}, {line.dtype}")
    print("| part of a step | ms | ms at least | share of that |\n|---|---|---|---|")
    for part in (OUTPUT, LINEAR, ATTENTION, UPDATE, ACTIVATION, NORMS, GRADIENTS, REST):
        known = f"{least[part]:.0f} | {least[part] / found[part]:.0%}" if part in least else "– | –"
        print(f"| {part} | {found[part]:.0f} | {known} |")
    whole, bound = sum(found.values()), sum(least.values())
    print(f"| all | {whole:.0f} | {bound:.0f} | {bound / whole:.0%} |")


if __name__ == "__main__":
    main()
