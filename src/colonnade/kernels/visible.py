"""The numbers that attention's softmax reads, of the pairs of tokens that see each other: for thermometers alone.

They exist only inside of fused kernels. Here they are computed once more, in parts of a bounded size, so that nothing
of queries × keys is held.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from colonnade.kernels.attention import raw_scores
from colonnade.kernels.mask import Mask
from colonnade.kernels.relative import RelativeBias
from colonnade.upload import upload

MOST = 2**21
"""Numbers in a part, unless one query of every head and sample has more."""


@torch.no_grad()
def visible_logits(
    q: Tensor, k: Tensor, mask: Mask, *, scaled: bool = True, bias: RelativeBias | None = None
) -> Iterator[Tensor]:
    """q [b, n, s, d] and k [b, n, t, d] -> parts of q kᵀ/√d + bias [b, n, s, t], of any shape, without the pairs that
    `mask` hides. Queries are the last of the keys where that matters. `scaled` False: no 1/√d.
    """
    b, n, s, d = q.shape
    t = k.shape[2]
    size = max(1, MOST // (b * n * t))
    for first in range(0, s, size):
        rows = slice(first, min(s, first + size))
        begin = t - s + first  # the position of the first of these queries
        end = t - s + rows.stop if mask.causal else t
        part = raw_scores(q[:, :, rows], k[:, :, :end])
        if scaled:
            part = part / math.sqrt(d)
        distance = torch.arange(end) - torch.arange(begin, begin + rows.stop - first)[:, None]
        if bias is not None:
            part = part + bias.of(distance).to(part.dtype)
        if mask.slopes is not None:
            slopes = torch.tensor(mask.slopes, dtype=part.dtype)[:, None, None]
            part = part + upload(slopes * distance, part.device)
        yield _seen(part, mask, distance, rows)


def _seen(part: Tensor, mask: Mask, distance: Tensor, rows: slice) -> Tensor:
    """What is seen of scores [b, n, queries, keys] of these rows."""
    by_place = mask.with_pairs(None).visible(distance)[0, 0]
    if mask.pairs is not None:
        pairs = mask.pairs if mask.pairs.shape[2] == 1 else mask.pairs[:, :, rows]
        pairs = pairs[..., : distance.shape[1]] & upload(by_place, part.device)
        return part.masked_select(pairs)
    if bool(by_place.all()):
        return part
    places = upload(by_place.flatten().nonzero()[:, 0], part.device)
    return part.flatten(2).flatten(0, 1).index_select(1, places)
