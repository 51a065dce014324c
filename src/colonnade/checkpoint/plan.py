"""Who writes which box of which tensor, and who reads what from where. Pure: integers in, integers out.

A checkpoint knows *logical* tensors: the weights of the serial run, without padding. A rank holds *boxes* of them:

    embedding.tokens.weight [v, h]          tp 0 holds rows 0 … v/2          Box((0, 0), (v/2, h))
                                            tp 1 holds the others            Box((v/2, 0), (v/2, h))
                                            dp copies hold equal boxes: each writes some of the rows

A rank that owns a range of a flattened shard (ZeRO) holds the few boxes that make it up. Reading under another layout
intersects the boxes that are wanted with the boxes that were written.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

K = TypeVar("K", bound=Hashable)
FINENESS = 16  # what several ranks hold is cut into parts of at most this fraction of an even share …
SMALLEST_PART = 1 << 14  # … unless they had fewer bytes than this
PRIME = (1 << 61) - 1


class Box(NamedTuple):
    """An axis-aligned part of a tensor: where it starts, and its size, in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.sizes, strict=True)) + "]"


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a logical tensor: `data` is its box that starts at `offsets`."""

    name: str
    shape: tuple[int, ...]
    """Of the whole logical tensor."""
    offsets: tuple[int, ...]
    data: Tensor

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.offsets) == self.data.dim(), f"{self.name}: dims of shape, offsets and data"
        ends = (o + n for o, n in zip(self.offsets, self.data.shape, strict=True))
        inside = all(o >= 0 and end <= n for o, end, n in zip(self.offsets, ends, self.shape, strict=True))
        assert inside, f"{self.name}: box {self.box} must lie within {list(self.shape)}"

    @property
    def box(self) -> Box:
        return Box(tuple(self.offsets), tuple(self.data.shape))


def overlap(a: Box, b: Box) -> Box | None:
    """The box that both contain, or None. A tensor of no dims is one box, which overlaps itself."""
    starts = tuple(map(max, a.offsets, b.offsets))
    a_ends, b_ends = (tuple(o + n for o, n in zip(*box, strict=True)) for box in (a, b))
    sizes = tuple(min(ends) - start for start, *ends in zip(starts, a_ends, b_ends, strict=True))
    return Box(starts, sizes) if all(n > 0 for n in sizes) else None


def relative(inner: Box, outer: Box) -> Box:
    """`inner` as seen from the start of `outer`."""
    return Box(tuple(i - o for i, o in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


def tile(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether the boxes cover the tensor, each element once. Linear in the number of boxes; wrong once in 2⁵⁰.

    Element (i, j, …) weighs a_i · b_j · …, with random weights. A box then weighs a product of differences of their
    sums, (A(end) - A(start)) · (B(end) - B(start)) · …, and the boxes weigh as much as the whole tensor if each element
    is in one of them; if not, then by chance only (Schwartz and Zippel). The sums are drawn where they are needed.
    """
    weigh = _Scales(len(shape))
    return sum(map(weigh.box, boxes)) % PRIME == weigh.box(Box((0,) * len(shape), tuple(shape))) % PRIME


class _Scales:
    """Random sums of weights along each dim, modulo a prime."""

    def __init__(self, num_dims: int) -> None:
        self._sums: list[dict[int, int]] = [{} for _ in range(num_dims)]
        self._draw = random.SystemRandom().randrange  # nobody who makes up boxes can know it

    def box(self, box: Box) -> int:
        weight = 1
        for sums, start, size in zip(self._sums, *box, strict=True):
            for place in (start, start + size):
                if place not in sums:
                    sums[place] = self._draw(PRIME)
            weight = weight * (sums[start + size] - sums[start]) % PRIME
        return weight


