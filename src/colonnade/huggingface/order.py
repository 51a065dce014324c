"""Their tensors in our order, and ours in theirs: transposes and the order of rows. Exact, both ways.

separate  q [n·d, h], k, v         ┐
fused     [(q, k, v), n, d] rows   ├──▶  one weight, rows [head, (q, k, v), d]
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.architecture.huggingface.statement import Source


def to_ours(source: Source, theirs: Sequence[Tensor], head_dim: int) -> Tensor:
    """Our weight, made of theirs; it may share memory with them."""
    parts = [x.t() if source.transposed else x for x in theirs]  # [in, out] -> [out, in]
    if source.parts == 1:
        return parts[0]
    parts = list(parts[0].chunk(source.fused)) if source.fused > 1 else parts
    by_head = [part.reshape(-1, head_dim, *part.shape[1:]) for part in parts]  # [n, d, …] each
    return torch.stack(by_head, 1).flatten(0, 2)  # [n · parts · d, …]


def to_theirs(source: Source, ours: Tensor, head_dim: int) -> list[Tensor]:
    """Their tensors that are our weight, each contiguous; they may share memory with it."""
    parts = [ours]
    if source.parts > 1:
        by_head = ours.reshape(-1, source.parts, head_dim, *ours.shape[1:])  # [n, parts, d, …]
        parts = [part.flatten(0, 1) for part in by_head.unbind(1)]  # [n · d, …] each
        parts = [torch.cat(parts)] if source.fused > 1 else parts
    return [(x.t() if source.transposed else x).contiguous() for x in parts]
