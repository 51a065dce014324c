"""This machine's CPUs as a machine description: timed, one core, and several ranks for what they share.

products      one core, as runs here multiply, and other operators that are slower than their bytes
              (`measure_operators.py`)
memory        adding two long vectors
operators     the least time of an operator of torch that has nothing to do; and what a step of a small model takes
              beside what its operators take, for each of them
reading       a batch of text whose samples lie scattered over a file, of which memory has a copy
together      steps on all cores at once, beside the same on one
crowded       steps of twice as many ranks as there are cores, which wait for each other by pairs
collectives   of a few and of many numbers, between two ranks of this machine
"""

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import MappingProxyType

import numpy as np
import torch

from colonnade.config.describe import as_toml
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, OptimConfig, RunConfig, TrainConfig
from colonnade.control_groups import memory_limits, num_cores
from colonnade.data.gpt_dataset import GPTDataset
from colonnade.data.indexed import TokenFile
from colonnade.data.sampler import EpochOrder
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import LayoutError
from colonnade.kernels.choice import Products
from colonnade.launch import launch
from colonnade.launch.freed_memory import keep_freed_memory
from colonnade.launch.join import joined
from colonnade.mesh.collectives import all_gather, all_reduce
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh
from colonnade.model.precision import DTYPES
from colonnade.planner.estimate import estimate
from colonnade.planner.hardware import parsed
from colonnade.planner.measure_operators import (
    HEAD_DIMS,
    LARGE,
    SIZES,
    attention_of,
    attention_rate,
    fastest,
    fitted,
    peak_of,
    products_here,
    seconds_an_element,
    timed,
)
from colonnade.tasks.tasks import TASKS
from colonnade.train.machine import device_name
from colonnade.train.state import build_state
from colonnade.train.step import train_step

SECONDS = "seconds"
LONG, SHORT, VOCAB = 1 << 24, 256, 64
MOST_CORES = 16
"""On which ranks are started to see what cores share."""
TURNS, TIMES = 7, 5
"""Of ranks at work, all and a few, and steps of each turn."""
DOCUMENTS, LENGTH, SAMPLES = 2000, 1024, 16
"""[documents] of [tokens], as long as samples, of which a batch has so many."""
LAUNCHES = 3
"""Of crowded ranks: which of them the system puts on one core decides, and stays so for as long as they run."""


