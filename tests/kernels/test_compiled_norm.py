"""Backward of norms by the compiled kernel beside float64, and who takes it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm as plain_layer_norm
from torch.nn.functional import rms_norm as plain_rms_norm

from colonnade.kernels import compiled
from colonnade.kernels.choice import Kernels, Products
from colonnade.kernels.norm import layer_norm, rms_norm

EPSILON = 1e-3
COMPILED = Kernels(forward="native", weight_gradient="compiled")
PRODUCTS = Products(fp32=COMPILED, bf16=COMPILED, fp16=COMPILED)
SHAPES = [(1, 1, 4), (3, 5, 37), (7, 1, 16), (67, 31, 96)]
"""Rows fewer than parts of the sum and more, and of which the last part has others' number; odd widths. The last is
worth several threads."""
ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def error(found: Tensor | None, right: Tensor | None) -> float:
    assert found is not None and right is not None
    return float((found.double() - right).norm() / right.norm())


def gradients(
    kind: str, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, grad: Tensor, products: Products | None
) -> Tensor | None:
    """Of x; those of weight and bias are added to theirs."""
    leaf = x.clone().requires_grad_()
    if kind == "rms":
        y = rms_norm(leaf, weight, EPSILON, x.dtype, products=products)
    else:
        y = layer_norm(leaf, weight, bias, EPSILON, x.dtype, products=products)
    y.backward(grad)  # type: ignore[no-untyped-call]
    return leaf.grad


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The type of each gradient that the compiled kernel is given."""
    found, kernel = list[torch.dtype](), compiled.norm_backward

    def noted(grad: Tensor, *rest: Tensor, **more: Tensor | None) -> Tensor:
        found.append(grad.dtype)
        return kernel(grad, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(compiled, "norm_backward", noted)
    return found


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias"])
@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
def test_all_gradients_are_those_of_float64(
    dtype: torch.dtype, kind: str, shape: tuple[int, ...], calls: list[torch.dtype]
) -> None:
    """Of inputs with a mean and of gradients with one, added to what there is already. x and the gradient do not lie
    in one piece.
    """
    generator = torch.Generator().manual_seed(0)
    h = shape[-1]
    x, grad = ((torch.randn(h, *shape[:2], generator=generator) + 0.7).to(dtype).permute(1, 2, 0) for _ in range(2))
    weight = nn.Parameter(torch.randn(h, generator=generator) + 1.0)
    bias = nn.Parameter(torch.randn(h, generator=generator)) if kind == "layer" else None
    before = torch.randn(2, h, generator=generator)
    weight.grad, exact = before[0].clone(), [x.double().requires_grad_(), weight.detach().double().requires_grad_()]
    if bias is not None:
        bias.grad = before[1].clone()
        exact.append(bias.detach().double().requires_grad_())
    plain = plain_rms_norm if kind == "rms" else plain_layer_norm
    plain(exact[0], (h,), *exact[1:], eps=EPSILON).backward(grad.double())  # type: ignore[no-untyped-call,operator]

    dx = gradients(kind, x, weight, bias, grad, PRODUCTS)
    assert calls == [dtype]
    assert dx is not None and dx.dtype == dtype
    assert error(dx, exact[0].grad) < ROUNDED[dtype]
    for parameter, was, right in zip([weight, bias], before, exact[1:], strict=False):
        assert parameter is not None and parameter.grad is not None and right.grad is not None
        assert error(parameter.grad, was.double() + right.grad) < 2e-6, "summed in fp32 of what is not rounded"


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("trained", ["neither", "weight", "bias"])
def test_only_what_is_trained_has_a_gradient(trained: str, calls: list[torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, 3, 4, 8, generator=generator)
    weight = nn.Parameter(torch.randn(8, generator=generator), trained == "weight")
    bias = nn.Parameter(torch.randn(8, generator=generator), trained == "bias")
    dx = gradients("layer", x, weight, bias, grad, PRODUCTS)
    found = weight.grad, bias.grad
    assert calls == [torch.float32]
    weight.grad = bias.grad = None
    torch.testing.assert_close(dx, gradients("layer", x, weight, bias, grad, None))
    for got, wanted in zip(found, (weight.grad, bias.grad), strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted)


@pytest.mark.usefixtures("loaded")
def test_the_number_of_threads_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(400, 3, 64, generator=generator).bfloat16() for _ in range(2))
    weight, before = nn.Parameter(torch.randn(64, generator=generator)), torch.get_num_threads()
    found = list[tuple[Tensor | None, Tensor | None]]()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weight.grad = None
            found.append((gradients("rms", x, weight, None, grad, PRODUCTS), weight.grad))
    finally:
        torch.set_num_threads(before)
    for dx, dw in found[1:]:
        assert dx is not None and dw is not None and found[0][0] is not None and found[0][1] is not None
        assert torch.equal(dx, found[0][0]) and torch.equal(dw, found[0][1])


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_who_has_no_compiled_weight_gradients_has_torchs_backward(kind: str, calls: list[torch.dtype]) -> None:
    """A stream in fp32 of a model in 16 bits too: its gradient is of another type."""
    weight = nn.Parameter(torch.ones(8))
    x, grad = torch.ones(2, 4, 8), torch.ones(2, 4, 8)
    gradients(kind, x, weight, None, grad, Products())
    gradients(kind, x.double(), nn.Parameter(weight.detach().double()), None, grad.double(), PRODUCTS)
    leaf = x.clone().requires_grad_()
    narrow = torch.bfloat16
    y = (
        rms_norm(leaf, weight, EPSILON, narrow, products=PRODUCTS)
        if kind == "rms"
        else layer_norm(leaf, weight, None, EPSILON, narrow, products=PRODUCTS)
    )
    y.backward(grad.to(narrow))  # type: ignore[no-untyped-call]
    assert leaf.grad is not None and leaf.grad.dtype == torch.float32
    with torch.device("meta"):
        gradients(kind, torch.ones(2, 4, 8), nn.Parameter(torch.ones(8)), None, torch.ones(2, 4, 8), PRODUCTS)
    assert calls == []
