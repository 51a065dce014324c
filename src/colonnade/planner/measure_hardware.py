"""This machine's CPUs as a machine description: timed, one core, and two ranks for what crosses between ranks.

products      one core, fp32, of several sizes: the fastest rate is the peak, and half sizes are those that bring
              the others nearest to what they took; fused attention beside them, its forward and its backward
memory        adding two long vectors
operators     the least time of an operator of torch that has nothing to do
collectives   all-reduces of a few and of many numbers between two ranks of this machine

What one core does is timed by the time that this process has had of it, so that others disturb it less.
"""

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, OptimConfig, RunConfig, TrainConfig
from colonnade.errors import LayoutError
from colonnade.launch import launch
from colonnade.launch.join import joined
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh
from colonnade.planner.cost import CAUSAL
from colonnade.planner.paper import walk
from colonnade.tasks.tasks import TASKS
from colonnade.train.machine import device_name
from colonnade.train.state import build_state
from colonnade.train.step import train_step

SIZES = ((32, 32, 32), (64, 64, 64), (128, 128, 128), (256, 64, 256), (256, 256, 256), (512, 512, 512), (512, 64, 2048))
ATTENTION = (2, 4, 128, 64)
"""[samples, heads, positions, head_dim]"""
PRODUCTS_FORWARD, PRODUCTS_BACKWARD = 2, 5
"""Of matrices, as torch counts those of fused attention: backward makes the probabilities again."""
SECONDS = "seconds"
LONG, SHORT, TIMES, VOCAB = 1 << 24, 256, 7, 64


def measured_file() -> str:
    """A file for `plan --hardware`."""
    torch.set_num_threads(1)
    rates = {size: _rate(size) for size in SIZES}
    peak = max(rates.values()) * 1.05
    area, depth = _halves(rates, peak)
    attention = min(1.0, _attention_rate() / peak)
    kernel = _fastest(lambda: torch.add(torch.ones(4), 1.0), repeat=2000)
    copied = 12 * LONG / _fastest(_adding(LONG))
    alpha, beta = _between_ranks()
    cores = launch.num_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _FILE.format(
        name=device_name(torch.device("cpu")).replace('"', ""),
        system=platform.platform(),
        torch=torch.__version__,
        cores=cores,
        memory=memory / cores,
        bandwidth=copied,
        kernel=kernel,
        dispatch=_dispatch(kernel),
        flops=peak,
        double=peak / 2,
        area=area,
        depth=depth,
        attention=attention,
        alpha=alpha,
        beta=beta,
    )


def _dispatch(kernel: float) -> float:
    """[s] That a step of a tiny model takes for each of its operators, beside the operator's own least time."""
    config = _tiny()
    state = build_state(config, Mesh(), VOCAB, torch.device("cpu"))
    batch = TASKS[config.model.kind_and_head].random_batch(config.model, 1, VOCAB, separate_documents=False)
    train_step(state, [batch], Mesh(), config.train)
    seconds = _fastest(lambda: train_step(state, [batch], Mesh(), config.train), repeat=5)
    return max(0.0, seconds / walk(config, VOCAB, 0, device="cpu").launches - kernel)


def _tiny() -> Config:
    """So small that nothing but asking for operators takes time."""
    return Config(
        model=ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_length=8, dropout=0.0, attention_dropout=0.0),
        train=TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1),
        optim=OptimConfig(learning_rate=1e-3),
        run=RunConfig(folder="unused"),
    )


def _rate(size: tuple[int, int, int]) -> float:
    """[FLOP/s] Of a product of fp32 matrices."""
    m, n, k = size
    a, b = torch.randn(m, k), torch.randn(k, n)
    return 2 * m * n * k / _fastest(lambda: torch.mm(a, b), repeat=max(1, 10**8 // (2 * m * n * k)))


def _attention_rate() -> float:
    """[FLOP/s] Of causal attention, forward and backward, of what it computes: half of a full one's."""
    batch, heads, length, width = ATTENTION
    q, k, v = (torch.randn(ATTENTION, requires_grad=True) for _ in range(3))
    ones = torch.ones(ATTENTION)

    def call() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), ones)

    product = 2 * batch * heads * length * length * width
    return CAUSAL * (PRODUCTS_FORWARD + PRODUCTS_BACKWARD) * product / _fastest(call, repeat=20)


