"""Dropout of attention probabilities by a mask that a test has."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from colonnade.kernels.dropout import ProbabilityDropout


@dataclass(frozen=True)
class ByMask(ProbabilityDropout):
    keep: Tensor = field(kw_only=True)
    asked: list[tuple[int, int]] = field(default_factory=list)

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """A copy of it, as if it was drawn."""
        self.asked.append((queries, keys))
        return self.keep.clone()


def by_mask(keep: Tensor, drop: float) -> ByMask:
    """`keep`: bool [b, n, queries, keys]. It has no streams, so only attention that is spelled out can drop by it."""
    return ByMask(np.empty((0, 0), dtype=np.uint64), drop, keep=keep)
