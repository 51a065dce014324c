"""What one core takes for products and for other operators of torch: figures of a machine's description.

products      the three of a linear layer, of several sizes, by the kernels that a run here would choose, on operands
              that lie outside the caches of one core, as those of a step do. The peak and the half sizes are those that
              bring the roofline nearest to what all of them took; of other number formats, the peak alone
attention     fused, its forward and its backward
operators     seconds an element, of those whose arithmetic may take longer than their bytes

All by the time that this process has had of its core, so that others disturb it less.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from colonnade.kernels.choice import Kernels, Products, Use, usual
from colonnade.kernels.timing import chosen, measure, trial
from colonnade.model.precision import DTYPES
from colonnade.planner.cost import CAUSAL, share_of_peak
from colonnade.train.products import LARGEST

LINEAR: tuple[Use, ...] = ("forward", "input_gradient", "weight_gradient")
SIZES = (
    *((128, 64, 64), (128, 64, 256), (256, 128, 128), (256, 128, 512), (256, 512, 128), (256, 256, 256)),
    *((256, 256, 1024), (256, 1024, 256), (512, 256, 512), (512, 512, 512), (256, 384, 1536), (512, 768, 768)),
)
"""(tokens, inputs, outputs)"""
LARGE = SIZES[-3:]
OUTSIDE = 24 << 20
"""[bytes] Of operands that are used in turn."""
ATTENTION, HEAD_DIMS = (2, 4, 128), (16, 64)
"""[samples, heads, positions] that fused attention is timed on, with heads of these dimensions."""
PRODUCTS_FORWARD, PRODUCTS_BACKWARD = 2, 5
"""Of matrices, as torch counts those of fused attention: backward makes the probabilities again."""
ROWS = (1024, 256)
"""Of the elements that other operators are timed on."""
TIMES = 7
FORMATS = tuple(each.name for each in fields(Products))
"""The number formats in which there is a choice of kernels."""


class Timed(NamedTuple):
    """A product beside its time."""

    use: Use
    size: tuple[int, int, int]
    """(m, n, k) of [m, k] · [k, n]"""
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * math.prod(self.size)


class Roof(NamedTuple):
    """How fast products are: see `cost.py`."""

    peak: float
    """[FLOP/s]"""
    half_area: float
    half_depth: float

    def seconds(self, timed: Timed) -> float:
        """[s] That a product of this size takes by these figures."""
        m, n, k = timed.size
        return timed.flops / (self.peak * share_of_peak(m * n, k, self.half_area, self.half_depth))

    def error(self, every: Iterable[Timed]) -> float:
        """How far these figures are from what was measured: Σ |log planned ÷ measured|."""
        return sum(abs(math.log(self.seconds(each) / each.seconds)) for each in every)


def products_here() -> Products:
    """The kernels that runs of some size choose on this processor."""
    found = usual()
    for precision in FORMATS:
        found = found.having(precision, chosen([measure(DTYPES[precision], LARGEST)], getattr(found, precision)))
    return found


def timed(dtype: torch.dtype, products: Products, sizes: Iterable[tuple[int, int, int]]) -> list[Timed]:
    """The three products of linear layers of these sizes, by the kernels that runs multiply this type with."""
    kernels = products.of(torch.empty(0, dtype=dtype))
    return [_timed(dtype, kernels, use, size) for size in sizes for use in LINEAR]


def _timed(dtype: torch.dtype, kernels: Kernels, use: Use, size: tuple[int, int, int]) -> Timed:
    tokens, inputs, outputs = size
    cut = LARGEST._replace(tokens=tokens, inputs=inputs, outputs=outputs)
    bytes_of_one = dtype.itemsize * (tokens * inputs + tokens * outputs) + 4 * inputs * outputs
    tried = [trial(use, dtype, cut) for _ in range(2 + OUTSIDE // bytes_of_one)]
    kernel = getattr(kernels, use)

    def every() -> None:
        for each in tried:
            each.run(kernel)

    m, n, k = {"forward": (tokens, outputs, inputs), "input_gradient": (tokens, inputs, outputs)}.get(
        use, (outputs, inputs, tokens)
    )
    return Timed(use, (m, n, k), fastest(every) / len(tried))


def fitted(every: Iterable[Timed]) -> Roof:
    """The figures with the least error."""
    every = list(every)
    most = max(each.flops / each.seconds for each in every)
    grid = product(
        (most * share for share in (1.0, 1.02, 1.05, 1.1, 1.15)),
        (0.0, 100.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0, 30000.0),
        (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
    )
    return min((Roof(*figures) for figures in grid), key=lambda roof: roof.error(every))


def peak_of(every: Iterable[Timed], like: Roof) -> float:
    """[FLOP/s] With the half sizes of `like`, the median that products took."""
    peaks = sorted(like.peak * like.seconds(each) / each.seconds for each in every)
    return peaks[len(peaks) // 2]


def attention_of(narrow: float, wide: float, peak: float) -> tuple[float, float]:
    """(rate that no head is too narrow for [FLOP/s], dimension that reaches half of it), of the rates of HEAD_DIMS.

    No rate is above `peak` [FLOP/s]: that of the wide head is met in any case.
    """
    few, many = HEAD_DIMS
    gain = max(1.0, wide / narrow)
    half = few * many * (gain - 1) / (many - few * gain) if gain < many / few else math.inf
    half = min(half, many * max(0.0, peak / wide - 1))
    return wide * (many + half) / many, half


def attention_rate(width: int) -> float:
    """[FLOP/s] Of causal attention, forward and backward, of what it computes: half of a full one's."""
    batch, heads, length = ATTENTION
    q, k, v = (torch.randn(*ATTENTION, width, requires_grad=True) for _ in range(3))
    ones = torch.ones(*ATTENTION, width)

    def call() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), ones)

    flops = 2 * batch * heads * length * length * width
    return CAUSAL * (PRODUCTS_FORWARD + PRODUCTS_BACKWARD) * flops / fastest(call, repeat=20)


