"""Relative positions of T5: a trained number for each head and range of distances is added to the scores.

    distance   0 1 2 … 15 | 16 … | 21 … | … | 113 … and everything beyond          32 ranges, one side, 128
    range      0 1 2 … 15 |  16  |  17  | … |  31                                  exact up to half, then logarithmic

A decoder sees what is before a token, and has all ranges for that; an encoder has half of them for either side. The
bias [n, queries, keys] depends on the distance alone: it is spread from a number for each distance, and its gradient is
summed along the diagonals, in a fixed order on every device.

Source: Raffel et al., 2020, section 2.1, and their code.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.kernels.products import gradient_of
from colonnade.upload import upload


@dataclass(frozen=True)
class Ranges:
    """How distances are put together."""

    count: int = 32
    furthest: int = 128
    """[tokens] From here on, all distances are one range."""
    both_sides: bool = False
    """Whether tokens see what is behind them."""

    def of(self, distances: Tensor) -> Tensor:
        """The range of each distance, key - query: int64 [...] on the CPU. In fp32, as published weights were made."""
        side = self.count // 2 if self.both_sides else self.count
        away = distances.abs() if self.both_sides else (-distances).clamp(min=0)
        exact = side // 2
        grown = torch.log(away.clamp(min=1).float() / exact) / math.log(self.furthest / exact) * (side - exact)
        far = (exact + grown.long()).clamp(max=side - 1)
        found = torch.where(away < exact, away, far)
        return found + side * (distances > 0).long() if self.both_sides else found


@dataclass(frozen=True)
class RelativeBias:
    """What is added to scores."""

    table: nn.Parameter
    """[ranges, n]: of this rank's heads."""
    ranges: Ranges

    def _of_distances(self, queries: int, keys: int) -> Tensor:
        """The range of every distance from 1 - keys to queries - 1, of queries that are the last of the keys."""
        return upload(self.ranges.of(torch.arange(1 - keys, queries)), self.table.device)

    @torch.no_grad()
    def of(self, distances: Tensor) -> Tensor:
        """The bias of each distance, key - query: int64 [queries, keys] on the CPU -> [n, queries, keys]"""
        return self.table[upload(self.ranges.of(distances), self.table.device)].permute(2, 0, 1)

    def add_to_(self, scores: Tensor) -> None:
        """scores [b, n, queries, keys], in place."""
        queries, keys = scores.shape[-2:]
        numbers = self.table.detach().to(scores.dtype)[self._of_distances(queries, keys)].t()  # [n, distances]
        # row i begins with the distance from query i to the first key
        scores.add_(numbers.contiguous().unfold(-1, keys, 1).flip(1))

    def add_gradient_(self, grad: Tensor) -> None:
        """Add to the table's gradient, if it is trained, given that of the scores [b, n, queries, keys]."""
        if not self.table.requires_grad:
            return
        queries, keys = grad.shape[-2:]
        wide = grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).flip(1)
        # rows one longer than their pitch: row i is shifted by i, and distances stand in columns
        shifted = nn.functional.pad(wide, (0, queries)).flatten(1)[:, : queries * (keys + queries - 1)]
        by_distance = shifted.view(len(wide), queries, keys + queries - 1).sum(1)  # [n, distances]
        ranges = self._of_distances(queries, keys)
        ones = nn.functional.one_hot(ranges, self.ranges.count).to(by_distance.dtype)  # a sum in a fixed order
        gradient = gradient_of(self.table)
        gradient.add_((ones.t() @ by_distance.t()).to(gradient.dtype))
