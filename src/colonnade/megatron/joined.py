"""What ranks have of one tensor, joined: shards one behind the other, rows of q, k, v in our order, padding taken off.

    version 0     [(q, k, v), n/tp, d]  ┐
    version 1     [n/tp, d, (q, k, v)]  ├──▶  [n/tp, (q, k, v), d] of each rank ──▶ [n, (q, k, v), d]
    version 2, 3  [n/tp, (q, k, v), d]  ┘

The order holds within each rank's shard, so it is put right before shards are joined.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.checkpoint.schema import clip
from colonnade.errors import CheckpointError
from colonnade.megatron.rank_file import RankTensor

Order = Callable[[Tensor], Tensor]
"""A rank's shard in our order; of grouped or gated weights, the part of it that one of ours is made of."""


def as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Joined:
    """One tensor of the model without a layout, to be read when asked for."""

    parts: tuple[RankTensor, ...]
    """By tensor-parallel rank."""
    dim: int | None
    """The dim that is cut; None: every rank has all of it."""
    shape: tuple[int, ...]
    """Of the whole, without padding."""
    order: Order = as_it_is

    @property
    def kind(self) -> str:
        return self.parts[0].kind

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self) -> Tensor:
        """Its numbers, in memory of their own. CheckpointError where ranks do not agree on what they all have."""
        if self.dim is None:
            return self._read_copies()
        whole = torch.empty(self.shape, dtype=self.dtype)
        start = 0
        for part in self.parts:
            shard = self.order(part.read())
            shard = shard.narrow(self.dim, 0, min(shard.shape[self.dim], self.shape[self.dim] - start))
            whole.narrow(self.dim, start, shard.shape[self.dim]).copy_(shard)
            start += shard.shape[self.dim]
        return whole

    def _read_copies(self) -> Tensor:
        first = self.parts[0].read()
        for other in self.parts[1:]:
            if not torch.equal(first, other.read()):
                raise CheckpointError(
                    f"{self.parts[0].file.path} and {other.file.path} have different numbers in "
                    f"{clip(other.name)}, of which every rank has all: they belong to different runs or steps. Copy "
                    f"the files of all ranks from one place."
                )
        return self.order(first)[tuple(slice(length) for length in self.shape)]


def heads_first(version: float, head_dim: int) -> Order:
    """Rows of q, k, v of a rank's heads, brought from a version's order into [head, (q, k, v), d]."""

    def order(x: Tensor) -> Tensor:
        if version >= 2.0:
            return x
        if version >= 1.0:
            return x.view(-1, head_dim, 3, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
        return x.view(3, -1, head_dim, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

    return order


def queries(per_group: int, head_dim: int) -> Order:
    """[group, (q …, k, v), d] -> the rows of q, [head, d]."""
    return lambda x: x.view(-1, per_group + 2, head_dim, *x.shape[1:])[:, :per_group].flatten(0, 2)


def keys_and_values(per_group: int, head_dim: int) -> Order:
    """[group, (q …, k, v), d] -> the rows of k and v, [group, (k, v), d]."""
    return lambda x: x.view(-1, per_group + 2, head_dim, *x.shape[1:])[:, per_group:].flatten(0, 2)


def half(number: int) -> Order:
    """The first or second half of the rows: of a gated MLP, what is gated by SiLU and what is multiplied."""
    return lambda x: x.chunk(2)[number]
