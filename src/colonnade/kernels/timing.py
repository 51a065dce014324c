"""How fast each kernel multiplies on this processor, and how exactly: what a choice among them is made from.

Of each use (`choice.Use`) every candidate is run on slices of a model's own matrices, on drawn numbers:

    refuse    those whose product is further from its float64 twin than rounding explains: an fp32 product that was
              rounded to bf16 on the way is off by 2e-3, a true one by some 1e-7
    time      the others in turn, A B C A B C …, on one core. The least time counts, and it is this thread's own: what
              other programs take meanwhile is not in it, and no thread waits for one that they hold up
    choose    the fastest, but one that spares memory, or the usual one, where it is not clearly slower: a choice does
              not hang on noise

A candidate includes what it does to its operands and its result: widening them, rounding it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.kernels import compiled
from colonnade.kernels.attention import attend
from colonnade.kernels.choice import USES, Kernel, Kernels, Products, Use, has_onednn
from colonnade.kernels.compiled import output_blocks
from colonnade.kernels.products import (
    Operand,
    add_product_,
    add_products_,
    computed_by,
    exact,
    fp32_product_,
    input_gradient,
    output_exponentials_,
    widen,
)

TRUE_FP32 = 1e-6
"""[of the norm] A product of fp32 sums over a few hundred numbers is off by less."""
ROUNDINGS = 1.5
"""A 16-bit result is off by at most so many times the error of one rounding to it."""
CLEARLY = 1.03
"""The usual kernel is left where another takes less than 1/CLEARLY of its time."""
FRUGAL: Mapping[Use, tuple[Kernel, float]] = MappingProxyType(
    {"output": ("compiled", 1.15), "forward": ("native", 1.05), "input_gradient": ("native", 1.05)}
)
"""What goes through memory less often than others, and is left where another takes less than 1/(the number) of its
time. Cores share memory, and what a slice makes (logits, results in fp32 before they are rounded to 16 bits) fits a
cache: on one core, and on slices, it hardly shows (figures: docs/design/04-products-by-measurement.md)."""
HOPELESS = 4.0
"""Times as slow as the fastest on a small product: not tried on larger ones."""
SECONDS = 0.4
"""Rounds go on so long; each candidate has ROUNDS at least, of which the first prepares."""
ROUNDS = 3

Seconds = dict[Use, dict[Kernel, float]]
"""Of one core for one call, of candidates that are exact enough."""


class Slices(NamedTuple):
    """Sizes of what is timed."""

    tokens: int
    inputs: int
    outputs: int
    """Of a linear layer, [t, i] -> [t, o]."""
    rows: int
    """Of the output layer, [t, width] -> [t, rows]."""
    width: int
    heads: int
    positions: int
    head_width: int

    @property
    def flops(self) -> dict[Use, float]:
        """Of one call of each use; attention's, forward and backward, of its causal half."""
        linear = 2.0 * self.tokens * self.inputs * self.outputs
        attention = 7.0 * self.heads * self.positions**2 * self.head_width
        output = 6.0 * self.tokens * self.width * self.rows
        return {
            "forward": linear,
            "input_gradient": linear,
            "weight_gradient": linear,
            "output": output,
            "attention": attention,
        }


SMALL = Slices(tokens=48, inputs=256, outputs=96, rows=96, width=256, heads=2, positions=48, head_width=32)
"""Of the comparison with float64: sums long enough to be rounded, and soon computed."""


def candidates(dtype: torch.dtype, use: Use) -> tuple[Kernel, ...]:
    """The kernels that there are for a use, the plainest first. One alone: there is nothing to choose."""
    fp32: tuple[Kernel, ...] = ("blas", "onednn") if has_onednn() else ("blas",)
    ours: tuple[Kernel, ...] = ("compiled",) if compiled.is_loaded() else ()
    if use == "attention":
        ours = ours if dtype in compiled.ATTENTION else ()
        return ("blas", *ours) if dtype is torch.float32 else ("blas", "native", *ours)
    native: tuple[Kernel, ...] = ("native",) if dtype.itemsize == 2 and use in ("forward", "input_gradient") else ()
    return (*fp32, *native, *ours)


