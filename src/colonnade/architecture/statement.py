"""The statement of a model: units in the order of a forward pass, and the weights that they multiply with.

    unit            what runs at once: a pipeline cuts between units
    bucket          weights that are kept, gathered and summed together: those of one unit, or those that units share

Parameter counts, initial weights, cuts into stages, FLOPs, memory and traffic all derive from here. `families.py` has
the statement of every model; one test holds each of them against the modules that are built.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

_TILE = 128  # rows of a matrix product that are computed together


class Weight(NamedTuple):
    """One weight of the serial run."""

    name: str
    """Behind its bucket's name and a dot: the logical name."""
    shape: tuple[int, ...]
    """Without any layout or padding."""
    cut: int | None = None
    """The dim that tensor parallelism cuts; None: every rank has all of it."""
    std: float | None = None
    """[standard deviation] Of normal initial values; None: `fill` everywhere."""
    fill: float = 0.0
    is_vocabulary: bool = False
    """A row (or an element) a token: cut with padding."""
    groups: int | None = None
    """So many equal groups that stay whole: more ranks than groups have all of it, and use one group each."""
    is_partial: bool = False
    """Every rank has all of it and uses it for its own heads: gradients are partial sums over tp."""
    is_frozen: bool = False
    """It stays as it begins: no gradient, no optimizer state."""
    learning_rate: float = 1.0
    """[factor] On the run's."""
    weight_decay: float = 1.0
    """[factor] On the run's, where the weight has any."""

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    def is_shared(self, tp: int) -> bool:
        """Whether `tp` ranks all have it, though it is cut for fewer."""
        return self.groups is not None and tp > self.groups

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """On one of `tp` ranks, padding of the vocabulary included."""
        if self.cut is None or self.is_shared(tp):
            return self.shape
        length = self.shape[self.cut]
        local = vocab_rows_per_rank(length, tp) if self.is_vocabulary else length // tp
        return (*self.shape[: self.cut], local, *self.shape[self.cut + 1 :])


class Unit(NamedTuple):
    """What runs at once."""

    name: str
    kind: str
    """Units of one kind have the same shapes and take the same time; nobody asks which kind it is."""
    buckets: tuple[str, ...]
    """The buckets whose weights it multiplies with, in the order of the model."""
    multiply_adds: int
    """Of a forward pass, for each token of a full-length sample: matrix products and attention."""
    reads_tokens: bool = False
    """Whether it looks tokens up."""
    layer: int | None = None
    """Which block it is, from 0, counted through all stacks; None: it is none."""
    stack: int = 0
    """Which stack of blocks it belongs to, of models with several."""
    recomputes: bool = False
    """Whether parallel.recompute = "full" computes it again in backward."""
    length: int = 0
    """[tokens of a sample] Of the stream that it works on."""
    takes: tuple[int, ...] = ()
    """[tokens of a sample] Of each stream that it takes from the unit before it; () begins the model."""
    sublayers: tuple["Sublayer", ...] = ()
    """Of a block."""
    losses: tuple[str, ...] = ()
    """Names of the losses with which it ends the model; it adds to its weights' gradients in forward already."""
    has_backward: bool = True
    """Whether something in it, or before it, is trained."""
    sends_back: bool = True
    """Whether something before it is trained, so that it hands on gradients of what it takes."""

    def other_kind(self, what: object) -> str:
        """Of such units that differ in what is trained, adapted or mapped to a teacher's states: by `what`."""
        return f"{self.kind}, {what}"

    @property
    def usual_kind(self) -> str:
        """The kind that it has where all of the model is trained, and nothing added: without `other_kind`."""
        return self.kind.partition(", ")[0]

    @property
    def is_first(self) -> bool:
        """Whether the model begins with it."""
        return not self.takes

    @property
    def is_loss(self) -> bool:
        """Whether the model ends with it."""
        return bool(self.losses)

    def tokens_of(self, weight: str) -> int:
        """[tokens of a sample] That one of its matrices multiplies with: keys and values may be of a second stream."""
        of_memory = (part.memory for part in self.sublayers if part.memory and weight.startswith(f"{part.name}.key_"))
        return next(of_memory, self.length)


