"""Memory that a step really takes, counted, beside what the planner said.

Flat buffers are asked for their sizes. Activations are found by watching every operator of one step: what it made and
somebody still holds (autograd, a chunk, a queue of weight gradients) when a unit is about to run or has run. That is a
few times slower than a plain step, so it is done in one step that is looked at closely.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from colonnade.planner.live import LiveTensors, Watch, storage_bytes
from colonnade.planner.memory import Memory
from colonnade.train.state import TrainState

T = TypeVar("T")


def measure(state: TrainState, step: Callable[[], T]) -> tuple[T, Memory]:
    """Run `step`, one training step of this state; returns what it returns, and the memory that it took."""
    with LiveTensors() as live, _watched(state, live) as watch:
        result = step()
    return result, _taken(state, watch)


def memory_table(predicted: Memory, measured: Memory) -> str:
    """Both, a line for each kind of memory, in MB (10⁶ bytes)."""
    rows = [
        ("parameters", predicted.parameters, measured.parameters),
        ("gradients", predicted.gradients, measured.gradients),
        ("master weights and moments", predicted.optimizer, measured.optimizer),
        ("whole for a while, or sent", predicted.buffers, measured.buffers),
        ("activations", predicted.activations, measured.activations),
        ("operators while they run", predicted.operators, measured.operators),
        ("together, at most", predicted.total, measured.total),
    ]
    if predicted.host or measured.host:
        rows.append(("in CPU memory", predicted.host, measured.host))
    return "\n".join([f"{'MB':<28}{'predicted':>14}{'measured':>14}", *(_row(*row) for row in rows)])


def _row(name: str, predicted: int, measured: int) -> str:
    return f"{name:<28}{predicted / 1e6:>14,.3f}{measured / 1e6:>14,.3f}"


def _taken(state: TrainState, watch: Watch) -> Memory:
    """What is held between steps, and the most that came on top of it."""
    buckets, kept = state.buckets, state.optimizer_state
    parameters = [buffer for bucket in buckets for buffer in (bucket.parameters, bucket.shard)]
    gradients = [buffer for bucket in buckets for buffer in (bucket.gradients, bucket.reduced)]
    rule = [bucket.master for bucket in buckets] + [flat for each in kept for flat in each.values()]
    offloaded = any(bucket.storage.offload for bucket in buckets)
    brought = [bucket.optimizer_gradients for bucket in buckets] if offloaded else []
    every = storage_bytes([*parameters, *gradients, *rule, *brought])
    apart = every - storage_bytes(parameters) - storage_bytes(gradients)
    return Memory(
        parameters=storage_bytes(parameters),
        gradients=storage_bytes(gradients),
        optimizer=0 if offloaded else apart,
        buffers=watch.buffers,
        activations=watch.activations,
        operators=watch.operators,
        host=apart if offloaded else 0,
    )


@contextmanager
def _watched(state: TrainState, live: LiveTensors) -> Iterator[Watch]:
    """A step that runs within this is watched."""
    watch, runner = Watch(state.ownership, state.buckets, live), state.runner
    owners = [chunk.owner for chunk in runner.chunks]
    state.runner = replace(runner, owner=watch)
    for chunk in runner.chunks:
        chunk.owner = watch
    try:
        yield watch
    finally:
        state.runner = runner
        for chunk, owner in zip(runner.chunks, owners, strict=True):
            chunk.owner = owner
