"""The matrix products of a linear layer, and where their weight gradients go.

Every parameter owns its gradient from the start (`parameter.grad`, a view of a flat buffer, fp32 for 16-bit weights),
so a weight gradient is added by the product itself: `grad += gᵀ x` is one GEMM with its sum, where autograd would
make a second tensor of the weight's size and add that. Nothing else in the program may replace `parameter.grad`. A
parameter that is frozen (`requires_grad` is False) has none: its product is left out, and what only that would read is
not kept.

By which kernel is the caller's decision (`choice.py`). Where 16-bit operands are multiplied in fp32, the result is
rounded to 16 bits afterwards: its sums are at least as exact as those of 16-bit units. What is added up in fp32 is
never a product that was rounded to 16 bits.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from colonnade.kernels import compiled
from colonnade.kernels.choice import Kernel, Products, usual
from colonnade.mesh.autograd import apply
from colonnade.mesh.collectives import Entrance
from colonnade.mesh.mesh import Axis
from colonnade.mesh.transport import Pending

ALL = slice(None)
"""Of the rows of a weight."""
_AS_BEFORE = nullcontext()


def in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, without a call of torch where it has that type: that takes longer than to look."""
    return x if x.dtype == dtype else x.to(dtype)


def rows_of(x: Tensor, rows: slice) -> Tensor:
    """`x[rows]`, likewise."""
    return x if rows == ALL else x[rows]


def flat(x: Tensor) -> Tensor:
    """[..., i] -> [t, i]"""
    return x.reshape(-1, x.shape[-1])


def widen(x: Tensor, kernel: Kernel) -> Tensor:
    """`x` in the type that its products are computed in."""
    return x if kernel in ("native", "compiled") or x.is_cuda or x.dtype.itemsize > 2 else x.float()


def gradient_of(parameter: Tensor) -> Tensor:
    """The parameter's gradient, zeros at first where nobody gave it a buffer: fp32 for 16-bit weights."""
    if parameter.grad is None:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        parameter.grad_dtype = dtype
        parameter.grad = torch.zeros_like(parameter, dtype=dtype)
    return parameter.grad


def computed_by(kernel: Kernel) -> AbstractContextManager[None]:
    """Within, fp32 products on the CPU go to oneDNN if that is the kernel, else where they went before.

    torch's setting is global, so it is put back. Both together take 3 µs, of products that take hundreds.
    """
    return _by_onednn() if kernel == "onednn" else _AS_BEFORE


@contextmanager
def _by_onednn() -> Iterator[None]:
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, products.fp32_precision = products.fp32_precision, "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before


def exact(x: Tensor, kernel: Kernel = "blas") -> Tensor:
    """`x` in a type whose products by `kernel` come out in fp32 or fp64: on CPUs, most want 16 bits widened."""
    return x if x.is_cuda or x.dtype.itemsize > 2 or kernel == "compiled" else x.float()


def fp32_product_(total: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> Tensor:
    """total = a b, or total += a b where `add`, and total again: a [m, k] and b [k, n] in 16 bits or fp32, total [m, n]
    in fp32. On CPUs by the compiled kernels.
    """
    if not (a.is_cuda or a.is_meta):
        compiled.product_(total, a, b, add=add)
        return total
    if a.dtype == total.dtype:
        return torch.addmm(total, a, b, out=total) if add else torch.mm(a, b, out=total)
    if add and not total.is_meta:  # nothing is added there, and torch 2.11 fails to
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return torch.mm(a, b, out_dtype=total.dtype, out=total)


def output_exponentials_(
    out: Sequence[Tensor], product: Tensor, x: Tensor, table: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `compiled.output_exponentials_`; on the meta device, what that computes by torch's operators."""
    if not x.is_meta:
        return compiled.output_exponentials_(out, product, x, table, labels)
    (whole,) = out
    fp32_product_(product, torch.mm(x, table.t(), out=whole).exp_(), table)
    shift, total, label = x.new_empty((3, len(x)), dtype=torch.float32)
    return shift, total, label


def input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor], kernel: Kernel) -> Tensor:
    """Σ g W over gradients [t, o], as they are multiplied, and their weights [o, i] -> [t, i]."""
    if kernel == "compiled":
        dx = torch.empty(len(grads[0]), weights[0].shape[1], dtype=torch.float32, device=grads[0].device)
        for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            fp32_product_(dx, grad, weight, add=i > 0)
        return dx
    with computed_by(kernel):
        dx = grads[0] @ widen(weights[0], kernel)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            dx.addmm_(grad, widen(weight, kernel))
    return dx


