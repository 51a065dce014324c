"""The matrix products of a linear layer, and where their weight gradients go.

Every parameter owns its gradient from the start (`parameter.grad`, a view of a flat buffer, fp32 for 16-bit weights),
so a weight gradient is added by the product itself: `grad += gᵀ x` is one GEMM with its sum, where autograd would
make a second tensor of the weight's size and add that. Nothing else in the program may replace `parameter.grad`.

bf16 on a CPU without AMX: its bf16 units are slower than its fp32 units (measured on 2048 × 2048 matrices: 188
against 365 GFLOP/s on two cores of an Emerald Rapids without AMX), so bf16 operands are multiplied in fp32 and the
result is rounded to bf16. The sums are at least as exact as the hardware's own. fp16 is as fast as fp32 on that CPU and
slower on those without fp16 units; it is multiplied in fp32 on all of them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.mesh.autograd import apply
from colonnade.mesh.collectives import Entrance
from colonnade.mesh.mesh import Axis
from colonnade.mesh.transport import Pending


@cache
def multiplies_natively(dtype: torch.dtype, device_type: str) -> bool:
    """Whether matrices of `dtype` are multiplied fastest as they are; otherwise they are widened to fp32 first."""
    if dtype not in (torch.bfloat16, torch.float16) or device_type != "cpu":
        return True
    return dtype is torch.bfloat16 and bool(torch.cpu._is_amx_tile_supported())


def widen(x: Tensor) -> Tensor:
    """`x` in the type that its products are computed in."""
    return x if multiplies_natively(x.dtype, x.device.type) else x.float()


def gradient_of(parameter: Tensor) -> Tensor:
    """The parameter's gradient, zeros at first where nobody gave it a buffer: fp32 for 16-bit weights."""
    if parameter.grad is None:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        parameter.grad_dtype = dtype
        parameter.grad = torch.zeros_like(parameter, dtype=dtype)
    return parameter.grad


@contextmanager
def products_of_16_bits(x: Tensor) -> Iterator[None]:
    """Within, the CPU may multiply fp32 matrices in bf16 units with fp32 sums, if `x` is bf16 and it has them.

    The way to an fp32 result from such units: products of bf16 matrices round theirs to bf16.
    """
    if x.is_cuda or x.dtype is not torch.bfloat16 or not multiplies_natively(x.dtype, x.device.type):
        yield
        return
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, products.fp32_precision = products.fp32_precision, "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before


def exact(x: Tensor) -> Tensor:
    """`x` in a type whose products come out in fp32 or fp64: on CPUs, 16 bits are widened."""
    return x if x.is_cuda or x.dtype.itemsize > 2 else x.float()


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += aᵀ b, summed in the type of `total` and never rounded to 16 bits: a [k, m], b [k, n], total [m, n]."""
    if a.dtype.itemsize == 2 and a.is_cuda:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
        return
    with products_of_16_bits(a):
        total.addmm_(exact(a).t(), exact(b))


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


def _as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Input:
    """What a linear layer keeps of its input until the weight gradient is computed."""

    kept: Tensor
    whole: Callable[[Tensor], Tensor] = _as_it_is
    """Makes the layer's input from `kept`."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        later: WeightGradients,
        kept: Tensor,
        whole: Any,
        entrance: Entrance,
    ) -> Tensor:
        ctx.save_for_backward(kept, weight, bias)
        x, ctx.entrance = entrance.enter(x)
        ctx.later, ctx.whole = later, whole
        rows = widen(x.reshape(-1, x.shape[-1]))
        wide_bias = None if bias is None else bias.to(rows.dtype)
        y = nn.functional.linear(rows, widen(weight), wide_bias)
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, bias = ctx.saved_tensors
        rows, whole = widen(grad.reshape(-1, grad.shape[-1])), ctx.whole
        dx, arriving = None, Pending(None)
        if ctx.needs_input_grad[0]:
            dx = (rows @ widen(weight)).to(grad.dtype).view(*grad.shape[:-1], -1)
            dx, arriving = ctx.entrance.start_back(dx)

        def add_gradients() -> None:
            add_product_(gradient_of(weight), rows, whole(kept).reshape(-1, weight.shape[-1]))
            if bias is not None:
                gradient = gradient_of(bias)
                gradient.add_(rows.sum(0, dtype=gradient.dtype))

        ctx.later.add(add_gradients)  # while dx is on its way
        arriving.wait()
        return dx, None, None, None, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_gradients: WeightGradients | None = None,
    keep: Input | None = None,
    entrance: Entrance | None = None,
) -> Tensor:
    """x Wᵀ + b: [..., i] -> [..., o]. Backward adds to `weight.grad` and `bias.grad` directly, when `weight_gradients`
    says (None: at once), from `keep` (None: x itself).

    `entrance`: x is what it is entered with (None: nothing is sent); the gradient of x is on its way back while the
    weight gradient is computed.
    """
    keep = Input(x.detach()) if keep is None else keep
    later, entrance = weight_gradients or WeightGradients(), entrance or Entrance(Axis("tp"), cut=False)
    y: Tensor = apply(_Linear, x, weight, bias, later, keep.kept, keep.whole, entrance)
    return y


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (bias,) = ctx.saved_tensors
        gradient = gradient_of(bias)
        gradient.add_(grad.reshape(-1, grad.shape[-1]).sum(0, dtype=gradient.dtype))
        return grad, None


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """x + b: [..., o] -> [..., o]. Backward adds to `bias.grad` directly."""
    y: Tensor = apply(_AddBias, x, bias)
    return y
