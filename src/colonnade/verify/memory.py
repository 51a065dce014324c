"""Memory that a step really takes, counted, beside what the planner said.

Flat buffers are asked for their sizes. Activations are found by watching every operator of one step: what it made and
somebody still holds (autograd, a chunk, a queue of weight gradients) when a unit is about to run or has run. That is a
few times slower than a plain step, so it is done in one step that is looked at closely.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from colonnade.planner.memory import Memory
from colonnade.train.state import TrainState

T = TypeVar("T")


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operators have made while it is on and that somebody still holds.

    A view counts nothing, its storage once; what is freed no longer counts. Bytes are counted under the label that was
    set when they were made.
    """

    def __init__(self, label: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.label, self.bytes = label, Counter[str]()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_iter(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self._count(x.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size, label = storage._cdata, storage.nbytes(), self.label
        if key in self._storages:
            return

        def gone(_: Any) -> None:
            del self._storages[key]
            self.bytes[label] -= size

        self.bytes[label] += size
        self._storages[key] = weakref.ref(storage, gone)


def measure(state: TrainState, step: Callable[[], T]) -> tuple[T, Memory]:
    """Run `step`, one training step of this state; returns what it returns, and the memory that it took."""
    with LiveTensors() as live, _watched(state, live) as watch:
        result = step()
    return result, watch.memory()


def memory_table(predicted: Memory, measured: Memory) -> str:
    """Both, a line for each kind of memory, in MB (10⁶ bytes)."""
    rows = [
        ("parameters", predicted.parameters, measured.parameters),
        ("gradients", predicted.gradients, measured.gradients),
        ("master weights and moments", predicted.optimizer, measured.optimizer),
        ("whole for a while, or sent", predicted.buffers, measured.buffers),
        ("activations", predicted.activations, measured.activations),
        ("together, at most", predicted.total, measured.total),
    ]
    if predicted.host or measured.host:
        rows.append(("in CPU memory", predicted.host, measured.host))
    return "\n".join([f"{'MB':<28}{'predicted':>14}{'measured':>14}", *(_row(*row) for row in rows)])


def _row(name: str, predicted: int, measured: int) -> str:
    return f"{name:<28}{predicted / 1e6:>14,.3f}{measured / 1e6:>14,.3f}"


class _Watch:
    """Stands before a stage's owner: looks at what is alive whenever a chunk asks it for something."""

    def __init__(self, state: TrainState, live: LiveTensors) -> None:
        self.state, self.live = state, live
        self.activations = self.buffers = 0
        self._always = self._whole()

    def expect(self, uses: Sequence[str]) -> None:
        with self._look():
            self.state.ownership.expect(uses)

    def acquire(self, unit: str, *, gradients: bool) -> None:
        with self._look():
            self.state.ownership.acquire(unit, gradients=gradients)

    def release(self, unit: str) -> None:
        with self._look():
            self.state.ownership.release(unit)

    def open(self, unit: str) -> None:
        with self._look():
            self.state.ownership.open(unit)

    def gradients_ready(self, unit: str, *, last: bool) -> None:
        with self._look():
            self.state.ownership.gradients_ready(unit, last=last)

    @contextmanager
    def _look(self) -> Iterator[None]:
        self.live.label = "buffers"
        yield
        self.live.label = "activations"
        self.activations = max(self.activations, self.live.bytes["activations"])
        self.buffers = max(self.buffers, self._whole() - self._always + self.live.bytes["buffers"])

    def _whole(self) -> int:
        return _bytes(buffer for unit in self.state.units for buffer in (unit.parameters, unit.gradients))

    def memory(self) -> Memory:
        """What is held between steps, and the most that came on top of it."""
        units, kept = self.state.units, self.state.optimizer_state
        parameters = [buffer for unit in units for buffer in (unit.parameters, unit.shard)]
        gradients = [buffer for unit in units for buffer in (unit.gradients, unit.reduced)]
        rule = [unit.master for unit in units] + [flat for state in kept for flat in state.values()]
        offloaded = any(unit.storage.offload for unit in units)
        brought = [unit.applied for unit in units] if offloaded else []
        apart = _bytes([*parameters, *gradients, *rule, *brought]) - _bytes(parameters) - _bytes(gradients)
        return Memory(
            parameters=_bytes(parameters),
            gradients=_bytes(gradients),
            optimizer=0 if offloaded else apart,
            buffers=self.buffers,
            activations=self.activations,
            host=apart if offloaded else 0,
        )


@contextmanager
def _watched(state: TrainState, live: LiveTensors) -> Iterator[_Watch]:
    """A step that runs within this is watched."""
    watch, runner = _Watch(state, live), state.runner
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


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory behind them, each storage once."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())
