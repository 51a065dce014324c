"""Which keys a query sees, and what distance costs: one description for training, evaluation and generation.

    kind            a query at position i sees the key at j where                          state
    causal          j ≤ i                                                                  none
    bidirectional   always                                                                 none
    window          i − window < j (and j ≤ i)                                             none
    documents       both are in the same document                                          a byte a pair: `Pairs`
    padding         j is a token and no padding                                            a byte a pair: `Pairs`
    ALiBi           −slope · (i − j) is added to the score                                 none

All that apply are taken together. What depends on positions alone is a pure function of them: it is computed where it
is needed, again in backward, and never kept. What depends on the samples is made once and shared by all layers.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from colonnade.upload import upload


@dataclass(frozen=True)
class Mask:
    """Of one layer on one rank."""

    causal: bool = True
    window: int | None = None
    """[tokens] A query sees its own key and the window − 1 before it. Needs `causal`."""
    slopes: Sequence[float] | None = None
    """ALiBi's, of this rank's heads."""
    pairs: Tensor | None = None
    """bool [b, 1, queries, keys]: what samples say; None: everything."""

    def with_pairs(self, pairs: Tensor | None) -> "Mask":
        return replace(self, pairs=pairs)

    def is_plain(self, keys: int) -> bool:
        """Whether there is nothing but `causal` in it for so many keys."""
        return self.slopes is None and self.pairs is None and (self.window is None or self.window >= keys)

    def bias(self, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is added to the scores of the last `queries` of `keys` positions: [1 or b, 1 or n, queries, keys]."""
        exact = torch.promote_types(dtype, torch.float32)
        position = torch.arange(keys, device=device)
        distance = position[None, :] - position[keys - queries :, None]  # ≤ 0 up to the query
        visible = self.visible(distance)
        if self.slopes is None:
            return torch.where(visible, torch.zeros((), dtype=dtype, device=device), -math.inf)
        slopes = upload(torch.tensor(self.slopes, dtype=exact), device)[:, None, None]
        return torch.where(visible, (slopes * distance).to(dtype), -math.inf)

    def visible(self, distance: Tensor) -> Tensor:
        """bool [1 or b, 1, queries, keys], given how far behind each query each key is (negative: before it)."""
        seen = distance <= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (distance > -self.window)
        return seen[None, None] if self.pairs is None else seen & self.pairs


@dataclass(frozen=True)
class Pairs:
    """Which tokens of a micro-batch may see each other, made when the first layer asks.

    It lives as long as some layer's backward keeps it, and is made again after that: nothing holds a byte for every
    pair of every micro-batch.
    """

    documents: Tensor | None = None
    """int64 [s, b]: the document of each token, any numbers."""
    real: Tensor | None = None
    """bool [s, b]: False on padding, which nothing attends to."""
    padding_sees_itself: bool = True
    """Whether padding sees itself too, beside what is real: what a causal layer needs where padding comes first."""
    _made: list[weakref.ref[Tensor]] = field(default_factory=list, repr=False, compare=False)

    def tensor(self) -> Tensor | None:
        """bool [b, 1, s, s]; None: all of them."""
        if self.documents is None and self.real is None:
            return None
        alive = self._made[0]() if self._made else None
        if alive is None:
            alive = self._make()
            self._made[:] = [weakref.ref(alive)]
        return alive

    def _make(self) -> Tensor:
        pairs: Tensor | None = None
        if self.documents is not None:
            rows = self.documents.t()
            pairs = rows[:, :, None] == rows[:, None, :]
        if self.real is not None:
            keys = self.real.t()[:, None, :]
            pairs = keys if pairs is None else pairs & keys
            if self.padding_sees_itself:
                pairs = pairs | torch.eye(keys.shape[-1], dtype=torch.bool, device=keys.device)
            pairs = pairs.expand(-1, keys.shape[-1], -1)
        assert pairs is not None, "one of the two says something"
        return pairs[:, None].contiguous()
