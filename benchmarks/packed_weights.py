"""Weights that are packed once, for oneDNN or MKL, beside the kernels that training chooses among: forward, in turns.

    python -m benchmarks.packed_weights                                   a page: both formats, one thread and two
    python -m benchmarks.packed_weights --dtype bf16 --threads 2 --rounds 5

Products of the reference model. A round calls every way once; before each call more than a cache holds is written, as
the rest of a model would between two uses of a weight. Times are the least of all rounds, which other programs change
least, of one thread by its own time. A packed copy is of use until the next step changes the weight: the last column
says how many micro-batches a step must have so that forward gains what packing costs.
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.hardware import command_line, in_one_line
from benchmarks.peers.reference import DTYPES, SIZES, Task
from colonnade.kernels.choice import Kernel
from colonnade.kernels.products import Operand, computed_by, in_type, widen
from colonnade.kernels.timing import candidates
from colonnade.launch.freed_memory import keep_freed_memory
from colonnade.model.precision import DTYPES as TORCH_DTYPES
from colonnade.train.products import prepare_here

CACHES = 1 << 26
"""[bytes] That are written between two calls."""
ONEDNN, MKL = "packed, oneDNN", "packed, MKL"
Pack = Callable[[Tensor, int], Tensor]


def products(task: Task) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every product of forward."""
    h, ffn = task.hidden_size, task.ffn_hidden_size
    return {
        "queries, keys, values": (3 * h, h),
        "attention's output": (h, h),
        "MLP, up": (ffn, h),
        "MLP, down": (h, ffn),
        "output layer": (task.vocab_size, h),
    }


def packs(dtype: torch.dtype) -> dict[str, Pack]:
    """What makes a packed copy of a weight [o, i], for so many tokens, by the name of the way that reads it."""
    found: dict[str, Pack] = {ONEDNN: _pack_for_onednn}
    if dtype is torch.float32 and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        found[MKL] = _pack_for_mkl
    return found


def _pack_for_onednn(weight: Tensor, tokens: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
    return packed


def _pack_for_mkl(weight: Tensor, tokens: int) -> Tensor:
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, tokens)
    return packed


def ways(x: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """x [t, i] times weight [o, i], transposed -> [t, o] in their type: by each candidate, and by packed copies."""
    found: dict[str, Callable[[], Tensor]] = {
        kernel: partial(_by, kernel, x, weight) for kernel in candidates(x.dtype, "forward")
    }
    for name, pack in packs(x.dtype).items():
        packed = pack(weight, len(x))
        found[name] = partial(_by_mkl if name == MKL else _by_onednn, x, packed, weight)
    return found


def _by(kernel: Kernel, x: Tensor, weight: Tensor) -> Tensor:
    with computed_by(kernel):
        return in_type(Operand(weight).product(widen(x, kernel), kernel), x.dtype)


def _by_onednn(x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return y


def _by_mkl(x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkl._mkl_linear(x, packed, weight, None, len(x))
    return y


def measured(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """[s] Of each call in each round; every other round begins with the last."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    other, times = torch.zeros(CACHES // 4), {name: list[float]() for name in calls}
    for number in range(-1, rounds):  # the first prepares
        for name in list(calls) if number % 2 else list(calls)[::-1]:
            other.add_(1.0)
            started = clock()
            calls[name]()
            if number >= 0:
                times[name].append(clock() - started)
    return times


def row(name: str, x: Tensor, weight: Tensor, rounds: int) -> tuple[list[str], str]:
    """(the ways, a line of a table) of one product."""
    calls: dict[str, Callable[[], object]] = {**ways(x, weight)}
    of_packing = {f"packing {way}": partial(pack, weight, len(x)) for way, pack in packs(x.dtype).items()}
    found = measured({**calls, **of_packing}, rounds)
    least = {way: min(times) for way, times in found.items()}
    best = min(candidates(x.dtype, "forward"), key=lambda kernel: least[kernel])
    packed = min(packs(x.dtype), key=lambda way: least[way])
    packing, saved = least[f"packing {packed}"], least[best] - least[packed]
    after = str(math.ceil(packing / saved)) if saved > 0 else "never"
    times = " | ".join(f"{1e3 * least[way]:.2f}" for way in calls)
    return list(calls), f"| {name} | {times} | {least[best] / least[packed]:.2f} | {1e3 * packing:.2f} | {after} |"


def table(task: Task, rounds: int) -> list[str]:
    """Lines of all products."""
    generator, lines = torch.Generator().manual_seed(0), list[str]()
    dtype, tokens = TORCH_DTYPES[task.dtype], task.tokens_per_step
    for name, (outputs, inputs) in products(task).items():
        x = torch.randn(tokens, inputs, generator=generator).to(dtype)
        weight = torch.randn(outputs, inputs, generator=generator).mul_(inputs**-0.5).to(dtype)
        calls, line = row(name, x, weight, rounds)
        if not lines:
            more = "best / packed", "packing", "gains from micro-batches"
            lines.append(f"| {' | '.join([f'{task.dtype}, ms', *calls, *more])} |")
            lines.append("|---" * (len(calls) + 4) + "|")
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a toy model: tries the script, measures nothing")
    line = parser.parse_args()
    keep_freed_memory()  # as ranks of runs do
    why = prepare_here()
    told = f"{in_one_line()}, {line.rounds} rounds in turns"
    print(f"# Packed weights beside the kernels of training, forward\n\n{told}:\n\n    {command_line()}")
    if why:
        print(f"\nThere are no compiled kernels: {why}.")
    for threads in line.threads:
        torch.set_num_threads(threads)
        print(f"\n{threads} thread{'s' * (threads > 1)}, {Task().tokens_per_step:,} tokens a micro-batch:")
        for dtype in line.dtype:
            task = Task(dtype=dtype, **SIZES["tiny" if line.tiny else "reference"])
            print("", *table(task, line.rounds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
