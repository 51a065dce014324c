"""A chunk: consecutive units of the model that a stage runs as one action, forward and backward.

    forward     x ──▶ unit ──┤ cut ├──▶ unit ──┤ cut ├──▶ … ──▶ y          the graph is cut between units, so that
    backward    dx ◀── unit ◀──────── unit ◀──────── … ◀── dy              whoever owns weights can act between them

Autograd works within a unit only; from unit to unit the gradient is handed on here. That makes every moment explicit at
which weights must be there, gradients are complete, or activations are computed a second time: no hooks. x and y are
carries: tuples of tensors (`carry.py`).

Recomputation (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016): of a group of units only the input
is kept, and backward runs the group forward once more. Masks are pure functions, so no generator is rewound.

Where nothing is trained in a unit or before it, there is no backward: nothing is kept, and gradients end behind it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from colonnade.architecture.statement import Unit
from colonnade.pipeline.carry import Carry, Gradients, backward_from, gradients_or_zeros, leaves
from colonnade.pipeline.recompute import groups


class Queue(Protocol):
    """Weight gradients that wait to be computed."""

    def run(self) -> None: ...


class WeightGradients(Protocol):
    """What can defer weight gradients."""

    def deferred(self) -> AbstractContextManager[Queue]: ...


class Model(Protocol):
    """What runs units, given what crosses between them and what they read besides, of one micro-batch."""

    def run(self, unit: str, carry: Carry, inputs: Any) -> Carry:
        """What `unit` hands on. The first unit takes nothing, (); the last returns the loss, ([],)."""
        ...

    def carry_buffers(self, inputs: Any, into: str) -> Carry:
        """Memory for what unit `into` takes: the shapes and dtypes of the carry at any place of the model."""
        ...


class Owner(Protocol):
    """What has a unit's weights there in time, and takes its gradients."""

    def expect(self, uses: Sequence[str]) -> None: ...
    def acquire(self, unit: str, *, gradients: bool) -> None: ...
    def release(self, unit: str) -> None: ...
    def open(self, unit: str) -> None: ...
    def gradients_ready(self, unit: str, *, last: bool) -> None: ...


@dataclass
class _Passed:
    """A group of units that a micro-batch has passed, and whose backward is to come."""

    units: Sequence[Unit]
    entry: Carry
    """What went in: leaves of the graph."""
    out: Carry
    """What came out, with its graph; () where it will be computed again."""


