"""Products that add their weight gradients themselves, against torch's own."""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.kernels.choice import AS_THEY_ARE, KERNELS, WIDENED, Kernel, Kernels, Products
from colonnade.kernels.products import (
    Input,
    Operand,
    WeightGradients,
    add_bias,
    add_product_,
    computed_by,
    gradient_of,
    linear,
    linears,
    widen,
)
from colonnade.kernels.timing import is_exact
from colonnade.mesh.transport import Pending
from tests.emulated import Noted
from tests.tensor_parallel.shards import drawn


def both(bias: bool, seed: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(y, dx, dW[, db]) of ours and of torch."""
    results = []
    for product in (linear, nn.functional.linear):
        x = drawn(3, 2, 8, seed=seed).requires_grad_()
        weight = nn.Parameter(drawn(5, 8, seed=seed + 1))
        offset = nn.Parameter(drawn(5, seed=seed + 2)) if bias else None
        y = product(x, weight, offset)
        y.backward(drawn(3, 2, 5, seed=seed + 3))
        parameters = [weight] if offset is None else [weight, offset]
        gradients = [t.grad for t in (x, *parameters) if t.grad is not None]
        assert len(gradients) == len(parameters) + 1
        results.append((y.detach(), *gradients))
    return results[0], results[1]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_torchs(bias: bool) -> None:
    ours, theirs = both(bias)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-13, atol=1e-13)


def test_an_input_without_gradient() -> None:
    """For which no product is computed."""
    weight = nn.Parameter(drawn(5, 8, seed=1))
    with Noted() as products:
        linear(drawn(2, 8, seed=0), weight).sum().backward()
    assert [name for name, *_ in products.seen] == ["mm", "addmm_"]
    torch.testing.assert_close(weight.grad, drawn(2, 8, seed=0).sum(0).expand(5, 8), rtol=1e-13, atol=1e-13)


def test_a_bias_learns_beside_a_frozen_weight() -> None:
    weight, bias = nn.Parameter(drawn(5, 8, seed=1), requires_grad=False), nn.Parameter(drawn(5, seed=2))
    linear(drawn(2, 8, seed=0), weight, bias).sum().backward()
    assert weight.grad is None and bias.grad is not None and bias.grad.tolist() == [2.0] * 5


@pytest.mark.parametrize("frozen", [(), (0,), (3,), (0, 2), (0, 1), (2, 3), (0, 1, 2, 3)])
def test_several_weights_and_parts_of_one_multiply_one_input(frozen: tuple[int, ...]) -> None:
    """Its gradient is the sum of theirs; what is frozen has none, and rows that are not used get nothing."""
    shapes, found = [(6, 8), (6,), (3, 8), (3,)], []
    for product in (linears, lambda x, operands: [nn.functional.linear(x, w[r], b[r]) for w, b, r in operands]):
        weight, bias, other, shift = (
            nn.Parameter(drawn(*shape, seed=i), requires_grad=i not in frozen) for i, shape in enumerate(shapes)
        )
        x = drawn(3, 2, 8, seed=9).requires_grad_()
        rows = (slice(4, 6), slice(1, 4))
        operands = [*(Operand(weight, bias, each) for each in rows), Operand(other, shift)]
        outs = product(x, operands)
        torch.autograd.backward(list(outs), [drawn(*out.shape, seed=20 + i) for i, out in enumerate(outs)])
        found.append([*outs, x.grad, weight.grad, bias.grad, other.grad, shift.grad])
    assert [each is None for each in found[0][4:]] == [i in frozen for i in range(4)]
    for mine, expected in zip(*found, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("deferred", [False, True])
def test_what_a_weight_gradient_reads_is_made_when_it_is_computed(deferred: bool) -> None:
    """From what is kept; of a frozen weight nothing is kept, and nothing made."""
    kept, made, gradients = drawn(2, 8, seed=3), list[Any](), WeightGradients()

    def start(given: Tensor) -> tuple[Tensor, Pending]:
        made.append(given)
        return 2 * given, Pending(None)

    x, weight = drawn(2, 8, seed=0).requires_grad_(), nn.Parameter(drawn(5, 8, seed=1))
    frozen, bias = nn.Parameter(drawn(5, 8, seed=1), requires_grad=False), nn.Parameter(drawn(5, seed=2))
    with gradients.deferred() if deferred else nullcontext() as queue:
        assert gradients.is_deferred is deferred
        for operand in (Operand(weight), Operand(frozen, bias)):
            (y,) = linears(x, [operand], weight_gradients=gradients, keep=Input(kept, start))
            y.sum().backward()
        assert len(made) == (0 if deferred else 1)
    if queue is not None:
        queue.run()
    (given,) = made
    assert torch.equal(given, kept) and frozen.grad is None and bias.grad is not None
    torch.testing.assert_close(weight.grad, 2 * kept.sum(0).expand(5, 8), rtol=1e-13, atol=1e-13)


def test_gradients_are_added_to_the_buffer_that_is_there() -> None:
    weight = nn.Parameter(drawn(5, 8, seed=1))
    flat = torch.ones(40, dtype=torch.float64)
    weight.grad = flat.view(5, 8)
    x = drawn(2, 8, seed=0)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(flat.view(5, 8), 1 + x.sum(0).expand(5, 8), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_gradients_are_at_least_fp32(dtype: torch.dtype, wide: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    gradient = gradient_of(weight)
    assert gradient.dtype is wide and not gradient.any() and gradient_of(weight) is gradient is weight.grad


def test_products_are_added_in_the_type_of_the_total() -> None:
    a, b = drawn(64, 3, seed=1).bfloat16(), drawn(64, 4, seed=2).bfloat16()
    total = torch.full((3, 4), 1000.0)
    add_product_(total, a, b)
    expected = 1000 + a.double().t() @ b.double()
    # where bf16 products are rounded to bf16, that is half a unit in the 8th bit of a product of size ~ 20
    assert (total - expected).abs().max() <= 2.0**-9 * (expected - 1000).abs().max()


def test_bf16_results_are_the_rounded_exact_ones() -> None:
    x, weight, bias = (drawn(*shape, seed=seed).bfloat16() for seed, shape in enumerate([(7, 64), (5, 64), (5,)]))
    exact = x.double() @ weight.double().t() + bias.double()
    y = linear(x, weight, bias)
    assert y.dtype is torch.bfloat16
    # one rounding of the sum (2⁻⁹), and one of the product before it where the bias is added apart
    assert ((y - exact).abs() <= 2.0**-8 * (exact.abs() + bias.double().abs()) + 1e-5).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_16_bits_are_ever_widened(kernel: Kernel) -> None:
    assert widen(torch.ones(1), kernel).dtype is torch.float32
    assert widen(torch.ones(1).double(), kernel).dtype is torch.float64
    for narrow in (torch.bfloat16, torch.float16):
        assert widen(torch.ones(1, dtype=narrow), kernel).dtype is (
            narrow if kernel in ("native", "compiled") else torch.float32
        )


def test_weight_gradients_run_at_once_or_from_their_queue() -> None:
    done: list[int] = []
    gradients = WeightGradients()
    gradients.add(lambda: done.append(0))
    with gradients.deferred() as queue:
        gradients.add(lambda: done.append(1))
        gradients.add(lambda: done.append(2))
        assert done == [0]
    gradients.add(lambda: done.append(3))
    with gradients.deferred() as other:
        gradients.add(lambda: done.append(4))
    queue.run()
    assert done == [0, 3, 1, 2], "in their order, and only this queue's"
    queue.run()
    other.run()
    assert done == [0, 3, 1, 2, 4], "and only once"


def test_queues_do_not_nest() -> None:
    gradients = WeightGradients()
    with gradients.deferred(), pytest.raises(AssertionError, match="one queue at a time"), gradients.deferred():
        pass
    with pytest.raises(ZeroDivisionError), gradients.deferred():
        _ = 1 / 0
    with gradients.deferred():
        pass  # an error closes the queue


def test_what_waits_lets_go_of_its_tensors_one_by_one() -> None:
    gradients = WeightGradients()
    alive: list[Any] = []
    weight = nn.Parameter(drawn(5, 8, seed=1))
    with gradients.deferred() as queue:
        for seed in range(2):
            x = drawn(2, 8, seed=seed)
            alive.append(weakref.ref(x.untyped_storage()))
            linear(x, weight, weight_gradients=gradients).sum().backward()
            del x
        gradients.add(lambda: alive.append(alive[0]() is None and alive[1]() is None))
    assert alive[0]() is not None and weight.grad is None
    queue.run()
    assert alive[-1] is True


def test_an_added_bias_is_torchs() -> None:
    x, bias = drawn(3, 2, 5, seed=0).requires_grad_(), nn.Parameter(drawn(5, seed=1))
    y = add_bias(x, bias)
    assert torch.equal(y, x + bias)
    grad = drawn(3, 2, 5, seed=2)
    y.backward(grad)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)), rtol=1e-13, atol=1e-13)
    assert torch.equal(x.grad, grad)  # type: ignore[arg-type]
    frozen = nn.Parameter(drawn(5, seed=1), requires_grad=False)
    add_bias(x, frozen).backward(grad)
    assert frozen.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_biass_gradient_is_summed_in_fp32(dtype: torch.dtype) -> None:
    bias = nn.Parameter(torch.zeros(1, dtype=dtype))
    for _ in range(3):
        add_bias(torch.zeros(4099, 1, dtype=dtype, requires_grad=True), bias).sum().backward()
    assert bias.grad is not None and bias.grad.item() == 3 * 4099.0  # which 16 bits do not have


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_overflow_stays_visible(dtype: torch.dtype) -> None:
    """A gradient that 16 bits cannot hold is infinite or NaN, in x's and in the weight's."""
    x = torch.ones(2, 4, dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.ones(3, 4, dtype=dtype))
    linear(x, weight).backward(torch.full((2, 3), torch.inf, dtype=dtype))
    assert x.grad is not None and weight.grad is not None
    assert not x.grad.isfinite().any() and not weight.grad.isfinite().any()
    if dtype is torch.float16:
        x.grad = None
        linear(x, weight).backward(torch.full((2, 3), 60000.0, dtype=dtype))
        assert x.grad is not None and x.grad.isinf().all(), "3 × 60,000 is more than 65,504"
        assert weight.grad is not None


def test_what_fp32_products_are_computed_by_is_as_it_was_before() -> None:
    """Only oneDNN's needs a setting, and that is put back after an error too."""
    setting = torch.backends.mkldnn.matmul
    before, seen = setting.fp32_precision, []
    for kernel in KERNELS:
        with pytest.raises(ZeroDivisionError), computed_by(kernel):
            seen.append(setting.fp32_precision)
            raise ZeroDivisionError
    assert dict(zip(KERNELS, seen, strict=True)) == {
        "native": before,
        "blas": before,
        "onednn": "bf16",
        "compiled": before,
    }
    assert setting.fp32_precision == before != "bf16"


def test_each_product_is_computed_by_the_kernel_of_its_use() -> None:
    """Which setting holds, and which type of operands comes, at each product of a layer, forward and backward."""
    plain, narrow, wide = torch.backends.mkldnn.matmul.fp32_precision, torch.bfloat16, torch.float32
    for kernels, expected in {
        Kernels("native", "native", "blas"): [("mm", plain, narrow), ("mm", plain, narrow), ("addmm_", plain, wide)],
        Kernels("onednn", "blas", "onednn"): [("mm", "bf16", wide), ("mm", plain, wide), ("addmm_", "bf16", wide)],
        Kernels("blas", "onednn", "blas"): [("mm", plain, wide), ("mm", "bf16", wide), ("addmm_", plain, wide)],
    }.items():
        x = drawn(4, 8, seed=0).bfloat16().requires_grad_()
        with Noted() as products:
            linear(x, nn.Parameter(drawn(5, 8, seed=1).bfloat16()), products=Products(bf16=kernels)).sum().backward()
        assert products.seen == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_kernels_give_the_same_but_for_rounding(kernel: Kernel, dtype: torch.dtype) -> None:
    if not all(is_exact(kernel, use, dtype) for use in ("forward", "input_gradient", "weight_gradient")):
        pytest.skip(f"on this processor {kernel} rounds {dtype} to bf16, and is never chosen")
    found = []
    for kernels in (Kernels(kernel, kernel, "blas" if kernel == "native" else kernel), WIDENED):
        x = drawn(64, 96, seed=0).to(dtype).requires_grad_()
        weight = nn.Parameter(drawn(80, 96, seed=1).to(dtype))
        y = linear(x, weight, products=Products(kernels, kernels, kernels))
        y.backward(drawn(64, 80, seed=2).to(dtype))
        assert x.grad is not None and weight.grad is not None and weight.grad.dtype is torch.float32
        found.append((y.detach(), x.grad, weight.grad))
    for (mine, expected), limit in zip(zip(*found, strict=True), (True, True, False), strict=True):
        bound = 2 * torch.finfo(dtype).eps if limit else 1e-5
        assert (mine.double() - expected.double()).norm() <= bound * expected.double().norm()


def test_fp64_is_multiplied_as_it_is_whatever_is_decided() -> None:
    others = Kernels("onednn", "onednn", "onednn", "onednn", "native")
    assert Products(others, others, others).of(torch.ones(1).double()) == AS_THEY_ARE
