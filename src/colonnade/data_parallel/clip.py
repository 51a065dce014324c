"""The norm of all gradients of the model, each weight counted once, and the factor that clips it.

A weight that is cut over tp is counted by every tp rank (each has a shard of it), a replicated one by tp rank 0 alone;
what several pipeline stages share (a tied token table) is counted by the first of them.
"""

import torch
from torch import Tensor

from colonnade.data_parallel.buckets import Bucket, ParamGroup
from colonnade.data_parallel.zero import Ownership
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Axis
from colonnade.optim.norm import squared_norms, zero_if_finite


@torch.no_grad()
def gradient_norm(owned: Ownership) -> Tensor:
    """√Σ g² over all trained weights of the model, float64 [], equal on all ranks.

    Sends one number, over pp and tp; under ZeRO, where each dp rank has a slice, over dp as well.
    """
    mesh = owned.mesh
    counted: dict[bool, list[Tensor]] = {True: [], False: []}
    for bucket in owned.buckets.values():
        for group, at in bucket.local_groups():
            if not is_copy(bucket, owned):
                counted[is_counted(group, mesh.tp)].append(bucket.reduced[at])
    mine = squared_norms(counted[True]).sum() + zero_if_finite(counted[False])
    mine = mine.to(owned.every[0].parameters.device)
    return all_reduce(mine, mesh.world if owned.zero else mesh.model).sqrt()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients are multiplied with so that their norm is at most `limit`; 1 where it is, or where limit is 0."""
    if limit == 0.0:
        return torch.ones_like(norm)
    return (limit / norm.clamp(min=limit)).to(norm.dtype)


def is_counted(group: ParamGroup, tp: Axis) -> bool:
    """Whether this tp rank's share of `group` goes into sums over tp."""
    return group.cut or tp.rank == 0


def is_copy(bucket: Bucket, owned: Ownership) -> bool:
    """Whether an earlier pipeline stage has the bucket too."""
    return bucket.name in owned.shared and owned.shared[bucket.name].rank > 0