def add_product_(total: Tensor, a: Tensor, b: Tensor, kernel: Kernel = "blas") -> None:
    """total += aᵀ b, summed in the type of `total` and never rounded to 16 bits: a [k, m], b [k, n], total [m, n]."""
    if kernel == "compiled" or (b.dtype.itemsize == 2 and b.is_cuda):
        fp32_product_(total, in_type(a, b.dtype).t(), b, add=True)  # what was widened from 16 bits has them still
        return
    with computed_by(kernel):
        total.addmm_(exact(a).t(), exact(b))


def add_products_(total: Tensor, blocks: Sequence[Tensor], b: Tensor, kernel: Kernel = "blas") -> None:
    """As `add_product_`, of an `a` that lies in blocks of columns, side by side; several are multiplied by the compiled
    kernels (`compiled.output_blocks`).
    """
    if len(blocks) == 1:
        add_product_(total, blocks[0], b, kernel)
    else:
        compiled.products_(total, blocks, b, add=True)


def add_rows_(total: Tensor, rows: Tensor, kernel: Kernel = "blas") -> None:
    """total += the sum of rows, in the type of `total`: rows [t, n], total [n]."""
    if rows.dtype.itemsize == 2 and (kernel == "compiled" or rows.is_cuda):
        # torch's sum makes an fp32 copy first on CPUs, and is slower on an H200
        fp32_product_(total[None], rows.new_ones(1, len(rows)), rows, add=True)
    else:
        total.add_(rows.sum(0, dtype=total.dtype))


class Queue:
    """Weight gradients that are still to be computed."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def append(self, compute: Callable[[], None]) -> None:
        self._waiting.append(compute)

    def run(self) -> None:
        """Compute them all, in the order in which they came; each lets go of its tensors at once."""
        while self._waiting:
            self._waiting.popleft()()


class WeightGradients:
    """When the weight gradients of linear layers are computed: in backward at once, or later where somebody asks.

    Handed to the layers like an `Axis`; all layers of a rank share one. A pipeline schedule that splits backward into
    input gradients and weight gradients defers:

        with weight_gradients.deferred() as queue:
            loss.backward()         input gradients alone
        queue.run()                 whenever there is time
    """

    def __init__(self) -> None:
        self._queue: Queue | None = None

    @property
    def is_deferred(self) -> bool:
        """Whether what is added now waits in a queue."""
        return self._queue is not None

    def add(self, compute: Callable[[], None]) -> None:
        """Run `compute`, which adds to weights' gradients, now or when the open queue is run."""
        if self._queue is None:
            compute()
        else:
            self._queue.append(compute)

    @contextmanager
    def deferred(self) -> Iterator[Queue]:
        """What is added meanwhile waits in the queue that this gives."""
        assert self._queue is None, "weight gradients wait in one queue at a time"
        self._queue = Queue()
        try:
            yield self._queue
        finally:
            self._queue = None


Start = Callable[[Tensor], tuple[Tensor, Pending]]
"""Starts to make something: (where it will be, when)."""


def _as_it_is(x: Tensor) -> tuple[Tensor, Pending]:
    return x, Pending(None)


class Input(NamedTuple):
    """What a linear layer keeps of its input until the weight gradient is computed."""

    kept: Tensor
    start: Start = _as_it_is
    """Starts to make the layer's input from `kept`."""


class Operand(NamedTuple):
    """A weight that multiplies, its bias, and which of its rows."""

    weight: Tensor
    """[o, i]"""
    bias: Tensor | None = None
    """[o]"""
    rows: slice = ALL

    @property
    def used(self) -> Tensor:
        return rows_of(self.weight, self.rows)

    def product(self, x: Tensor, kernel: Kernel) -> Tensor:
        """x [t, i], as it is multiplied -> [t, rows]"""
        bias = None if self.bias is None else in_type(rows_of(self.bias, self.rows), x.dtype)
        if kernel == "compiled":
            y = torch.empty(len(x), len(self.used), dtype=torch.float32, device=x.device)
            if bias is not None:
                y.copy_(bias.expand_as(y))
            return fp32_product_(y, x, self.used.t(), add=bias is not None)
        return nn.functional.linear(x, widen(self.used, kernel), bias)

    def add_gradients(self, grad: Tensor, x: Tensor | None, kernel: Kernel) -> None:
        """Of the gradient of the product, [t, rows], and the layer's input, [.., i] (None: the weight is frozen)."""
        if self.weight.requires_grad:
            assert x is not None, "a weight gradient is made of the input"
            add_product_(rows_of(gradient_of(self.weight), self.rows), grad, flat(x), kernel)
        if self.bias is not None and self.bias.requires_grad:
            add_rows_(rows_of(gradient_of(self.bias), self.rows), grad, kernel)

    @property
    def is_trained(self) -> bool:
        """Whether it, or its bias, has a gradient."""
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)


