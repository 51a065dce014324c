"""Linear layers cut by columns and by rows (Megatron-LM paper, section 3, figure 3).

A pair of them needs one all-reduce forward (g, after the rows) and one backward (f, before the columns):

    x ──f──▶ Column ──▶ [.., o/tp] ──▶ any element-wise function ──▶ Row ──g──▶ y

Under sequence parallelism the halves of these all-reduces stand apart (see `parallel.py`): an all-gather before the
columns, a reduce-scatter after the rows, and their conjugates backward. The columns then keep only their own part of
x, and gather it once more for the weight gradient: one all-gather more a pair, for 1/tp of the memory.
"""

import torch
from torch import Tensor, nn

from colonnade.errors import LayoutError
from colonnade.mesh.mesh import Axis
from colonnade.tensor_parallel.gemm import Input, add_bias, linear
from colonnade.tensor_parallel.parallel import Parallel


def shard_size(size: int, tp: Axis, what: str) -> int:
    """size / tp, or a LayoutError naming `what` is not divisible."""
    if size % tp.size:
        raise LayoutError(f"parallel.tp = {tp.size} does not divide {what} = {size}. Use a divisor of {size}.")
    return size // tp.size


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with W [o, i] cut along o: every rank computes its own outputs."""

    sharded = {"weight": 0, "bias": 0}

    def __init__(self, in_size: int, out_size: int, parallel: Parallel) -> None:
        super().__init__()
        mine = shard_size(out_size, parallel.tp, "the layer's output size")
        self.parallel = parallel
        self.full_shapes = {"weight": (out_size, in_size), "bias": (out_size,)}
        self.weight = nn.Parameter(torch.empty(mine, in_size))
        self.bias = nn.Parameter(torch.empty(mine))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i] -> [s, b, o/tp]. Forward sends nothing; backward all-reduces [s, b, i] over tp.

        Sequence parallel: [s/tp, b, i] -> [s, b, o/tp]. Forward all-gathers [s/tp, b, i] over tp; backward
        reduce-scatters [s, b, i] and, where the weight gradient is computed, all-gathers [s/tp, b, i] again. The
        gradient of x is on its way while that of the weight is computed.
        """
        parallel, keep = self.parallel, Input(x.detach(), self.parallel.gather)
        later, entrance = parallel.weight_gradients, parallel.entrance
        return linear(x, self.weight, self.bias, weight_gradients=later, keep=keep, entrance=entrance)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with W [o, i] cut along i: every rank has a part of each sum.

    The bias is added once, after the sum.
    """

    sharded = {"weight": 1}

    def __init__(self, in_size: int, out_size: int, parallel: Parallel) -> None:
        super().__init__()
        mine = shard_size(in_size, parallel.tp, "the layer's input size")
        self.parallel = parallel
        self.full_shapes = {"weight": (out_size, in_size)}
        self.weight = nn.Parameter(torch.empty(out_size, mine))
        self.bias = nn.Parameter(torch.empty(out_size))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i/tp] -> [s, b, o]. Forward all-reduces [s, b, o] over tp; backward sends nothing.

        Sequence parallel: [s, b, i/tp] -> [s/tp, b, o]. Forward reduce-scatters [s, b, o] over tp; backward
        all-gathers [s/tp, b, o].
        """
        y = linear(x, self.weight, weight_gradients=self.parallel.weight_gradients)
        return add_bias(self.parallel.leave(y), self.bias)
