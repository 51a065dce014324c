"""Compiled kernels on shapes of the reference model, beside those of another checkout, in turns.

    python -m benchmarks.kernel_pairs --before ../parent [--dtype fp32] [--threads 2] [--pairs 30] [--busy]

A process of each checkout has its operands ready; a turn is one call in the one, then one in the other, and every other
turn begins with the other. With one thread both are on one core: the cores of a virtual machine are not always alike.
Threads of a process that is not called sleep. `--busy`: another program keeps one of the cores at work meanwhile. Times
are medians; the last column is the median of the turns' ratios, which a host that slows down for a while changes least.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch

from benchmarks.hardware import ROOT, commit, cpu_name
from benchmarks.peers.reference import DTYPES, Task
from colonnade.config.model import ModelConfig
from colonnade.kernels.attention import attend
from colonnade.kernels.choice import Kernels, Products
from colonnade.kernels.dropout import Masks, dropout
from colonnade.kernels.products import add_product_
from colonnade.launch.freed_memory import keep_freed_memory
from colonnade.mesh.mesh import Mesh
from colonnade.model.attention import Attention
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.model.mlp import MLP
from colonnade.model.norm import Norm
from colonnade.model.precision import DTYPES as TORCH_DTYPES
from colonnade.randomness import Purpose
from colonnade.tensor_parallel.cross_entropy import output_loss
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.train.products import prepare_here

OUTPUT, WEIGHT, ATTENTION, NORM, GELU, TANH, DROPPED, DROPOUT, DRAWN = (
    "output layer and loss, forward and backward",
    "linear layer: weight gradient",
    "attention, forward and backward",
    "LayerNorm, forward and backward",
    "GELU, forward and backward",
    "GELU by tanh, forward and backward",
    "an attention layer with dropout, forward and backward",
    "dropout of the stream, forward and backward",
    "initial weights of the table",
)
EVERY = (OUTPUT, WEIGHT, ATTENTION, NORM, GELU, TANH, DROPPED, DROPOUT, DRAWN)
DROP = 0.1


def make_calls(dtype: torch.dtype, task: Task) -> Mapping[str, Callable[[], object]]:
    """What is timed, on drawn operands."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    h, vocab, tokens = task.hidden_size, task.vocab_size, task.tokens_per_step
    table = torch.nn.Parameter(drawn(vocab, h).mul_(h**-0.5))  # [v, h]
    hidden, labels = drawn(tokens, 1, h).requires_grad_(), torch.zeros(tokens, 1, dtype=torch.int64)
    inputs, outputs, of_weight = (
        drawn(tokens, h),
        drawn(tokens, task.ffn_hidden_size),
        torch.zeros(task.ffn_hidden_size, h),
    )
    heads = tokens // task.seq_length, task.num_heads, task.seq_length, task.head_dim
    q, k, v = (drawn(*heads).requires_grad_() for _ in range(3))  # [b, n, s, d]
    kernels = Kernels("native", "native", "compiled", "compiled", "compiled")
    products = Products(kernels, kernels, kernels)
    norm = Norm(h, epsilon=1e-5)
    exact, by_tanh = (
        MLP(ModelConfig(hidden_size=h, activation=name), Parallel(Mesh().tp)) for name in ("gelu", "gelu_tanh")
    )
    for module in (norm, exact, by_tanh):
        module.products = products  # set here: what another checkout is given it may not take
    inner = drawn(tokens, 1, task.ffn_hidden_size).requires_grad_()

    def lost() -> None:
        weights = torch.full((tokens, 1), 1 / tokens)
        loss = output_loss(hidden, table, labels, weights, tp=Mesh().tp, vocab_size=vocab, products=products)
        loss.backward()  # type: ignore[no-untyped-call]

    def attended() -> None:
        y = attend(q, k, v, products=products)
        torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

    def normed() -> None:
        y = norm(hidden, dtype)
        torch.autograd.grad(y, hidden, torch.ones_like(y))

    def activated(mlp: MLP) -> None:
        y = mlp._activated(inner)
        torch.autograd.grad(y, inner, torch.ones_like(y))

    stream = drawn(task.seq_length, task.micro_batch_size, h).requires_grad_()
    return {
        OUTPUT: lost,
        WEIGHT: lambda: add_product_(of_weight, outputs, inputs, "compiled"),
        ATTENTION: attended,
        NORM: normed,
        GELU: lambda: activated(exact),
        TANH: lambda: activated(by_tanh),
        **random_calls(stream, task, products),
    }


