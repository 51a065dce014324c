"""A chunk: consecutive units of the model that a stage runs as one action, forward and backward.

    forward     x ──▶ unit ──┤ cut ├──▶ unit ──┤ cut ├──▶ … ──▶ y          the graph is cut between units, so that
    backward    dx ◀── unit ◀──────── unit ◀──────── … ◀── dy              whoever owns weights can act between them

Autograd works within a unit only; from unit to unit the gradient is handed on here. That makes every moment explicit at
which weights must be there, gradients are complete, or activations are computed a second time: no hooks.

Recomputation (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016): of a group of units only the input
is kept, and backward runs the group forward once more. Masks are pure functions, so no generator is rewound.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from colonnade.mesh.autograd import apply

HEAD = "head"


class Queue(Protocol):
    """Weight gradients that wait to be computed."""

    def run(self) -> None: ...


class WeightGradients(Protocol):
    """What can put weight gradients off."""

    def deferred(self) -> AbstractContextManager[Queue]: ...


class Model(Protocol):
    """What runs a unit."""

    def run(self, name: str, x: Tensor | None, inputs: Any) -> Tensor: ...


class Owner(Protocol):
    """What has a unit's weights there in time, and takes its gradients."""

    def expect(self, uses: Sequence[str]) -> None: ...
    def acquire(self, unit: str, *, gradients: bool) -> None: ...
    def release(self, unit: str) -> None: ...
    def open(self, unit: str) -> None: ...
    def left(self, unit: str, *, last: bool) -> None: ...


@dataclass
class _Passed:
    """A group of units that a micro-batch has passed, on its way back to be undone."""

    units: Sequence[str]
    entry: Tensor | None
    """What went in, a leaf of the graph; None into the embedding."""
    out: Tensor | None
    """What came out, with its graph; None where it will be computed again."""