def _halves(rates: dict[tuple[int, int, int], float], peak: float) -> tuple[float, float]:
    """(half_area, half_depth) with the least error in the logarithm of the rates."""

    def error(halves: tuple[float, float]) -> float:
        area, depth = halves
        found = 0.0
        for (m, n, k), rate in rates.items():
            share = m * n / (m * n + area) * k / (k + depth)
            found += abs(share * peak / rate - 1)
        return found

    return min(product((0.0, 100.0, 500.0, 2000.0, 8000.0, 30000.0), (0.0, 2.0, 8.0, 16.0, 32.0, 64.0)), key=error)


def _adding(length: int) -> Callable[[], object]:
    a, b, out = torch.ones(length), torch.ones(length), torch.empty(length)
    return lambda: torch.add(a, b, out=out)


def _fastest(call: Callable[[], object], *, repeat: int = 1, clock: Callable[[], float] = time.process_time) -> float:
    """[s] Of one call, of this process on its core; `clock`: another one, where others are waited for."""
    least = float("inf")
    for _ in range(TIMES):
        began = clock()
        for _ in range(repeat):
            call()
        least = min(least, (clock() - began) / repeat)
    return least


def _between_ranks() -> tuple[float, float]:
    """(s of a message, bytes/s) of all-reduces between two ranks: 2·α + bytes / β."""
    with tempfile.TemporaryDirectory() as folder:
        status = launch.run_ranks(2, [sys.executable, "-m", "colonnade", "rank-of-hardware", folder])
        if status:
            raise LayoutError(f"Two ranks could not be started here to be timed (exit status {status}).")
        short, long = map(float, (Path(folder) / SECONDS).read_text().split())
    return short / 2, 4 * (LONG // 8) / max(long - short, 1e-9)


def time_between_ranks(folder: Path) -> None:
    """As one of two ranks: rank 0 writes [s] of a short and a long all-reduce."""
    with joined(Layout(tp=2), "cpu", 1) as (mesh, _):
        short, long = torch.ones(SHORT), torch.ones(LONG // 8)
        seconds = [
            _fastest(lambda: all_reduce(short, mesh.tp), repeat=50, clock=time.perf_counter),
            _fastest(lambda: all_reduce(long, mesh.tp), clock=time.perf_counter),
        ]
        if mesh.rank == 0:
            (folder / SECONDS).write_text(" ".join(map(str, seconds)))


_FILE = """\
# Measured by `colonnade hardware` on {system}, torch {torch}. A rank is one core.
name = "{name}"

[device]
kind = "cpu"
cores = {cores}
memory = {memory:.4g}
memory_bandwidth = {bandwidth:.4g}
kernel_seconds = {kernel:.3g}
dispatch_seconds = {dispatch:.3g}

[device.peak_flops]
bfloat16 = {flops:.4g}
float16 = {flops:.4g}
float32 = {flops:.4g}
float64 = {double:.4g}

[products]
efficiency = 1.0
half_area = {area:g}
half_depth = {depth:g}
attention = {attention:.3g}
memory = 1.0

[island]
size = 1000000
bandwidth = {beta:.4g}
latency = {alpha:.3g}

[node]
size = 1000000

[network]
bandwidth = 1e9
latency = 1e-4
switch_nodes = 1
oversubscription = 1
efficiency = 1.0

[host]
memory_bandwidth = {bandwidth:.4g}
link_bandwidth = {bandwidth:.4g}

[storage]
write_bandwidth = 5e8

[failures]
device_hours = 20000
restart_seconds = 60

[cost]
device_hour = 0.05

[sources]
"device" = "measured on one core; memory is the machine's, shared by its cores"
"products" = "half sizes fitted to products of one core, and attention forward and backward, measured here"
"island" = "all-reduces of two ranks, measured here"
"network" = "assumed: ranks of one machine do not use it"
"storage" = "assumed"
"failures" = "assumed"
"cost" = "assumed: set your own"
"""
