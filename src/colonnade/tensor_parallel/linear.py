"""Linear layers cut by columns and by rows (Megatron-LM paper, section 3, figure 3).

A pair of them needs one all-reduce forward (g, after the rows) and one backward (f, before the columns):

    x ──f──▶ Column ──▶ [.., o/tp] ──▶ any element-wise function ──▶ Row ──g──▶ y
"""

import torch
from torch import Tensor, nn

from colonnade.errors import LayoutError
from colonnade.mesh.collectives import copy_to, reduce_from
from colonnade.mesh.mesh import Axis
from colonnade.tensor_parallel.gemm import linear


def shard_size(size: int, tp: Axis, what: str) -> int:
    """size / tp, or a LayoutError naming `what` is not divisible."""
    if size % tp.size:
        raise LayoutError(f"parallel.tp = {tp.size} does not divide {what} = {size}. Use a divisor of {size}.")
    return size // tp.size


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with W [o, i] cut along o: every rank computes its own outputs."""

    sharded = {"weight": 0, "bias": 0}

    def __init__(self, in_size: int, out_size: int, tp: Axis, *, init_std: float) -> None:
        super().__init__()
        mine = shard_size(out_size, tp, "the layer's output size")
        self.tp, self.init_std = tp, init_std
        self.full_shapes = {"weight": (out_size, in_size), "bias": (out_size,)}
        self.weight = nn.Parameter(torch.empty(mine, in_size))
        self.bias = nn.Parameter(torch.empty(mine))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i] -> [s, b, o/tp]. Forward sends nothing; backward all-reduces [s, b, i] over tp."""
        return linear(copy_to(x, self.tp), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with W [o, i] cut along i: every rank has a part of each sum.

    The bias is added once, after the sum.
    """

    sharded = {"weight": 1}

    def __init__(self, in_size: int, out_size: int, tp: Axis, *, init_std: float) -> None:
        super().__init__()
        mine = shard_size(in_size, tp, "the layer's input size")
        self.tp, self.init_std = tp, init_std
        self.full_shapes = {"weight": (out_size, in_size)}
        self.weight = nn.Parameter(torch.empty(out_size, mine))
        self.bias = nn.Parameter(torch.empty(out_size))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i/tp] -> [s, b, o]. Forward all-reduces [s, b, o] over tp; backward sends nothing."""
        return reduce_from(linear(x, self.weight), self.tp) + self.bias
