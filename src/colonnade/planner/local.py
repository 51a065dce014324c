"""What one rank has of a bucket's weights, and how those that are trained lie in its flat buffers. Pure."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

from colonnade.architecture.statement import Weight
from colonnade.data_parallel.lengths import weights_length


class Kind(NamedTuple):
    """Trained weights of one kind lie side by side: matrices before vectors, within those what is cut first, partial
    sums last; and then by factors.
    """

    is_vector: bool
    is_replicated: bool
    """Over tp: other ranks have the same elements."""
    is_partial: bool
    """All ranks of tp have it, and each uses a shard: gradients are partial sums."""
    learning_rate: float
    weight_decay: float


class Local(NamedTuple):
    """One weight on one rank."""

    size: int
    """[elements]"""
    is_frozen: bool
    kind: Kind


def local(weight: Weight, tp: int) -> Local:
    shared = weight.is_shared(tp)
    is_replicated = weight.cut is None or shared
    factors = weight.learning_rate, weight.weight_decay
    kind = Kind(len(weight.shape) < 2, is_replicated, weight.is_partial or shared, *factors)
    return Local(prod(weight.local_shape(tp)), weight.is_frozen, kind)


def ranges(weights: Sequence[Local]) -> Iterator[tuple[Kind, int, int]]:
    """(kind, from where, to where) in a bucket's buffers."""
    start = 0
    for kind, members in groupby(sorted(weights, key=lambda w: w.kind), key=lambda w: w.kind):
        length = weights_length(weight.size for weight in members)
        yield kind, start, start + length
        start += length