def boxes_of_span(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a flattened row-major tensor, as boxes in their order.

        shape (4, 5), start 3, stop 17      . . . a a      a: the end of a row
                                            b b b b b      b: whole rows
                                            b b b b b
                                            c c . . .      c: the beginning of a row

    Each box is itself a range of the flattened tensor. There are at most 2·dims - 1 (1 for a tensor of no dims).
    """
    assert 0 <= start <= stop <= math.prod(shape), f"[{start}, {stop}) must lie in a tensor of shape {list(shape)}"
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows are [first, last)
    if first > last:
        return _in_row(shape, last, start - last * row, stop - last * row)
    boxes = _in_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else []
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    inner = boxes_of_span(shape[1:], start, stop)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in inner]


def shards_of_range(name: str, shape: tuple[int, ...], held: Box, flat: Tensor, start: int) -> list[Shard]:
    """A range of a rank's shard of `name`, as boxes of the logical tensor of shape `shape`.

    `held` is the box that the rank's whole shard is; where it reaches beyond `shape` it is padding, of which nothing is
    returned. `flat` [n] has the elements [start, start + n) of the flattened shard. Each `data` is a view of `flat`.
    """
    whole = Box((0,) * len(shape), shape)
    shards, at = [], 0
    for box in boxes_of_span(held.sizes, start, start + flat.numel()):
        place = Box(tuple(o + n for o, n in zip(held.offsets, box.offsets, strict=True)), box.sizes)
        values = flat[at : at + box.volume].view(box.sizes)
        real = overlap(place, whole)
        if real is not None:
            shards.append(Shard(name, shape, real.offsets, narrow(values, relative(real, place))))
        at += box.volume
    return shards


def narrow(x: Tensor, box: Box) -> Tensor:
    """The part of `x` that lies in `box`, as a view."""
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        x = x.narrow(dim, start, length)
    return x


def share_out(sizes: Mapping[K, float], holders: Mapping[K, Sequence[int]], num_ranks: int) -> dict[K, int]:
    """Give each key to one of its holders so that the ranks' sums of sizes are as even as a greedy choice makes them.

    What few ranks hold comes first, as there is least choice; of that the largest first.
    """
    load = [0.0] * num_ranks
    owner: dict[K, int] = {}
    for key in sorted(sizes, key=lambda key: (len(holders[key]), -sizes[key])):
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        owner[key] = rank
        load[rank] += sizes[key]
    return owner


def share_boxes(
    sizes: Mapping[tuple[str, Box], int], holders: Mapping[tuple[str, Box], Sequence[int]], num_ranks: int
) -> list[tuple[str, Box, int]]:
    """Who writes what: (name, box, rank), so that all ranks write about as many bytes.

    `sizes` (bytes) and `holders` are of the boxes that the ranks hold. One that several hold is cut between them where
    it is long: two dp copies of an embedding write half of its rows each.
    """
    grain = max(SMALLEST_PART, sum(sizes.values()) // (FINENESS * num_ranks))
    counts = {
        (name, box): min(-(-size // grain), max(box.sizes, default=1)) if len(holders[name, box]) > 1 else 1
        for (name, box), size in sizes.items()
    }
    parts = {(key, part): size / counts[key] for key, size in sizes.items() for part in range(counts[key])}
    owner = share_out(parts, {part: holders[part[0]] for part in parts}, num_ranks)
    shared = []
    for (name, box), count in counts.items():
        shares = sorted(Counter(owner[(name, box), part] for part in range(count)).items())
        cuts = cut(box, [share for _, share in shares])
        shared += [(name, part, rank) for part, (rank, _) in zip(cuts, shares, strict=True)]
    return shared


def cut(box: Box, shares: Sequence[int]) -> list[Box]:
    """`box` in parts that are as large as `shares` are to each other, along its first dim that is long enough.

    Some dim must be as long as the sum of shares, unless there is one share only.
    """
    if len(shares) == 1:
        return [box]
    total = sum(shares)
    dim = next(d for d, n in enumerate(box.sizes) if n >= total)
    edges = [box.sizes[dim] * sum(shares[:number]) // total for number in range(len(shares) + 1)]
    return [
        Box(
            tuple(o + start if d == dim else o for d, o in enumerate(box.offsets)),
            tuple(stop - start if d == dim else n for d, n in enumerate(box.sizes)),
        )
        for start, stop in itertools.pairwise(edges)
    ]


def names_in_words(names: Iterable[str], limit: int = 5) -> str:
    """`a, b and 3 more`."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"