def measured_file() -> str:
    """A file for `plan --hardware`."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as all ranks of runs do
    products, cores = products_here(), num_cores()
    roof = fitted(timed(torch.float32, products, SIZES))
    others = {name: dtype for name, dtype in DTYPES.items() if name != "fp32"}
    peaks = {name: peak_of(timed(dtype, products, LARGE), roof) for name, dtype in others.items()}
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min([installed, *(limit for _, limit in memory_limits())])
    few = min(cores, MOST_CORES)
    with _on_cores(few):
        (beside_others,) = _on_ranks("together", Layout(dp=few))
        crowded = median(_on_ranks("crowded", Layout(tp=2, dp=few))[0] for _ in range(LAUNCHES))
    gathered, short, long = _on_ranks("collectives", Layout(tp=2))
    narrow, wide = (attention_rate(width) for width in HEAD_DIMS)
    attention, half_head = attention_of(narrow, wide, roof.peak)
    latency = max(0.0, short - gathered)  # an all-reduce is two messages, a gather one
    figures = {
        "name": as_toml(device_name(torch.device("cpu"))),
        "system": platform.platform(),
        "torch": torch.__version__,
        "cores": cores,
        "memory": memory / cores,
        "bandwidth": _bandwidth(),
        "kernel": fastest(lambda: torch.add(torch.ones(4), 1.0), repeat=2000),
        "together": min(1.0, max(0.05, 1 / beside_others)),
        "crowded": min(1.0, max(0.05, 2 / crowded)),
        "fp32": roof.peak,
        **peaks,
        "area": roof.half_area,
        "depth": roof.half_depth,
        "attention": min(1.0, attention / roof.peak),
        "half_head": half_head,
        "reading": _reading(),
        "operators": "\n".join(f"{name} = {each:.3g}" for name, each in seconds_an_element().items()),
        "alpha": latency,
        "call": max(0.0, gathered - latency),
        "beta": 4 * (LONG // 8) / max(long - short, long / 2),  # most of a long one is no latency
    }
    return _FILE.format(**figures, dispatch=_dispatch(_FILE.format(**figures, dispatch=0.0), products))


def _dispatch(without: str, products: Products) -> float:
    """[s] For each operator of a step of a small model: what it takes beside what a description `without` says."""
    config, machine = _small(), parsed(without, "what was measured")
    seconds = fastest(_step(products), repeat=3)
    planned = estimate(config, VOCAB, machine, products=products, every_rank=False)
    launches = sum(1 for section in planned.walks[0].sections for _ in section.operators)
    return max(0.0, seconds - planned.played[0].total) / launches


def _small() -> Config:
    """So small that asking for operators takes time, and large enough that they leave the caches to each other."""
    return Config(
        model=ModelConfig(
            num_layers=2, hidden_size=128, num_heads=4, seq_length=64, dropout=0.0, attention_dropout=0.0
        ),
        train=TrainConfig(steps=1, global_batch_size=4, micro_batch_size=2, precision="fp32", device="cpu"),
        optim=OptimConfig(learning_rate=1e-3),
        run=RunConfig(folder="unused"),
    )


def _reading() -> float:
    """[s] For each token of a batch of text."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "tokens"
        with TokenFileWriter(prefix, np.dtype(np.uint16)) as writer:
            writer.add_documents(np.zeros(DOCUMENTS * LENGTH, np.uint16), np.full(DOCUMENTS, LENGTH))
        text = GPTDataset(TokenFile(prefix), range(DOCUMENTS), LENGTH, vocab_size=VOCAB)
        text.order = EpochOrder(len(text), 1)
        task, positions = TASKS[_small().model.kind_and_head], range(SAMPLES)
        return fastest(lambda: task.batch(text.rows(positions), positions)) / (SAMPLES * LENGTH)


def _bandwidth() -> float:
    """[bytes/s] Where one vector of fp32 is added to another: two are read and one is written."""
    return 3 * 4 * LONG / fastest(_adding(LONG))


def _adding(length: int) -> Callable[[], object]:
    a, b, out = torch.ones(length), torch.ones(length), torch.empty(length)
    return lambda: torch.add(a, b, out=out)


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Within: this process, and those that it starts, have so many cores, where the system lets it choose."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    there = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(there)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, there)