class _How(NamedTuple):
    """What a linear layer is computed with."""

    operands: Sequence[Operand]
    later: WeightGradients
    entrance: Entrance
    products: Products


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Input, how: _How, *pairs: Tensor | None) -> tuple[Tensor, ...]:
        """`pairs`: weights and biases, by which autograd sees that there is something to train."""
        reads = any(operand.weight.requires_grad for operand in how.operands)  # backward reads the input
        ctx.save_for_backward(keep.kept if reads else None)
        x, ctx.entrance = how.entrance.enter(x)
        ctx.start, ctx.how = keep.start, how
        kernel, shape = how.products.of(x).forward, x.shape[:-1]
        wide = widen(flat(x), kernel)
        with computed_by(kernel):
            found = [operand.product(wide, kernel) for operand in how.operands]
        return tuple([in_type(y, x.dtype).view(*shape, -1) for y in found])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        how, start = ctx.how, ctx.start
        operands, kernels, shape = how.operands, how.products.of(grads[0]), grads[0].shape[:-1]
        wide = [widen(flat(grad), kernels.input_gradient) for grad in grads]
        coming = None if kept is None or how.later.is_deferred else start(kept)  # behind the product of dx
        dx, arriving = None, Pending(None)
        if ctx.needs_input_grad[0]:
            dx = input_gradient(wide, [operand.used for operand in operands], kernels.input_gradient)
            dx, arriving = ctx.entrance.start_back(in_type(dx, grads[0].dtype).view(*shape, -1))

        def add_gradients() -> None:
            x = None
            if kept is not None:
                x, arrival = coming or start(kept)
                arrival.wait()
            for grad, operand in zip(wide, operands, strict=True):
                operand.add_gradients(grad, x, kernels.weight_gradient)

        if any(operand.is_trained for operand in operands):
            how.later.add(add_gradients)  # while dx is on its way
        arriving.wait()
        return dx, None, None, *[None] * 2 * len(operands)


def linears(
    x: Tensor,
    operands: Sequence[Operand],
    *,
    weight_gradients: WeightGradients | None = None,
    keep: Input | None = None,
    entrance: Entrance | None = None,
    products: Products | None = None,
) -> tuple[Tensor, ...]:
    """x Wᵀ + b of each operand: [..., i] -> [..., o] each. Backward adds to `weight.grad` and `bias.grad` directly,
    when `weight_gradients` says (None: at once), from `keep` (None: x itself).

    `entrance`: x is what it is entered with (None: nothing is sent), once for all operands. Its gradient is on its way
    back while the weight gradients are computed, and what those read of other ranks comes while it is computed.
    `products`: the kernels (None: the usual ones).
    """
    keep = Input(x.detach()) if keep is None else keep
    later, entrance = weight_gradients or WeightGradients(), entrance or Entrance(Axis("tp"), cut=False)
    pairs = [tensor for operand in operands for tensor in operand[:2]]
    found: Any = apply(_Linear, x, keep, _How(operands, later, entrance, products or usual()), *pairs)
    return tuple(found)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_gradients: WeightGradients | None = None,
    products: Products | None = None,
) -> Tensor:
    """As `linears`, of one weight, whose input is there already."""
    (y,) = linears(x, [Operand(weight, bias)], weight_gradients=weight_gradients, products=products)
    return y


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(bias)
        ctx.products = products
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (bias,) = ctx.saved_tensors
        if bias.requires_grad:
            kernel = ctx.products.of(grad).weight_gradient
            add_rows_(gradient_of(bias), flat(grad), kernel)
        return grad, None, None


def add_bias(x: Tensor, bias: Tensor, *, products: Products | None = None) -> Tensor:
    """x + b: [..., o] -> [..., o]. Backward adds to `bias.grad` directly."""
    y: Tensor = apply(_AddBias, x, bias, products or usual())
    return y
