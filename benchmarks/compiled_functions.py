"""Small functions of a step three ways, in turns: plain torch, the same by `torch.compile`, and as training has them.

    python -m benchmarks.compiled_functions                                     both formats, one thread
    python -m benchmarks.compiled_functions --cache FOLDER                      what torch compiles is kept there

Sizes are those of the reference model. Times are the least of all rounds, which other programs change least, of one
thread by its own time. `first calls` are the first forward and backward by `torch.compile`, in which it compiles or,
from a folder that has it, loads.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.hardware import command_line, in_one_line
from benchmarks.limits import num_weights
from benchmarks.packed_weights import measured
from benchmarks.peers.reference import DTYPES, SIZES, Task
from colonnade.kernels.choice import Kernels, Products
from colonnade.kernels.gelu import gelu
from colonnade.kernels.products import add_rows_
from colonnade.launch.freed_memory import keep_freed_memory
from colonnade.mesh.mesh import Mesh
from colonnade.model.norm import Norm
from colonnade.model.precision import DTYPES as TORCH_DTYPES
from colonnade.optim.adamw import AdamW
from colonnade.optim.param_slice import ParamSlice
from colonnade.tensor_parallel.cross_entropy import output_loss
from colonnade.train.products import prepare_here

KERNELS = Kernels(weight_gradient="compiled", output="compiled", attention="compiled")
COMPILED = Products(KERNELS, KERNELS, KERNELS)
FACTOR, RATE, EPSILON, STEP = 0.5, 1e-6, 1e-8, 3
"""Of AdamW: gradients are multiplied by the first, and weights hardly move."""
Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Function:
    """One function of a step on drawn operands. A call returns its result, and the gradient of its input."""

    plain: Call
    by_torch: Call
    """The same, by `torch.compile`."""
    ours: Call


class Drawn:
    """Operands of one number format."""

    def __init__(self, task: Task) -> None:
        self.task, self.dtype = task, TORCH_DTYPES[task.dtype]
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.dtype)


def activation(drawn: Drawn) -> Function:
    """GELU of a product and its bias. In training the product adds the bias, whose gradient is a product too."""
    tokens, width = drawn.task.tokens_per_step, drawn.task.ffn_hidden_size
    x, grad = drawn(tokens, width).requires_grad_(), drawn(tokens, width)
    bias, of_bias = torch.zeros(width, dtype=drawn.dtype, requires_grad=True), torch.zeros(width)

    def forward(x: Tensor, bias: Tensor) -> Tensor:
        return functional.gelu(x + bias)

    by_torch = torch.compile(forward)

    def call(forward: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        y = forward(x, bias)
        return y.detach(), *torch.autograd.grad(y, (x, bias), grad)

    def ours() -> tuple[Tensor, ...]:
        y = gelu(x, "none", COMPILED)
        (dx,) = torch.autograd.grad(y, x, grad)
        add_rows_(of_bias, dx, "compiled")
        return y.detach(), dx

    return Function(lambda: call(forward), lambda: call(by_torch), ours)


def norm(drawn: Drawn) -> Function:
    """A LayerNorm and its gradients."""
    h = drawn.task.hidden_size
    x, grad = drawn(drawn.task.tokens_per_step, h).requires_grad_(), drawn(drawn.task.tokens_per_step, h)
    module = Norm(h, epsilon=1e-5).to(drawn.dtype)
    module.products = COMPILED
    weight = torch.ones(h, dtype=drawn.dtype, requires_grad=True)
    bias = torch.zeros(h, dtype=drawn.dtype, requires_grad=True)

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (h,), weight, bias, 1e-5)

    by_torch = torch.compile(forward)

    def call(forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        y = forward(x, weight, bias)
        return y.detach(), *torch.autograd.grad(y, (x, weight, bias), grad)

    def ours() -> tuple[Tensor, ...]:
        y = module(x, drawn.dtype)
        return y.detach(), *torch.autograd.grad(y, x, grad)

    return Function(lambda: call(forward), lambda: call(by_torch), ours)


def output(drawn: Drawn) -> Function:
    """The output layer's logits, their softmax and loss, and all gradients."""
    tokens, h, vocab = drawn.task.tokens_per_step, drawn.task.hidden_size, drawn.task.vocab_size
    x, table = drawn(tokens, 1, h).requires_grad_(), nn.Parameter(drawn(vocab, h).mul_(h**-0.5))
    labels, weights = torch.zeros(tokens, 1, dtype=torch.int64), torch.full((tokens, 1), 1 / tokens)

    def forward(x: Tensor, table: Tensor) -> Tensor:
        return functional.cross_entropy((x.flatten(0, 1) @ table.t()).float(), labels.flatten())

    by_torch = torch.compile(forward)

    def call(forward: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        loss = forward(x, table)
        dx, _ = torch.autograd.grad(loss, (x, table))
        return loss.detach(), dx

    def ours() -> tuple[Tensor, ...]:
        loss = output_loss(x, table, labels, weights, tp=Mesh().tp, vocab_size=vocab, products=COMPILED)
        return loss.detach(), *torch.autograd.grad(loss, x)

    return Function(lambda: call(forward), lambda: call(by_torch), ours)


def update(drawn: Drawn) -> Function:
    """AdamW on all weights, and what layers read of these. Plain is torch's fused kernel, which `torch.compile` leaves
    as it is: it is given the rule in torch's operators.
    """
    task, rule = drawn.task, AdamW(drawn.task.beta1, drawn.task.beta2, EPSILON, drawn.task.weight_decay)
    weights, gradients = torch.randn(num_weights(task)), torch.randn(num_weights(task))
    state = {"exp_avg": torch.randn_like(weights), "exp_avg_sq": torch.rand_like(weights)}
    copied_to = None if task.dtype == "fp32" else weights.to(drawn.dtype)

    def ruled(compiled: bool) -> tuple[Tensor, ...]:
        slices = [ParamSlice(weights, gradients, state, decayed=True, copied_to=copied_to, compiled=compiled)]
        rule.update_(slices, step=STEP, learning_rate=RATE, factor=torch.tensor(FACTOR))
        return (weights,)

    def written(w: Tensor, g: Tensor, m: Tensor, v: Tensor, rounded: Tensor | None) -> None:
        g = g * FACTOR
        m.lerp_(g, 1 - task.beta1)
        v.mul_(task.beta2).addcmul_(g, g, value=1 - task.beta2)
        scale = (v.sqrt() / (1 - task.beta2**STEP) ** 0.5).add_(EPSILON)
        w.mul_(1 - RATE * task.weight_decay).addcdiv_(m, scale, value=-RATE / (1 - task.beta1**STEP))
        if rounded is not None:
            rounded.copy_(w)

    by_torch = torch.compile(written)

    def call() -> tuple[Tensor, ...]:
        by_torch(weights, gradients, state["exp_avg"], state["exp_avg_sq"], copied_to)
        return (weights,)

    return Function(lambda: ruled(False), call, lambda: ruled(True))


FUNCTIONS: dict[str, Callable[[Drawn], Function]] = {
    "bias and GELU, forward and backward": activation,
    "LayerNorm, forward and backward": norm,
    "output layer and loss, forward and backward": output,
    "AdamW": update,
}


def row(name: str, function: Function, rounds: int) -> str:
    """A line of a table."""
    started = time.perf_counter()
    function.by_torch()
    first = time.perf_counter() - started
    found = measured({"plain": function.plain, "torch": function.by_torch, "ours": function.ours}, rounds)
    least = {way: min(times) for way, times in found.items()}
    times = " | ".join(f"{1e3 * each:.2f}" for each in least.values())
    return f"| {name} | {times} | {least['torch'] / least['ours']:.2f} | {first:.1f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cache", type=Path, help="a folder for what torch compiles; without, a new one")
    parser.add_argument("--tiny", action="store_true", help="a toy model: tries the script, measures nothing")
    line = parser.parse_args()
    torch.set_num_threads(line.threads)
    keep_freed_memory()  # as ranks of runs do
    why = prepare_here()
    if why:
        raise SystemExit(f"there are no compiled kernels: {why}")
    told = f"{in_one_line()}, {line.threads} thread(s), {line.rounds} rounds in turns"
    print(f"# Functions of a step, three ways\n\n{told}:\n")
    print(f"    {command_line()}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(line.cache or folder)
        for dtype in line.dtype:
            print(
                f"\n| {dtype}, ms | plain torch | torch.compile | training | torch.compile / training | first calls |"
            )
            print("|---|---|---|---|---|---|")
            for name, make in FUNCTIONS.items():
                torch.compiler.reset()
                task = Task(dtype=dtype, **SIZES["tiny" if line.tiny else "reference"])
                print(row(name, make(Drawn(task)), line.rounds), flush=True)


if __name__ == "__main__":
    main()