class Chunk:
    """Some consecutive units, and what backward needs of the micro-batches that are between forward and backward."""

    def __init__(
        self,
        units: Sequence[Unit],
        model: Model,
        owner: Owner,
        *,
        weight_gradients: WeightGradients | None = None,
        recompute_every: int = 0,
    ) -> None:
        """`weight_gradients`: what the model's linear layers were built with, where backward will be split.

        `recompute_every`: compute units that may be again in backward, in groups of so many; 0: keep everything.
        """
        self.units, self.model, self.owner, self.weight_gradients = list(units), model, owner, weight_gradients
        self.groups = groups(self.units, recompute_every)
        self._passed: dict[int, list[_Passed]] = {}
        self._deferred: dict[int, list[tuple[Unit, Queue]]] = {}

    def uses(self, kind: str) -> list[str]:
        """The names of the units that an action of this kind acquires, in their order."""
        if kind == "F":
            return [unit.name for unit in self.units]
        every = [unit for group, again in reversed(self.groups) for unit in [*(group if again else []), *group[::-1]]]
        return [unit.name for unit in every if unit.has_backward]

    def begin(self) -> None:
        """Before the first micro-batch of a step: let go of those of a step that was broken off."""
        self._passed.clear()
        self._deferred.clear()

    def forward(self, microbatch: int, carry: Carry, inputs: Any) -> Carry:
        """What goes into the chunk -> what comes out of it, without graph: the carry, or the micro-batch's loss []."""
        self._passed[microbatch] = []
        for group, again in self.groups:
            entry = leaves(carry, gradients=group[0].sends_back)
            if again or not group[0].has_backward:
                passed = [_Passed(group, entry, ())] if again else []
                carry = self._run_only(group, entry, inputs)
            else:
                passed = self._pass(group, entry, inputs)
                carry = passed[-1].out
            self._passed[microbatch] += passed
        return tuple(x.detach() for x in carry)

    def backward(
        self, microbatch: int, gradients: Gradients | None, inputs: Any, *, last: bool, split: bool = False
    ) -> Gradients:
        """The gradients of what `forward` returned (None: it was the loss) -> those of what it took.

        `last`: no later micro-batch adds to these weights' gradients. `split`: leave the weight gradients of linear
        layers to `weights`.
        """
        passed_groups = self._passed.pop(microbatch)
        entry = passed_groups[0].entry
        while passed_groups:  # popped one by one, so that what a unit kept is freed as soon as it is done
            passed = passed_groups.pop()
            again = [passed] if passed.out else self._pass(passed.units, passed.entry, inputs)
            del passed
            while again:
                gradients = self._back_through(again, microbatch, gradients, last=last, split=split)
        assert gradients is not None, "a chunk has a unit with a backward"
        return gradients_or_zeros(entry, gradients)

    def _back_through(
        self, passed: list[_Passed], microbatch: int, gradients: Gradients | None, *, last: bool, split: bool
    ) -> Gradients:
        """Backward through the last of `passed`, which is taken off."""
        (unit,) = passed[-1].units
        with self._deferred_if(split) as queue:
            gradients = self._backward_of(passed.pop(), gradients)
        if queue is None:
            self.owner.gradients_ready(unit.name, last=last)
        else:
            self._deferred.setdefault(microbatch, []).append((unit, queue))
        return gradients

    def _deferred_if(self, split: bool) -> AbstractContextManager[Queue | None]:
        assert self.weight_gradients is not None or not split, "only what was built to wait can be deferred"
        return self.weight_gradients.deferred() if split and self.weight_gradients else nullcontext()

    def weights(self, microbatch: int, *, last: bool) -> None:
        """Compute the weight gradients that a split `backward` has deferred."""
        for unit, queue in self._deferred.pop(microbatch, []):
            self.owner.open(unit.name)
            queue.run()
            self.owner.gradients_ready(unit.name, last=last)

    @torch.no_grad()
    def infer(self, carry: Carry, inputs: Any) -> Carry:
        """What comes out of the chunk's last unit that is not the loss; nothing is kept."""
        for unit in self.units:
            if not unit.is_loss:
                self.owner.acquire(unit.name, gradients=False)
                carry = self.model.run(unit.name, carry, inputs)
                self.owner.release(unit.name)
        return carry

    @torch.no_grad()
    def _run_only(self, units: Sequence[Unit], carry: Carry, inputs: Any) -> Carry:
        """Run units, keeping nothing."""
        for unit in units:
            carry = self._run(unit, carry, inputs)
        return carry

    def _pass(self, units: Sequence[Unit], entry: Carry, inputs: Any) -> list[_Passed]:
        """Run units one by one, keeping the graph of each."""
        passed: list[_Passed] = []
        for unit in units:
            with torch.enable_grad():
                out = self._run(unit, entry, inputs)
            passed.append(_Passed([unit], entry, out))
            entry = leaves(out)  # what comes behind a unit with a backward sends back
        return passed

    def _run(self, unit: Unit, carry: Carry, inputs: Any) -> Carry:
        self.owner.acquire(unit.name, gradients=unit.is_loss)  # it adds to its weights' gradients in forward already
        out = self.model.run(unit.name, carry, inputs)
        self.owner.release(unit.name)
        return out

    def _backward_of(self, passed: _Passed, gradients: Gradients | None) -> Gradients:
        (unit,) = passed.units
        self.owner.acquire(unit.name, gradients=True)
        backward_from(passed.out, gradients)
        self.owner.release(unit.name)
        return tuple(x.grad for x in passed.entry)