def _on_ranks(what: str, layout: Layout) -> list[float]:
    """[s] What rank 0 of a layout has measured: see `_MEASURED`."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = [str(size) for size in (layout.tp, layout.dp)]
        command = [sys.executable, "-m", "colonnade", "rank-of-hardware", what, *sizes, folder]
        if status := launch.run_ranks(layout.num_ranks, command):
            raise LayoutError(f"{layout.num_ranks} ranks could not be started here to be timed (exit status {status}).")
        return [float(each) for each in (Path(folder) / SECONDS).read_text().split()]


def time_on_a_rank(what: str, layout: Layout, folder: Path) -> None:
    """As one of some ranks: rank 0 writes what `_on_ranks` reads."""
    with joined(layout, "cpu", 1) as (mesh, _):
        seconds = _MEASURED[what](mesh)
        if mesh.rank == 0:
            (folder / SECONDS).write_text(" ".join(map(str, seconds)))


def _together(mesh: Mesh) -> list[float]:
    """How many times as long a step of a small model takes rank 0 beside those of all others as alone."""
    step = _step()
    return [_times_as_long(mesh, step, step, few=mesh.rank == 0)]


def _crowded(mesh: Mesh) -> list[float]:
    """How many times as long such a step takes on each of more ranks than cores, two of which wait for each other
    behind each, as on a rank for each core.
    """
    step = _step()

    def with_the_other() -> None:
        step()
        all_reduce(torch.ones(1), mesh.tp)

    return [_times_as_long(mesh, step, with_the_other, few=mesh.tp.rank == 0)]


def _times_as_long(mesh: Mesh, of_few: Callable[[], object], of_all: Callable[[], object], *, few: bool) -> float:
    """A call of all ranks beside one of a `few`, in turns: a host may change the pace of its cores meanwhile."""
    ratios = []
    for _ in range(TURNS):
        seconds = []
        for call, at_work in ((of_few, few), (of_all, True)):
            all_reduce(torch.ones(1), mesh.world)
            seconds.append(_median(call) if at_work else 1.0)
        ratios.append(seconds[1] / seconds[0])
    return median(ratios)


def _collectives(mesh: Mesh) -> list[float]:
    """[s] Of a gather and an all-reduce of few numbers, and of an all-reduce of many."""
    part, short, long = torch.ones(SHORT // 2), torch.ones(SHORT), torch.ones(LONG // 8)
    calls = ((lambda: all_gather(part, mesh.tp), 50), (lambda: all_reduce(short, mesh.tp), 50))
    few = [fastest(call, repeat=repeat, clock=time.perf_counter) for call, repeat in calls]
    return [*few, fastest(lambda: all_reduce(long, mesh.tp), clock=time.perf_counter)]


_MEASURED: Mapping[str, Callable[[Mesh], list[float]]] = MappingProxyType(
    {"together": _together, "crowded": _crowded, "collectives": _collectives}
)


def _step(products: Products | None = None) -> Callable[[], object]:
    """A step of a small model, on this rank alone."""
    config = _small()
    state = build_state(config, Mesh(), VOCAB, torch.device("cpu"), products=products)
    batch = TASKS[config.model.kind_and_head].random_batch(config.model, 2, VOCAB, separate_documents=False)
    return lambda: train_step(state, [batch] * config.train.num_microbatches(1), Mesh(), config.train)


def _median(call: Callable[[], object]) -> float:
    """[s] Of `TIMES` calls by the clock, after one more."""
    call()
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


_FILE = """\
# Measured by `colonnade hardware` on {system}, torch {torch}. A rank is one core.
name = {name}

[device]
kind = "cpu"
cores = {cores}
memory = {memory:.4g}
memory_bandwidth = {bandwidth:.4g}
kernel_seconds = {kernel:.3g}
dispatch_seconds = {dispatch:.3g}
together = {together:.3g}
crowded = {crowded:.3g}

[device.peak_flops]
bfloat16 = {bf16:.4g}
float16 = {fp16:.4g}
float32 = {fp32:.4g}
float64 = {fp64:.4g}

[products]
efficiency = 1.0
half_area = {area:g}
half_depth = {depth:g}
attention = {attention:.3g}
half_head = {half_head:.3g}
memory = 1.0

[operators]
{operators}

[island]
size = 1000000
bandwidth = {beta:.4g}
latency = {alpha:.3g}
call = {call:.3g}

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
token_seconds = {reading:.3g}

[storage]
write_bandwidth = 5e8

[failures]
device_hours = 20000
restart_seconds = 60

[cost]
device_hour = 0.05

[sources]
"device" = "measured on one core, together on all; memory is the machine's, shared by its cores"
"products" = "peak and half sizes fitted to products of one core, and attention forward and backward, measured here"
"operators" = "measured on one core"
"island" = "collectives of two ranks, measured here"
"network" = "assumed: ranks of one machine do not use it"
"host.token_seconds" = "measured on one core: text, whole samples in random order"
"storage" = "assumed"
"failures" = "assumed"
"cost" = "assumed: set your own"
"""