@dataclass(frozen=True)
class Trial:
    """One use on drawn operands: what a kernel makes of them, and what is right."""

    run: Callable[[Kernel], object]
    """What is timed."""
    result: Callable[[Kernel], Tensor]
    """By which exactness is judged."""
    right: Callable[[], Tensor]
    """The same in float64."""


def trial(use: Use, dtype: torch.dtype, sizes: Slices) -> Trial:
    """Operands of these sizes, and how they are multiplied."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return _TRIALS[use](drawn, sizes)


Draw = Callable[..., Tensor]


def _forward(drawn: Draw, sizes: Slices) -> Trial:
    x, weight = drawn(sizes.tokens, sizes.inputs), drawn(sizes.outputs, sizes.inputs)

    def run(kernel: Kernel) -> Tensor:
        with computed_by(kernel):
            return Operand(weight).product(widen(x, kernel), kernel).to(x.dtype)

    return Trial(run, run, lambda: x.double() @ weight.double().t())


def _input_gradient(drawn: Draw, sizes: Slices) -> Trial:
    grad, weight = drawn(sizes.tokens, sizes.outputs), drawn(sizes.outputs, sizes.inputs)

    def run(kernel: Kernel) -> Tensor:
        return input_gradient([widen(grad, kernel)], [weight], kernel).to(grad.dtype)

    return Trial(run, run, lambda: grad.double() @ weight.double())


def _weight_gradient(drawn: Draw, sizes: Slices) -> Trial:
    grad, x = drawn(sizes.tokens, sizes.outputs), drawn(sizes.tokens, sizes.inputs)
    total = torch.zeros(sizes.outputs, sizes.inputs, dtype=torch.promote_types(grad.dtype, torch.float32))

    def run(kernel: Kernel) -> Tensor:
        add_product_(total.zero_(), grad, x, kernel)
        return total

    return Trial(run, run, lambda: grad.double().t() @ x.double())


def _output(drawn: Draw, sizes: Slices) -> Trial:
    """Logits and their softmax, then both gradients; exactness is judged by the logits alone: gradients bear one
    rounding of what they are computed from (`tensor_parallel/cross_entropy.py`).
    """
    narrow = drawn(sizes.tokens, sizes.width), drawn(sizes.rows, sizes.width).mul_(sizes.width**-0.5)  # logits near 1
    labels = torch.zeros(sizes.tokens, dtype=torch.int64)
    logits, blocks = torch.empty(sizes.tokens, sizes.rows), output_blocks(sizes.tokens, narrow[1])
    total, dx = torch.zeros(sizes.rows, sizes.width), torch.empty(sizes.tokens, sizes.width)
    wide = exact(narrow[0]), exact(narrow[1])

    def result(kernel: Kernel) -> Tensor:
        if kernel == "compiled":
            return fp32_product_(logits, narrow[0], narrow[1].t())
        with computed_by(kernel):
            return torch.mm(wide[0], wide[1].t(), out=logits)

    def run(kernel: Kernel) -> None:
        if kernel == "compiled":
            output_exponentials_(blocks, dx, *narrow, labels)
            add_products_(total, blocks, narrow[0], kernel)
            return
        result(kernel).amax(-1)
        torch.softmax(logits, -1, out=logits).amax(-1)
        input_gradient([logits], [wide[1]], kernel)
        add_product_(total, logits, wide[0], kernel)

    return Trial(run, result, lambda: narrow[0].double() @ narrow[1].double().t())


def _attention(drawn: Draw, sizes: Slices) -> Trial:
    q, k, v = (drawn(1, sizes.heads, sizes.positions, sizes.head_width).requires_grad_() for _ in range(3))

    def run(kernel: Kernel) -> Tensor:
        kernels = Kernels(attention=kernel)
        y = attend(q, k, v, products=Products(kernels, kernels, kernels))
        torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
        return y.detach()

    return Trial(run, run, lambda: attend(q.detach().double(), k.detach().double(), v.detach().double()))


_TRIALS: Mapping[Use, Callable[[Draw, Slices], Trial]] = MappingProxyType(
    {
        "forward": _forward,
        "input_gradient": _input_gradient,
        "weight_gradient": _weight_gradient,
        "output": _output,
        "attention": _attention,
    }
)


def error(kernel: Kernel, use: Use, dtype: torch.dtype) -> tuple[float, float]:
    """(how far a kernel's product is from its float64 twin, how far it may be), both as shares of the norm.

    (∞, 0) where this process or this processor has no such kernel.
    """
    if kernel == "compiled" and not compiled.is_loaded():
        return math.inf, 0.0
    tried = trial(use, dtype, SMALL)
    right = tried.right()
    try:
        found = tried.result(kernel)
    except RuntimeError:
        if kernel != "compiled":
            raise
        return math.inf, 0.0
    rounding = float((right.to(found.dtype).double() - right).norm() / right.norm())
    # the fused attention kernel rounds probabilities, which it multiplies with, to 16 bits too
    allowed = max(TRUE_FP32, ROUNDINGS * rounding * (2.0 if use == "attention" else 1.0))
    return float((found.double() - right).norm() / right.norm()), allowed


def is_exact(kernel: Kernel, use: Use, dtype: torch.dtype) -> bool:
    """Whether a kernel's products are what they should be on this processor."""
    found, allowed = error(kernel, use, dtype)
    return found <= allowed


Clock = Callable[[], float]


def measure(dtype: torch.dtype, sizes: Slices, *, clock: Clock = time.thread_time) -> Seconds:
    """Seconds of one core for one call of each candidate that is exact enough. Uses with one candidate alone are left
    out.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(dtype, sizes, clock)
    finally:
        torch.set_num_threads(threads)


def _measure(dtype: torch.dtype, sizes: Slices, clock: Clock) -> Seconds:
    every = {use: candidates(dtype, use) for use in USES}
    rivals = {use: _promising(dtype, use, kernels, clock) for use, kernels in every.items() if len(kernels) > 1}
    trials = {use: trial(use, dtype, sizes) for use in rivals}
    least: Seconds = {use: dict.fromkeys(kernels, float("inf")) for use, kernels in rivals.items()}
    started, rounds = time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - started < SECONDS:
        rounds += 1
        for use, times in least.items():
            for kernel in times:
                times[kernel] = min(times[kernel], _seconds(trials[use], kernel, clock))
    return least


def _promising(dtype: torch.dtype, use: Use, kernels: tuple[Kernel, ...], clock: Clock) -> tuple[Kernel, ...]:
    """Those that are exact, and not hopelessly slow already on small operands."""
    good = tuple(kernel for kernel in kernels if is_exact(kernel, use, dtype))
    tried = trial(use, dtype, SMALL)
    times = {kernel: min(_seconds(tried, kernel, clock) for _ in range(ROUNDS)) for kernel in good}
    return tuple(kernel for kernel in good if times[kernel] <= HOPELESS * min(times.values()))


def _seconds(tried: Trial, kernel: Kernel, clock: Clock) -> float:
    started = clock()
    tried.run(kernel)
    return clock() - started


def chosen(measured: Sequence[Seconds], usual: Kernels) -> Kernels:
    """Of each use the kernel for processors on each of which was measured: the one that is the least slower than the
    fastest on the processor that likes it least, or FRUGAL or the usual one where that is not clearly slower.

    What some processor has refused is out. Uses without times keep the usual kernel.
    """
    table: dict[Use, Kernel] = {}
    for use in measured[0]:
        expected = dict([FRUGAL[use]]) if use in FRUGAL else {}
        expected.setdefault(getattr(usual, use), CLEARLY)
        table[use] = _fastest([seconds[use] for seconds in measured], expected)
    return replace(usual, **table)


def _fastest(times: Sequence[Mapping[Kernel, float]], expected: Mapping[Kernel, float]) -> Kernel:
    """`expected`: kernels, the first the most welcome, and how many times as slow as the fastest they may be."""
    common = [kernel for kernel in times[0] if all(kernel in each for each in times)]
    slower = {kernel: max(each[kernel] / min(each.values()) for each in times) for kernel in common}
    best = min(slower, key=lambda kernel: slower[kernel])
    return next((kernel for kernel, by in expected.items() if slower.get(kernel, math.inf) <= by * slower[best]), best)
