"""Who writes which box of which tensor, and who reads what from where. Pure: integers in, integers out.

A checkpoint knows *logical* tensors: the weights of the serial run, without padding. A rank holds *boxes* of them:

    embedding.tokens.weight [v, h]          tp 0 holds rows 0 … v/2          Box((0, 0), (v/2, h))
                                            tp 1 holds the others            Box((v/2, 0), (v/2, h))
                                            dp copies hold equal boxes: one of them writes

Reading under another layout intersects the boxes that are wanted with the boxes that were written.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

K = TypeVar("K")


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
    """Whether the boxes cover the tensor, each element once."""
    ordered = sorted(box for box in boxes if box.volume)
    if sum(box.volume for box in ordered) != math.prod(shape):
        return False
    open_boxes: list[Box] = []  # those that reach into the rows at hand
    for box in ordered:
        open_boxes = [other for other in open_boxes if other.offsets[:1] == () or _end(other) > box.offsets[0]]
        if any(overlap(box, other) for other in open_boxes):
            return False
        open_boxes.append(box)
    return True


def _end(box: Box) -> int:
    return box.offsets[0] + box.sizes[0]


def share_out(sizes: Mapping[K, int], holders: Mapping[K, Sequence[int]], num_ranks: int) -> dict[K, int]:
    """Give each key to one of its holders so that the ranks' sums of sizes are as even as largest-first makes them."""
    load = [0] * num_ranks
    owner: dict[K, int] = {}
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        owner[key] = rank
        load[rank] += sizes[key]
    return owner


def names_in_words(names: Iterable[str], limit: int = 5) -> str:
    """`a, b and 3 more`."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"