def seconds_an_element() -> dict[str, float]:
    """By the name that `operators.py` has for it."""
    return {name: fastest(call, repeat=4) / math.prod(ROWS) for name, call in _calls()}


def _calls() -> Iterator[tuple[str, Callable[[], object]]]:
    x, grad, aten = torch.randn(ROWS), torch.randn(ROWS), torch.ops.aten
    mask, width = x > 0, [ROWS[-1]]
    _, mean, deviation = aten.native_layer_norm(x, width, None, None, 1e-5)
    yield "gelu", partial(aten.gelu, x)
    yield "gelu_tanh", partial(aten.gelu, x, approximate="tanh")
    yield "gelu_backward", partial(aten.gelu_backward, grad, x)
    yield "gelu_backward_tanh", partial(aten.gelu_backward, grad, x, approximate="tanh")
    yield "silu", partial(aten.silu, x)
    yield "silu_backward", partial(aten.silu_backward, grad, x)
    yield "exp", x.exp
    yield "log", x.abs().log
    yield "tanh", x.tanh
    yield "sigmoid", x.sigmoid
    yield "_softmax", partial(x.softmax, -1)
    yield "_log_softmax", partial(x.log_softmax, -1)
    yield "native_layer_norm", partial(aten.native_layer_norm, x, width, None, None, 1e-5)
    norm = partial(aten.native_layer_norm_backward, grad, x, width, mean, deviation, None, None)
    yield "native_layer_norm_backward", partial(norm, [True, False, False])
    yield "gt", partial(torch.gt, x, grad)
    yield "where", partial(torch.where, mask, x, grad)


def fastest(call: Callable[[], object], *, repeat: int = 1, clock: Callable[[], float] = time.process_time) -> float:
    """[s] Of one call, of this process on its core; `clock`: another one, where others are waited for."""
    least = float("inf")
    for _ in range(TIMES):
        began = clock()
        for _ in range(repeat):
            call()
        least = min(least, (clock() - began) / repeat)
    return least
