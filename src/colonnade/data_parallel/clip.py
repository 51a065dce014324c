"""The norm of all gradients of the model, each weight counted once, and the factor that clips it.

A weight that is cut over tp is counted by every rank (each has a part of it), a replicated one by tp rank 0 alone.
"""

import torch
from torch import Tensor

from colonnade.data_parallel.buckets import FlatUnit, Segment
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Mesh


@torch.no_grad()
def gradient_norm(units: list[FlatUnit], mesh: Mesh) -> Tensor:
    """√Σ g² over the whole model, float64 [], equal on all ranks. Sends one number over pp and tp."""
    squares = [
        torch.linalg.vector_norm(unit.gradients[segment.start : segment.stop]).double().square()
        for unit in units
        for segment in unit.segments
        if _is_counted(segment, mesh)
    ]
    mine = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    return all_reduce(mine, mesh.model).sqrt()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients are multiplied with so that their norm is at most `limit`; 1 where it is, or where limit is 0."""
    if limit == 0.0:
        return torch.ones_like(norm)
    return (limit / norm.clamp(min=limit)).to(norm.dtype)


def _is_counted(segment: Segment, mesh: Mesh) -> bool:
    return segment.cut or mesh.tp.rank == 0
