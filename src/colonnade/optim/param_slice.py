"""What an optimizer is handed: slices of flat buffers, cut anywhere.

    flat buffer of a rank (or its ZeRO slice):   [ w3 w3 w3 w3 | w4 w4 w4 w4 | …5 w5 | w6 w6 w6… ]
    slices, each of one kind:                      decayed, cut over tp        decayed    not decayed
    ranges of the first slice:                     (3, 0:4)  (4, 4:8)

An optimizer steps through slices alone. Which rank has which is the caller's affair: where a rule needs a number of a
whole weight, it hands its partial sums to the caller's `total` and gets the sums over all ranks back.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Watch = Callable[["ParamSlice"], AbstractContextManager[None]]
"""Entered around the change of a slice's weights."""
Total = Callable[[Tensor], Tensor]
"""Sums a float64 tensor over the ranks that have shards of the same weights; the identity where weights are not cut."""


def unwatched(params: "ParamSlice") -> AbstractContextManager[None]:
    """A `Watch` that sees nothing."""
    return nullcontext()


State = Mapping[str, Tensor]
"""What a rule keeps for every element of the weights, by name: tensors as long as the weights."""


def state_at(state: State, at: slice) -> dict[str, Tensor]:
    """The state of some of the weights: views."""
    return {name: tensor[at] for name, tensor in state.items()}


@dataclass(frozen=True)
class ParamSlice:
    """A range of weights that are treated alike: 1-D views, all equally long, on one device."""

    weights: Tensor
    """fp32 or fp64: master weights."""
    gradients: Tensor
    state: State
    """The rule's own, of these weights: views of what `Optimizer.init` made."""
    decayed: bool
    """Whether weight decay applies: to matrices, not to biases and norms."""
    counted: bool = True
    """Whether this rank's sums enter the total. False where another rank has the same range and counts it: of what
    tp ranks hold alike, tp rank 0 counts."""
    ranges: Sequence[tuple[int, slice]] = ()
    """Each weight, or what of it lies here: its number, which is the same on all ranks, and where in the slice it is.
    What no range covers is padding, zero. An undecayed slice needs none."""
    learning_rate: float = 1.0
    """[factor] On the run's."""
    weight_decay: float = 1.0
    """[factor] On the run's, where it applies."""
    part: str = ""
    """What the weights are of, for reports."""
    copied_to: Tensor | None = None
    """Where layers read the weights, if not there: 16 bits, or another device's memory, as long as they are."""
    compiled: bool = False
    """Whether a rule may use compiled kernels."""


def copy_to_layers(slices: Sequence[ParamSlice]) -> None:
    """Have the weights in `copied_to`, of slices that have it."""
    kept = [(each.copied_to, each.weights) for each in slices if each.copied_to is not None]
    if kept:
        torch._foreach_copy_([layers for layers, _ in kept], [weights for _, weights in kept])


class Optimizer(Protocol):
    """A rule and its constants. It says what it keeps for each weight; the caller keeps it, and saves it by name."""

    def init(self, weights: Tensor) -> dict[str, Tensor]:
        """The state before step 1 of 1-D weights [n]: tensors [n] on their device, by name."""
        ...

    def update_(
        self,
        slices: Sequence[ParamSlice],
        *,
        step: int,
        learning_rate: float,
        factor: Tensor,
        num_weights: int,
        total: Total,
        watch: Watch = unwatched,
    ) -> None:
        """Step `step` (from 1) on all of a rank's slices, in place; their new weights are in `copied_to` too.

        Gradients are multiplied by `factor` ([]: clipping, unscaling) first; what is in their memory afterwards is the
        rule's affair. Weights are numbered below `num_weights`. `total` is called once or never, by all ranks alike;
        `watch` once for each slice.
        """
        ...
