"""How long each unit of a model takes on this machine: what a pipeline's cuts can be weighed by.

One embedding, one block and one head of the configured shape run forward and backward on random numbers, as one rank of
the configured tp (on paper: nothing is sent). All blocks that are trained alike take what one of them takes.
"""

import time

import torch

from colonnade.architecture.families import architecture_of
from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.launch.launch import checked_threads
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import paper_mesh
from colonnade.model.initialize import initialize_
from colonnade.model.inputs import Inputs
from colonnade.model.model import Transformer
from colonnade.model.precision import DTYPES
from colonnade.pipeline.carry import backward_from, leaves
from colonnade.planner.example import example_inputs
from colonnade.train.state import build_model, parallel_of

_TIMES = 3
"""Each unit runs once to warm up and so often to be timed; the fastest counts, for others only disturb."""


def measured(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    vocab_size: int,
    *,
    architecture: Architecture | None = None,
) -> dict[str, float]:
    """Seconds of forward and backward of one micro-batch, for every unit, where the run would compute. `architecture`:
    with what of the model is trained; None: all.
    """
    device = torch.device("cpu" if train.device == "cpu" or not torch.cuda.is_available() else "cuda")
    if train.threads:
        torch.set_num_threads(checked_threads(train.threads))
    architecture, tp = architecture or architecture_of(model, vocab_size), paper_mesh(Layout(tp=parallel.tp), 0).tp
    units = {unit.kind: unit for unit in reversed(architecture.units)}  # the first of each
    names, dtype = [unit.name for unit in reversed(units.values())], DTYPES[train.precision]
    layers = parallel_of(parallel, tp)
    built = build_model(model, vocab_size, layers, dtype=dtype, units=names, architecture=architecture)
    initialize_(built, tp, train.seed, device)
    built = built.to(device=device, dtype=dtype)
    inputs = example_inputs(model, train, vocab_size, device)
    each = {unit.kind: _seconds(built, unit, inputs, device) for unit in reversed(units.values())}
    return {unit.name: each[unit.kind] for unit in architecture.units}


def _seconds(model: Transformer, unit: Unit, inputs: Inputs, device: torch.device) -> float:
    times = []
    for _ in range(1 + _TIMES):
        buffers = tuple(x.normal_() for x in model.carry_buffers(inputs, unit.name))
        carry = leaves(buffers, gradients=unit.sends_back)
        started = _now(device)
        out = model.run(unit.name, carry, inputs)
        backward_from(out, None if unit.is_loss else tuple(torch.ones_like(x) for x in out))
        times.append(_now(device) - started)
    return min(times[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
