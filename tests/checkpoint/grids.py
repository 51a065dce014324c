"""Ways of cutting tensors into boxes, as layouts do."""

import itertools
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from colonnade.checkpoint.plan import Box, Shard


def cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Start and size of `parts` parts that are as even as can be; some may be empty."""
    edges = [length * part // parts for part in range(parts + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


def grid(shape: Sequence[int], parts: Sequence[int]) -> list[Box]:
    """Boxes of a regular grid, the last dim fastest."""
    sides = [[side for side in cut(n, p) if side[1]] for n, p in zip(shape, parts, strict=True)]
    return [Box(tuple(o for o, _ in box), tuple(n for _, n in box)) for box in itertools.product(*sides)]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes of irregular sizes that tile it."""
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    sides = []
    for n in shape:
        edges = [0, *sorted(draw(st.sets(st.integers(1, n - 1), max_size=3)) if n > 1 else ()), n]
        sides.append([(start, end - start) for start, end in itertools.pairwise(edges)])
    return shape, [Box(tuple(o for o, _ in box), tuple(n for _, n in box)) for box in itertools.product(*sides)]


def number(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements all differ (as far as the dtype can tell)."""
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(tuple(shape)).to(dtype)


def shard_of(name: str, x: torch.Tensor, box: Box) -> Shard:
    """The box of the logical tensor `x`, as a view of it."""
    return Shard(name, tuple(x.shape), box.offsets, view_of(x, box))


def view_of(x: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        x = x.narrow(dim, start, length)
    return x


MODEL = {"embedding.weight": (51, 8), "qkv.weight": (24, 8), "down.weight": (8, 32), "norm.bias": (8,), "scale": ()}
CUT_DIM = {"embedding.weight": 0, "qkv.weight": 0, "down.weight": 1}


def model_shards(weights: dict[str, torch.Tensor], tp_rank: int, tp: int) -> list[Shard]:
    """One rank's shards of a small model: cut along rows or columns, uneven vocabulary, some replicated."""
    shards = []
    for name, x in weights.items():
        dim = CUT_DIM.get(name)
        parts = [tp if d == dim else 1 for d in range(x.dim())]
        boxes = grid(x.shape, parts)
        shards.append(shard_of(name, x, boxes[tp_rank if dim is not None else 0]))
    return shards