def random_calls(stream: torch.Tensor, task: Task, products: Products) -> Mapping[str, Callable[[], object]]:
    """What draws random numbers. `stream`: [s, b, h]."""
    h, masks = task.hidden_size, Masks(1, np.arange(task.micro_batch_size))
    shape = ModelConfig(hidden_size=h, num_heads=task.num_heads, attention_dropout=DROP)
    layer = Attention(shape, Parallel(Mesh().tp, products=products)).to(stream.dtype)
    small = ModelConfig(hidden_size=h, num_heads=1, num_layers=1, seq_length=1)
    gpt = GPT(small, task.vocab_size, Parallel(Mesh().tp))

    def differentiated(y: torch.Tensor) -> None:
        torch.autograd.grad(y, stream, torch.ones_like(y))

    return {
        DROPPED: lambda: differentiated(layer(stream, 0, masks)),
        DROPOUT: lambda: differentiated(dropout(stream, DROP, masks, Purpose.RESIDUAL_DROPOUT)),
        DRAWN: lambda: initialize_(gpt, Mesh().tp, 1),
    }


def serve(dtype: str, threads: int) -> None:
    """Call what each line of the input names, and answer with its seconds."""
    torch.set_num_threads(threads)
    keep_freed_memory()  # as ranks of runs do
    why = prepare_here()
    if why:
        raise SystemExit(f"there are no compiled kernels: {why}")
    calls = make_calls(TORCH_DTYPES[dtype], Task())
    print("ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        calls[line.strip()]()
        print(time.perf_counter() - started, flush=True)


@contextmanager
def served(root: Path, dtype: str, threads: int) -> Iterator[Callable[[str], float]]:
    """A process of a checkout: seconds of a call by its name."""
    command = [sys.executable, "-m", "benchmarks.kernel_pairs", "--serve", "--dtype", dtype, "--threads", str(threads)]
    own = {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **own}, cwd=ROOT) as process:
        to, back = process.stdin, process.stdout
        assert to is not None and back is not None, "pipes were asked for"
        if back.readline().strip() != "ready":
            raise SystemExit(f"no kernels of {root}")
        yield lambda name: _asked(name, to, back)
        to.close()


def _asked(name: str, to: IO[str], back: IO[str]) -> float:
    print(name, file=to, flush=True)
    answer = back.readline()
    if not answer:
        raise SystemExit(f"{name}: the process has ended")
    return float(answer)


@contextmanager
def busy(core: int) -> Iterator[None]:
    """Another program at work on a core."""
    other = multiprocessing.get_context("fork").Process(target=_work, args=(core,), daemon=True)
    other.start()
    try:
        yield
    finally:
        other.kill()
        other.join()


def _work(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    line = parser.parse_args()
    if line.serve:
        serve(line.dtype, line.threads)
        return
    if line.before is None:
        parser.error("--before names the checkout to compare with")
    if not (line.before / "src" / "colonnade").is_dir():  # else both would be this one
        parser.error(f"--before {line.before} has no src/colonnade: name the root of a checkout")
    cores = os.sched_getaffinity(0)
    if line.threads == 1:
        os.sched_setaffinity(0, {max(cores)})
    roots = (line.before.resolve(), ROOT)
    print(f"{cpu_name()}, {line.threads} threads, {line.dtype}, commit {commit()} beside {commit(line.before)}")
    print("| kernel | before, ms | now, ms | before / now |\n|---|---|---|---|")
    with ExitStack() as stack:
        if line.busy:
            stack.enter_context(busy(min(cores)))
        both = [stack.enter_context(served(root, line.dtype, line.threads)) for root in roots]
        for name in EVERY:
            pairs = [_pair(both, name, turn) for turn in range(-2, line.pairs)][2:]  # the first two prepare
            before, now = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
            ratio = statistics.median(then / since for then, since in pairs)
            print(f"| {name} | {before:.2f} | {now:.2f} | {ratio:.2f} |", flush=True)


def _pair(both: list[Callable[[str], float]], name: str, turn: int) -> list[float]:
    order = (0, 1) if turn % 2 else (1, 0)
    found = {which: both[which](name) for which in order}
    return [found[0], found[1]]


if __name__ == "__main__":
    main()