class Sublayer(NamedTuple):
    """A norm, a layer cut by columns and one cut by rows, with the residual around them."""

    name: str
    """What the names of its weights begin with; its norm's with this and _norm."""
    memory: int = 0
    """[tokens of a sample] Of a second stream, of which keys and values are made; 0: they are of its own."""


class Adapters(NamedTuple):
    """What low-rank adapters have in common."""

    rank: int
    scale: float
    """[factor] On B A x."""
    dropout: float
    """[probability] Of what they read."""


@dataclass(frozen=True)
class Architecture:
    """A whole model."""

    units: tuple[Unit, ...]
    buckets: Mapping[str, tuple[Weight, ...]]
    """Each once, in the order of the model. Buckets without weights are left out."""
    adapters: Adapters | None = None
    """Of every module with weights lora_a and lora_b; None: there are none."""

    @property
    def unit_names(self) -> list[str]:
        return [unit.name for unit in self.units]

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the losses with which it ends."""
        return tuple(loss for unit in self.units for loss in unit.losses)

    @property
    def num_parameters(self) -> int:
        """Over all ranks, without padding, each weight once."""
        return sum(weight.size for weights in self.buckets.values() for weight in weights)

    @property
    def num_trained(self) -> int:
        """Parameters that are not frozen."""
        return sum(weight.size for weight in self.weights().values() if not weight.is_frozen)

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward, for one token of a full-length sample.

        Recomputed work does not count (model FLOPs, not hardware FLOPs); looking an embedding up costs nothing.
        """
        return sum(map(self.flops_of, self.units))

    def flops_of(self, unit: Unit) -> float:
        """A unit's share of `flops_per_token`: two operations a multiply-add, and backward costs twice the forward,
        less the weight gradients of what is frozen; below all that is trained, there is no backward.
        """
        backward = 2 * unit.multiply_adds - self._frozen_multiply_adds(unit) if unit.has_backward else 0
        return 2.0 * (unit.multiply_adds + backward)

    def _frozen_multiply_adds(self, unit: Unit) -> int:
        """Those with weights that are frozen."""
        buckets = unit.buckets if unit.is_loss else [name for name in unit.buckets if name == unit.name]
        frozen = (weight for name in buckets for weight in self.buckets[name] if weight.is_frozen)
        tokens = sum(weight.size * unit.tokens_of(weight.name) for weight in frozen if len(weight.shape) == 2)
        return min(tokens // max(1, self.units[0].length), unit.multiply_adds)

    def weights(self) -> dict[str, Weight]:
        """Every weight by its logical name."""
        return {f"{name}.{weight.name}": weight for name, weights in self.buckets.items() for weight in weights}

    def parameters_of(self, unit: Unit) -> int:
        """Those that a unit computes with. What units share counts in each of them: each stage holds it."""
        return sum(weight.size for bucket in unit.buckets for weight in self.buckets[bucket])

    def named(self, names: Iterable[str]) -> list[Unit]:
        """The units of these names, in the order of the names."""
        units = {unit.name: unit for unit in self.units}
        return [units[name] for name in names]

    def weights_of_loss(self) -> set[str]:
        """Names of those that the unit which ends the model has for itself."""
        shared = self.shared_buckets()
        own = (bucket for unit in self.units if unit.is_loss for bucket in unit.buckets if bucket not in shared)
        return {f"{bucket}.{weight.name}" for bucket in own for weight in self.buckets[bucket]}

    def shared_buckets(self) -> list[str]:
        """Those that more than one unit multiplies with."""
        return [name for name in self.buckets if sum(name in unit.buckets for unit in self.units) > 1]


def vocab_rows_per_rank(vocab_size: int, tp: int) -> int:
    """Rows of a rank's shard of a vocabulary: v/tp rounded up, and up to a multiple of 128 (whole tiles of a matrix
    product) where that pads by less than 1/8.
    """
    rows = -(-vocab_size // tp)
    return rows if rows < 1024 else -(-rows // _TILE) * _TILE
