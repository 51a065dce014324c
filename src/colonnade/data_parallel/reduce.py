"""Sums gradients over dp while backward still runs.

    backward:   head ── blocks.11 ── blocks.10 ── …  ── blocks.0 ── embedding
                    └▶ all-reduce └▶ all-reduce             each unit's flat gradients, started when backward leaves it

Where the transport carries it in the background (gloo, NCCL), a sum goes on while backward does; shared memory has it
done when the call returns.

Backward has left a unit when the gradient of the unit's input is known: then every weight of the unit has had its say.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.data_parallel.buckets import FlatUnit
from colonnade.mesh.autograd import apply
from colonnade.mesh.collectives import all_reduce_
from colonnade.mesh.mesh import Axis
from colonnade.mesh.transport import Pending


class _Boundary(torch.autograd.Function):
    """The identity; going back, it tells that a unit is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.passed()
        return grad, None


class GradientReducer:
    """Starts a unit's all-reduce over dp when its gradients of the last micro-batch are there."""

    def __init__(self, modules: dict[str, nn.Module], units: list[FlatUnit], dp: Axis) -> None:
        self.units, self.dp = units, dp
        self._armed = False
        self._pending: dict[str, Pending] = {}
        for unit in units:
            if unit.name != "embedding":  # its input has no gradient: it is reduced last, by `finish`
                modules[unit.name].register_forward_pre_hook(self._hook(unit))

    def _hook(self, unit: FlatUnit) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def mark_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not self._armed:
                return None
            return apply(_Boundary, args[0], lambda: self._start(unit)), *args[1:]

        return mark_input

    def _start(self, unit: FlatUnit) -> None:
        assert unit.name not in self._pending, f"backward left {unit.name} twice in one micro-batch"
        self._pending[unit.name] = all_reduce_(unit.gradients, self.dp)

    def arm(self) -> None:
        """The micro-batch that comes is the step's last: reduce as its backward goes."""
        self._armed = True

    def finish(self) -> None:
        """Reduce what is left and wait: afterwards every rank has the sum over dp of every gradient."""
        for unit in self.units:
            if unit.name not in self._pending:
                self._start(unit)
        for pending in self._pending.values():
            pending.wait()
        self._pending.clear()
        self._armed = False
