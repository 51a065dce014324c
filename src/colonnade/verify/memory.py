"""Memory that a step really takes, counted, beside what the planner said.

Flat buffers are asked for their sizes. Activations are found by watching every operator of one step: what it made and
somebody still holds (autograd, a chunk, a queue of weight gradients) when a unit is about to run or has run. That is a
few times slower than a plain step, so it is done in one step that is looked at closely.
"""

from collections.abc import Callable
from typing import TypeVar

from colonnade.planner.live import LiveTensors
from colonnade.planner.memory import Memory
from colonnade.planner.paper import taken, watched
from colonnade.train.state import TrainState

T = TypeVar("T")


def measure(state: TrainState, step: Callable[[], T]) -> tuple[T, Memory]:
    """Run `step`, one training step of this state; returns what it returns, and the memory that it took."""
    with LiveTensors() as live, watched(state, live) as watch:
        result = step()
    return result, taken(state, watch)


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
