"""Ways of cutting tensors into boxes, as layouts do."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from colonnade.checkpoint.plan import Box, Shard, overlap, relative, shards_of_range


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


TIED = "embedding.weight"  # on the first and on the last stage, as a tied table is
ALIGNMENT = 4  # elements


@dataclass(frozen=True)
class Layout:
    """Ranks that hold MODEL: tp innermost, then dp, then stages; `zero`: each dp rank owns a slice of flat buffers."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    zero: bool = False

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp * self.pp

    def parts(self, rank: int) -> list[list[str]]:
        """The weights of a rank's stage that share a flat buffer. A tied table has one of its own."""
        stage = rank // (self.tp * self.dp)
        own = [name for number, name in enumerate(MODEL) if number % self.pp == stage and name != TIED]
        return [part for part in ([TIED] if stage in (0, self.pp - 1) else [], own) if part]

    def shards(self, weights: dict[str, torch.Tensor], rank: int) -> list[Shard]:
        """What a rank owns, as views of flat buffers with padding between and behind the weights."""
        return [shard for part in self.parts(rank) for shard in self._shards({n: weights[n] for n in part}, rank)]

    def _shards(self, weights: dict[str, torch.Tensor], rank: int) -> list[Shard]:
        held = {name: held_box(x.shape, CUT_DIM.get(name), rank % self.tp, self.tp) for name, x in weights.items()}
        buffer, starts = flat_buffer({name: padded(x, held[name]) for name, x in weights.items()}, self.dp)
        share = len(buffer) // self.dp if self.zero else len(buffer)
        first = rank // self.tp % self.dp * share if self.zero else 0
        mine = buffer[first : first + share].clone()
        shards: list[Shard] = []
        for name, start in starts.items():
            low, high = max(start, first), min(start + held[name].volume, first + share)
            if low < high:
                flat = mine[low - first : high - first]
                shards += shards_of_range(name, tuple(weights[name].shape), held[name], flat, low - start)
        return shards


def held_box(shape: Sequence[int], dim: int | None, tp_rank: int, tp: int) -> Box:
    """A rank's shard: equally large on all ranks, so that it may reach beyond the tensor or lie outside."""
    local = [-(-n // tp) if d == dim else n for d, n in enumerate(shape)]
    return Box(tuple(min(tp_rank * n, shape[d]) if d == dim else 0 for d, n in enumerate(local)), tuple(local))


def padded(x: torch.Tensor, held: Box) -> torch.Tensor:
    """The shard, with -7 where it reaches beyond the tensor."""
    shard = torch.full(held.sizes, -7, dtype=x.dtype)
    real = overlap(held, Box((0,) * x.dim(), tuple(x.shape)))
    if real is not None:
        view_of(shard, relative(real, held)).copy_(view_of(x, real))
    return shard


def flat_buffer(shards: dict[str, torch.Tensor], dp: int) -> tuple[torch.Tensor, dict[str, int]]:
    """All shards in one vector that dp divides, and where each begins."""
    starts, at = {}, 0
    for name, shard in shards.items():
        starts[name] = at
        at += -(-shard.numel() // ALIGNMENT) * ALIGNMENT
    dtype = next(iter(shards.values())).dtype
    buffer = torch.full((-(-at // (dp * ALIGNMENT)) * dp * ALIGNMENT,), -7, dtype=dtype)
    for name, shard in shards.items():
        buffer[starts[name] : starts[name] + shard.numel()] = shard.reshape(-1)
    return buffer, starts


def layouts() -> st.SearchStrategy[Layout]:
    """Layouts of at most 8 ranks."""
    sizes = st.sampled_from([1, 2, 3, 4])
    drawn = st.builds(Layout, tp=sizes, dp=sizes, pp=st.sampled_from([1, 2, 3]), zero=st.booleans())
    return drawn.filter(lambda it: it.num_ranks <= 8)