class Chunk:
    """Some consecutive units, and what backward needs of the micro-batches that are between forward and backward."""

    def __init__(
        self,
        units: Sequence[str],
        model: Model,
        owner: Owner,
        *,
        weight_gradients: WeightGradients | None = None,
        recompute_every: int = 0,
    ) -> None:
        """`weight_gradients`: what the model's linear layers were built with, where backward will be split.

        `recompute_every`: compute blocks again in backward, in groups of so many; 0: keep everything.
        """
        self.units, self.model, self.owner, self.weight_gradients = list(units), model, owner, weight_gradients
        self.groups = list(_groups(self.units, recompute_every))
        self._passed: dict[int, list[_Passed]] = {}
        self._put_off: dict[int, list[tuple[str, Queue]]] = {}

    def uses(self, kind: str) -> list[str]:
        """The units that an action of this kind acquires, in their order."""
        if kind == "F":
            return self.units
        return [unit for group, again in reversed(self.groups) for unit in [*(group if again else []), *group[::-1]]]

    def forward(self, microbatch: int, x: Tensor | None, inputs: Any) -> Tensor:
        """[s, b, h] (None into the embedding) -> [s, b, h], without graph; the head: the micro-batch's loss []."""
        self._passed[microbatch] = []
        for group, again in self.groups:
            entry = _leaf(x)
            if again:
                with torch.no_grad():
                    passed = [_Passed(group, entry, None)]
                    x = entry
                    for unit in group:
                        x = self._run(unit, x, inputs)
            else:
                passed = self._pass(group, entry, inputs)
                x = passed[-1].out
            self._passed[microbatch] += passed
        assert x is not None, "a chunk has a unit"
        return x.detach()

    def backward(
        self, microbatch: int, grad: Tensor | None, inputs: Any, *, last: bool, split: bool = False
    ) -> Tensor | None:
        """The gradient of what `forward` returned (None for a loss) -> that of what it took (None for the embedding).

        `last`: no later micro-batch adds to these weights' gradients. `split`: leave the weight gradients of linear
        layers to `weights`.
        """
        groups = self._passed.pop(microbatch)
        while groups:  # popped one by one, so that what a unit kept is freed as soon as it is done
            passed = groups.pop()
            again = [passed] if passed.out is not None else self._pass(passed.units, passed.entry, inputs)
            del passed
            while again:
                grad = self._back_through(again, microbatch, grad, last=last, split=split)
        return grad

    def _back_through(
        self, passed: list[_Passed], microbatch: int, grad: Tensor | None, *, last: bool, split: bool
    ) -> Tensor | None:
        """Undo the last of `passed`, and take it off."""
        (unit,) = passed[-1].units
        with self._put_off_if(split) as queue:
            grad = self._undo(passed.pop(), grad)
        if queue is None:
            self.owner.left(unit, last=last)
        else:
            self._put_off.setdefault(microbatch, []).append((unit, queue))
        return grad

    def _put_off_if(self, split: bool) -> AbstractContextManager[Queue | None]:
        assert self.weight_gradients is not None or not split, "only what was built to wait can be put off"
        return self.weight_gradients.deferred() if split and self.weight_gradients else nullcontext()

    def weights(self, microbatch: int, *, last: bool) -> None:
        """The weight gradients that a split `backward` has put off."""
        for unit, queue in self._put_off.pop(microbatch):
            self.owner.open(unit)
            queue.run()
            self.owner.left(unit, last=last)

    @torch.no_grad()
    def infer(self, x: Tensor | None, inputs: Any) -> Tensor:
        """The stream after the chunk's last unit but a head, nothing kept: [s, b, h] -> [s, b, h]."""
        units = [unit for unit in self.units if unit != HEAD]
        for unit in units:
            self.owner.acquire(unit, gradients=False)
            x = self.model.run(unit, x, inputs)
            self.owner.release(unit)
        assert x is not None, "the first chunk has the embedding"
        return x

    def _pass(self, units: Sequence[str], entry: Tensor | None, inputs: Any) -> list[_Passed]:
        """Run units one by one, keeping the graph of each."""
        passed: list[_Passed] = []
        for unit in units:
            with torch.enable_grad():
                out = self._run(unit, entry, inputs)
            passed.append(_Passed([unit], entry, out))
            entry = _leaf(out)
        return passed

    def _run(self, unit: str, x: Tensor | None, inputs: Any) -> Tensor:
        self.owner.acquire(unit, gradients=unit == HEAD)  # the head adds to its weight's gradient in forward already
        out = self.model.run(unit, x, inputs)
        self.owner.release(unit)
        return out

    def _undo(self, passed: _Passed, grad: Tensor | None) -> Tensor | None:
        (unit,) = passed.units
        assert passed.out is not None, "recomputed by now"
        self.owner.acquire(unit, gradients=True)
        start = passed.out if grad is None else apply(_Start, passed.out, grad)
        torch.autograd.backward(start)
        self.owner.release(unit)
        return None if passed.entry is None else passed.entry.grad


class _Start(torch.autograd.Function):
    """A number that nobody reads; its backward hands `grad` to x. (`x.backward(grad)` does the same, and loads SymPy to
    compare two shapes: 35 MB and the better part of a second for every rank.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, unread: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def _leaf(x: Tensor | None) -> Tensor | None:
    """x as the start of a graph of its own."""
    return None if x is None else x.detach().requires_grad_()


def _groups(units: Sequence[str], every: int) -> Iterator[tuple[list[str], bool]]:
    """(units, whether they are recomputed): the embedding and the head never are, for they keep next to nothing."""
    blocks = [unit for unit in units if unit.startswith("blocks.")]
    recomputed = {blocks[at]: blocks[at : at + every] for at in range(0, len(blocks), every)} if every else {}
    inside = {unit for group in recomputed.values() for unit in group}
    for unit in units:
        if unit in recomputed:
            yield recomputed[unit], True
        elif unit not in inside:
            yield [unit], False
