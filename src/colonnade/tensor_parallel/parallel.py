"""How layers are cut and run on one rank: one object, handed to every layer.

It says how the residual stream lies over the ranks of a tp group, and how cut layers take from it and add to it:

                        all of it on each rank      cut along the sequence (sequence parallelism)
    the stream          [s, b, h]                   [s/tp, b, h]
    enter               f: copy_to                  gather_sequence
        forward             identity                    all-gather
        backward            all-reduce                  reduce-scatter
    leave               g: reduce_from              scatter_sequence
        forward             all-reduce                  reduce-scatter
        backward            identity                    all-gather

An all-reduce is a reduce-scatter and an all-gather, so both send the same; cut, the norms, dropouts and residual
additions between the layers are computed and kept once and not on every rank (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, section 4.2.2).

Where the stream is cut, every weight that works on it (norms, positions, biases behind a sum: those whose
`Placement.dim` is None) has seen this rank's part of the sequence alone, and its gradient is a partial sum over tp:
whoever reduces gradients has to add these up. Where it is whole, they are equal on all ranks of the group.
"""

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor
from torch.nn.functional import pad

from colonnade.kernels.choice import Products, usual
from colonnade.kernels.dropout import CurrentMasks
from colonnade.kernels.probe import Probe
from colonnade.kernels.products import WeightGradients
from colonnade.mesh.collectives import (
    Entrance,
    all_gather,
    copy_to,
    gather_sequence,
    reduce_from,
    scatter_sequence,
    start_all_gather,
)
from colonnade.mesh.mesh import Axis
from colonnade.mesh.transport import Pending


@dataclass(frozen=True)
class Parallel:
    """How the layers of one rank are cut and run."""

    tp: Axis
    sequence_parallel: bool = False
    """Between cut layers each rank of tp has its own part of the sequence alone."""
    recompute_attention: bool = False
    """Backward computes attention probabilities again."""
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    """When the weight gradients of linear layers are computed: shared by all layers of a rank."""
    adapter_masks: CurrentMasks = field(default_factory=CurrentMasks)
    """What adapters drop: shared by all layers of a rank."""
    products: Products = field(default_factory=usual)
    """Which kernels multiply matrices on a CPU: the same on all ranks."""
    probe: Probe = field(default_factory=Probe)
    """What reads activations at measured steps: shared by all layers of a rank."""

    def enter(self, x: Tensor) -> Tensor:
        """Of the stream, what every rank of a cut layer reads: [s/tp, b, h] or [s, b, h] -> [s, b, h]."""
        return gather_sequence(x, self.tp) if self.sequence_parallel else copy_to(x, self.tp)

    @cached_property
    def entrance(self) -> Entrance:
        """`enter`, for a layer that computes while the gradient of what entered is on its way back."""
        return Entrance(self.tp, self.sequence_parallel)

    def leave(self, y: Tensor) -> Tensor:
        """Partial sums, added up into the stream: [s, b, h] -> [s/tp, b, h] or [s, b, h]."""
        return scatter_sequence(y, self.tp) if self.sequence_parallel else reduce_from(y, self.tp)

    def gather(self, x: Tensor) -> Tensor:
        """All of the stream on every rank, no gradient: [s/tp, b, h] or [s, b, h] -> [s, b, h]."""
        return all_gather(x, self.tp) if self.sequence_parallel else x

    def start_gather(self, x: Tensor) -> tuple[Tensor, Pending]:
        """As `gather`: (where it will be, when)."""
        return start_all_gather(x, self.tp) if self.sequence_parallel else (x, Pending(None))

    def first_position(self, length: int) -> int:
        """The position with which this rank's `length` positions of the stream begin."""
        return self.tp.rank * length if self.sequence_parallel else 0

    def pad(self, tokens: Tensor) -> Tensor:
        """Tokens [s, b] with as many zeros behind as let the stream be cut evenly."""
        return pad(tokens, (0, 0, 0, -len(tokens) % self.tp.size)) if self.sequence_parallel else tokens
