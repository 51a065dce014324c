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
from colonnade.kernels.products import ALL, Input, Operand, add_bias, linear, linears
from colonnade.mesh.mesh import Axis
from colonnade.tensor_parallel.adapter import Adapted
from colonnade.tensor_parallel.parallel import Parallel


def shard_size(size: int, tp: Axis, what: str) -> int:
    """size / tp, or a LayoutError naming `what` is not divisible."""
    if size % tp.size:
        raise LayoutError(f"parallel.tp = {tp.size} does not divide {what} = {size}. Use a divisor of {size}.")
    return size // tp.size


class ColumnParallelLinear(Adapted):
    """y = x Wᵀ + b with W [o, i] cut along o: every rank computes its own outputs.

    `groups`: the outputs are so many equal groups, which stay whole. Where there are more ranks than groups, every rank
    has all of W, and multiplies with the rows of the group that it works for; its gradient is then a partial sum.
    """

    def __init__(
        self, in_size: int, out_size: int, parallel: Parallel, *, bias: bool = True, groups: int | None = None
    ) -> None:
        super().__init__()
        self.parallel, tp = parallel, parallel.tp
        self.full_shapes = {"weight": (out_size, in_size), "bias": (out_size,)}
        shared = groups is not None and tp.size > groups
        self.sharded = {} if shared else {"weight": 0, "bias": 0}
        self.partial = ("weight", "bias") if shared else ()
        mine = out_size if shared else shard_size(out_size, tp, "the layer's output size")
        self.rows = ALL
        if groups is not None and shared:
            each, group = out_size // groups, tp.rank * groups // tp.size
            self.rows = slice(group * each, (group + 1) * each)
        self.weight = nn.Parameter(torch.empty(mine, in_size))
        self.bias = nn.Parameter(torch.empty(mine)) if bias else None

    @property
    def operand(self) -> Operand:
        return Operand(self.weight, self.bias, self.rows)

    def forward(self, x: Tensor) -> Tensor:
        """As `columns`, for one layer."""
        (y,) = columns(x, self)
        return y


def columns(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """Layers that read the same x: [s, b, i] -> [s, b, o/tp] each. Forward sends nothing; backward all-reduces
    [s, b, i] over tp, once for all of them.

    Sequence parallel: [s/tp, b, i] -> [s, b, o/tp]. Forward all-gathers [s/tp, b, i] over tp; backward reduce-scatters
    [s, b, i] and, where weight gradients are computed, all-gathers [s/tp, b, i] again. The gradient of x is on its way
    while those of the weights are computed.
    """
    parallel = layers[0].parallel
    keep = Input(x.detach(), parallel.start_gather)
    operands = [layer.operand for layer in layers]
    found = linears(
        x,
        operands,
        weight_gradients=parallel.weight_gradients,
        keep=keep,
        entrance=parallel.entrance,
        products=parallel.products,
    )
    return tuple(
        y if layer.adapter is None else y + layer.adapter.of_columns(x, layer.rows)
        for y, layer in zip(found, layers, strict=True)
    )


class ReplicatedLinear(nn.Module):
    """y = x Wᵀ + b on the stream, wherever this rank's part of it lies: nothing is cut, and nothing is sent.

    Sequence parallel: gradients of both are partial sums over tp, as of every weight that works on the stream.
    """

    def __init__(self, in_size: int, out_size: int, parallel: Parallel, *, bias: bool = True) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., o]"""
        parallel = self.parallel
        return linear(x, self.weight, self.bias, weight_gradients=parallel.weight_gradients, products=parallel.products)


class RowParallelLinear(Adapted):
    """y = x Wᵀ + b with W [o, i] cut along i: every rank has a part of each sum.

    The bias is added once, after the sum.
    """

    sharded = {"weight": 1}

    def __init__(self, in_size: int, out_size: int, parallel: Parallel, *, bias: bool = True) -> None:
        super().__init__()
        mine = shard_size(in_size, parallel.tp, "the layer's input size")
        self.parallel = parallel
        self.full_shapes = {"weight": (out_size, in_size)}
        self.weight = nn.Parameter(torch.empty(out_size, mine))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i/tp] -> [s, b, o]. Forward all-reduces [s, b, o] over tp; backward sends nothing.

        Sequence parallel: [s, b, i/tp] -> [s/tp, b, o]. Forward reduce-scatters [s, b, o] over tp; backward
        all-gathers [s/tp, b, o].
        """
        parallel = self.parallel
        y = linear(x, self.weight, weight_gradients=parallel.weight_gradients, products=parallel.products)
        y = parallel.leave(y)
        if self.adapter is not None:
            y = y + self.adapter.of_rows(x)
        return y if self.bias is None else add_bias(y, self.bias, products=parallel.products)
