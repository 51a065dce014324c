"""GELU by the compiled kernel beside float64, and who takes it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from colonnade.config.model import ModelConfig
from colonnade.kernels import compiled
from colonnade.kernels.choice import Kernels, Products
from colonnade.kernels.gelu import gelu
from colonnade.mesh.mesh import Axis
from colonnade.model.mlp import MLP
from colonnade.tensor_parallel.parallel import Parallel

COMPILED = Kernels(forward="native", weight_gradient="compiled")
PRODUCTS = Products(fp32=COMPILED, bf16=COMPILED, fp16=COMPILED)
APPROXIMATIONS = ("none", "tanh")
ROUNDED = {torch.float32: 3e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""In 16 bits what one number is off at most by being rounded: 2⁻⁸ and 2⁻¹¹ of itself."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each call of a compiled kernel."""
    found = list[str]()

    def noted(name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*given: Tensor, tanh: bool) -> Tensor:
            found.append(f"{name} {tanh}")
            return kernel(*given, tanh=tanh)

        return call

    for name in ("gelu", "gelu_backward"):
        monkeypatch.setattr(compiled, name, noted(name, getattr(compiled, name)))
    return found


def both(x: Tensor, grad: Tensor, approximation: str, products: Products) -> tuple[Tensor, Tensor]:
    """GELU, and the gradient of x."""
    leaf = x.detach().clone().requires_grad_()
    y = gelu(leaf, approximation, products)
    y.backward(grad)  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return y.detach(), leaf.grad


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("shape", [(1,), (3, 5, 37), (64, 31, 96)], ids=str)
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
def test_it_is_that_of_float64(
    dtype: torch.dtype, approximation: str, shape: tuple[int, ...], calls: list[str]
) -> None:
    """Also where numbers do not lie in one piece; the last shape is worth several threads."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(*shape, generator=generator).mul_(2).to(dtype).movedim(0, -1) for _ in range(2))
    exact = x.double().requires_grad_()
    wanted = functional.gelu(exact, approximate=approximation)
    (slope,) = torch.autograd.grad(wanted, exact, grad.double())
    found = both(x, grad, approximation, PRODUCTS)
    assert calls == [f"gelu {approximation == 'tanh'}", f"gelu_backward {approximation == 'tanh'}"]
    for got, right in zip(found, (wanted.detach(), slope), strict=True):
        assert got.dtype == dtype and got.shape == x.shape
        assert float((got.double() - right).norm() / right.norm()) < ROUNDED[dtype]
        if dtype != torch.float32:
            nearest = right.to(torch.float32).to(dtype)
            assert float((got == nearest).double().mean()) > 0.95, "computed in fp32, and rounded once"


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_each_number_is_as_near_as_torchs(approximation: str) -> None:
    """From −12 to 12, where squares and cubes are still small, and far outside, where they are not."""
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([-1e18, -1e5, -88.0, 88.0, 1e5, 1e18])])
    exact = x.double().requires_grad_()
    wanted = functional.gelu(exact, approximate=approximation)
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    y, dx = both(x, torch.ones_like(x), approximation, PRODUCTS)
    torch.testing.assert_close(y.double(), wanted.detach(), rtol=2e-7, atol=4e-7)
    torch.testing.assert_close(dx.double(), slope, rtol=2e-7, atol=4e-7)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_what_is_no_number_stays_none(approximation: str) -> None:
    """A run that has diverged must be seen."""
    x = torch.full((40,), torch.nan)
    assert all(torch.isnan(each).all() for each in both(x, torch.ones_like(x), approximation, PRODUCTS))
    assert torch.isnan(both(torch.zeros(40), x, approximation, PRODUCTS)[1]).all()


@pytest.mark.usefixtures("loaded")
def test_the_number_of_threads_changes_no_bit() -> None:
    generator, before = torch.Generator().manual_seed(2), torch.get_num_threads()
    x, grad = (torch.randn(400, 3, 77, generator=generator).bfloat16() for _ in range(2))
    found = list[tuple[Tensor, Tensor]]()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(both(x, grad, "none", PRODUCTS))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("loaded")
def test_a_model_takes_it_where_its_weight_gradients_are_compiled(calls: list[str]) -> None:
    """float64 has torch's, and so has a plan, which is made on no device."""
    for kernels, device, dtype, expected in (
        (COMPILED, "cpu", torch.float32, ["gelu True", "gelu_backward True"]),
        (Kernels(), "cpu", torch.float32, []),
        (COMPILED, "cpu", torch.float64, []),
        (COMPILED, "meta", torch.float32, []),
    ):
        products = Products(fp32=kernels)
        mlp = MLP(
            ModelConfig(hidden_size=8, ffn_hidden_size=16, activation="gelu_tanh"),
            Parallel(Axis("tp"), products=products),
        ).to(device, dtype)
        x = torch.ones(3, 2, 8, device=device, dtype=dtype, requires_grad=True)
        mlp._activated(x).sum().backward()  # type: ignore[no-untyped-call]
        assert calls == expected
        calls.clear()
