"""Flat buffers: each unit of the model (an embedding, a block, a head) keeps its numbers in a few long tensors.

    parameters   compute type    what the layers multiply with; each weight is a view of it
    gradients    fp32 (fp64)     each weight's `.grad` is a view of it: micro-batches add up here, dp sums it in one
    collective
    master       fp32 (fp64)     what the optimizer updates; the parameters themselves unless they are 16-bit

Within a unit, weights are laid out in segments of one kind, so that the optimizer and the gradient norm work on a few
long
slices:  [ decayed, cut over tp | decayed, replicated | not decayed, cut | not decayed, replicated ]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from colonnade.mesh.mesh import Axis
from colonnade.tensor_parallel.placement import Placement, placements

_ALIGNMENT = 16  # elements: every weight starts on a cache line


@dataclass(frozen=True)
class Slot:
    """Where a weight lies in its unit's buffers."""

    placement: Placement
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.placement.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The weight's part of a flat buffer, in the weight's shape."""
        return flat[self.start : self.stop].view(self.placement.parameter.shape)


@dataclass(frozen=True)
class Segment:
    """A stretch of a unit's buffers whose weights are treated alike."""

    start: int
    stop: int
    decayed: bool
    """Whether weight decay applies: to matrices, not to biases and norms."""
    cut: bool
    """Whether each tp rank has a part of its own (else all have the same)."""


class FlatUnit:
    """The flat buffers of one unit, and where its weights lie in them. Takes the weights over: they become views."""

    def __init__(
        self, name: str, module: nn.Module, tp: Axis, *, dtype: torch.dtype, device: torch.device, owned: set[int]
    ) -> None:
        self.name = name
        mine = [place for place in placements(module, tp) if id(place.parameter) not in owned]
        owned.update(id(place.parameter) for place in mine)
        self.slots, self.segments, size = _lay_out(mine)
        exact = torch.promote_types(dtype, torch.float32)
        self.master = torch.zeros(size, dtype=exact, device=device)
        self.gradients = torch.zeros_like(self.master)
        self.parameters = self.master if exact == dtype else torch.zeros_like(self.master, dtype=dtype)
        for slot in self.slots:
            self._adopt(slot)
        self.publish()

    def _adopt(self, slot: Slot) -> None:
        parameter = slot.placement.parameter
        slot.view(self.master).copy_(parameter.detach())
        parameter.data = slot.view(self.parameters)
        parameter.grad_dtype = self.gradients.dtype
        parameter.grad = slot.view(self.gradients)

    def publish(self) -> None:
        """Round the master weights into the parameters that the layers see (nothing to do where they are the same)."""
        if self.parameters is not self.master:
            self.parameters.copy_(self.master)


def flatten(units: dict[str, nn.Module], tp: Axis, *, dtype: torch.dtype, device: torch.device) -> list[FlatUnit]:
    """Flat buffers for every unit; a weight that two units share belongs to the first. Names keep the unit's prefix."""
    owned: set[int] = set()
    return [FlatUnit(name, unit, tp, dtype=dtype, device=device, owned=owned) for name, unit in units.items()]


def named_slots(units: list[FlatUnit]) -> Iterator[tuple[str, FlatUnit, Slot]]:
    """(logical weight name, unit, slot) of every weight."""
    for unit in units:
        for slot in unit.slots:
            yield f"{unit.name}.{slot.placement.name}", unit, slot


def _lay_out(places: list[Placement]) -> tuple[list[Slot], list[Segment], int]:
    def kind(place: Placement) -> tuple[bool, bool]:
        return place.parameter.ndim < 2, place.dim is None

    slots, segments, at = [], [], 0
    for (plain, whole), group in groupby(sorted(places, key=kind), key=kind):
        first = at
        for place in group:
            slots.append(Slot(place, at))
            at += -(-place.parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        segments.append(Segment(first, at, decayed=not plain, cut=not whole))
    return slots, segments, at
