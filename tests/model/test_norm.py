"""LayerNorm against torch's, and what 16 bits must not lose."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.config.model import ModelConfig
from colonnade.kernels import norm as norms
from colonnade.kernels.choice import Kernels, Products
from colonnade.mesh.mesh import Mesh
from colonnade.model.attention import HeadNorm
from colonnade.model.norm import Norm, RMSNorm
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.train.state import build_state
from tests.emulated import backward, emulated_cuda
from tests.parity.runs import CPU, SERIAL, Case, configured
from tests.tensor_parallel.shards import drawn

H = 8


def norm(dtype: torch.dtype = torch.float64, epsilon: float = 1e-5) -> tuple[Norm, nn.LayerNorm]:
    """Ours in `dtype`, and torch's with the same weights in fp64."""
    ours, theirs = Norm(H, epsilon=epsilon), nn.LayerNorm(H, eps=epsilon)
    with torch.no_grad():
        for i, (mine, twin) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            mine.copy_(drawn(H, seed=i).to(dtype))
            twin.copy_(mine)
    ours.to(dtype)
    theirs.double()
    with torch.no_grad():
        for mine, twin in zip(ours.parameters(), theirs.parameters(), strict=True):
            twin.copy_(mine)
    return ours, theirs


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_it_is_torchs(epsilon: float) -> None:
    ours, theirs = norm(epsilon=epsilon)
    x, twin = (drawn(5, 3, H, seed=9).requires_grad_() for _ in range(2))
    for _ in range(2):  # gradients add up
        y, expected = ours(x), theirs(twin)
        torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
        for out in (y, expected):
            out.backward(drawn(5, 3, H, seed=10))
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-12, atol=1e-12)
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stream", ["16 bits", "fp32"])
@pytest.mark.parametrize("device", [nullcontext, emulated_cuda])
def test_in_16_bits_only_inputs_and_results_are_rounded(
    dtype: torch.dtype, stream: str, device: Callable[[], AbstractContextManager[None]]
) -> None:
    ours, theirs = norm(dtype)
    x = (100 + drawn(64, H, seed=3)).to(
        dtype if stream == "16 bits" else torch.float32
    )  # far from zero: a mean matters
    twin, grad = x.double().requires_grad_(), drawn(64, H, seed=4).to(dtype)
    x.requires_grad_()
    with device():
        y = ours(x)
        torch.autograd.backward(y, grad)
    expected = theirs(twin)
    assert y.dtype is dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=rounding, atol=1e-4)
    expected.backward(grad.double())
    assert x.grad is not None and twin.grad is not None and x.grad.dtype is x.dtype
    torch.testing.assert_close(x.grad.double(), twin.grad, rtol=rounding, atol=1e-3)
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.dtype is torch.float32
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_rms_norm_of_16_bits_rounds_only_its_inputs_and_results(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(H, epsilon=1e-5), nn.RMSNorm(H, eps=1e-5, dtype=torch.float64)
    with torch.no_grad():
        ours.weight.copy_(drawn(H, seed=0).to(dtype))
        theirs.weight.copy_(ours.weight)
    ours.to(dtype)
    x, grad = drawn(64, H, seed=3).to(dtype).requires_grad_(), drawn(64, H, seed=4).to(dtype)
    twin = x.detach().double().requires_grad_()
    for _ in range(2):  # gradients of weights add up
        x.grad = twin.grad = None
        y, expected = ours(x), theirs(twin)
        y.backward(grad)
        expected.backward(grad.double())
    half_a_digit = 1.01 * torch.finfo(dtype).eps / 2
    assert x.grad is not None and twin.grad is not None and ours.weight.grad is not None
    assert theirs.weight.grad is not None and ours.weight.grad.dtype is torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=half_a_digit, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), twin.grad, rtol=half_a_digit, atol=1e-5)
    torch.testing.assert_close(ours.weight.grad.double(), theirs.weight.grad, rtol=1e-5, atol=1e-5)


def test_the_result_has_the_type_that_is_asked_for() -> None:
    ours, _ = norm(torch.bfloat16)
    x = torch.randn(2, H)
    assert ours(x).dtype is torch.bfloat16 and ours(x, torch.float32).dtype is torch.float32
    assert ours(x.bfloat16()).dtype is torch.bfloat16
    y = ours(x, torch.float32)
    assert not torch.equal(y, y.bfloat16().float()), "it was not rounded on the way"


def test_gradients_of_many_microbatches_are_summed_in_fp32() -> None:
    ours, _ = norm(torch.bfloat16)
    total = torch.zeros(H, dtype=torch.float64)
    for seed in range(256):
        grad = drawn(4, H, seed=seed).bfloat16()
        ours(drawn(4, H, seed=1000 + seed).bfloat16().requires_grad_()).backward(grad)
        total += grad.double().sum(0)
    assert ours.bias.grad is not None
    torch.testing.assert_close(ours.bias.grad.double(), total, rtol=1e-5, atol=1e-4)


def test_backward_of_16_bits_on_cuda_widens_neither_gradient_nor_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel takes them as they are; weight gradients are of one fp32 copy of x, which is made apart."""
    ours, _ = norm(torch.bfloat16)
    x = drawn(5, 3, H, seed=9).bfloat16().requires_grad_()
    monkeypatch.setattr(norms, "_exact", lambda x: pytest.fail(f"{tuple(x.shape)} was copied to fp32"))
    with emulated_cuda():
        backward(ours(x), drawn(5, 3, H, seed=10).bfloat16())
    assert x.grad is not None and ours.weight.grad is not None and ours.weight.grad.dtype is torch.float32


def test_overflow_stays_visible() -> None:
    ours, _ = norm(torch.float16)
    x = torch.randn(2, H).half().requires_grad_()
    grad = torch.ones(2, H).half()
    grad[0, 0] = torch.inf
    ours(x).backward(grad)
    gradients: list[Tensor | None] = [x.grad, ours.weight.grad, ours.bias.grad]
    assert all(gradient is not None and not gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("block", ["gpt", "llama", "grouped", "bert", "labels", "spans", "t5"])
def test_every_norm_of_a_model_has_its_epsilon_and_the_kernels_of_the_run(block: Any) -> None:
    """Those of the heads and of what is around blocks too."""
    config = configured(Case(block=block, embedding_norm=True), SERIAL)
    config = config.model_copy(update={"model": config.model.model_copy(update={"norm_epsilon": 0.25})})
    products = Products(fp16=Kernels(output="onednn"))
    built = build_state(config, Mesh(), 37, CPU, products=products).model
    found = [module for module in built.modules() if isinstance(module, (Norm, RMSNorm, HeadNorm))]
    stated = [name for name in built.architecture.weights() if name.endswith("norm.weight")]
    assert [each.epsilon for each in found] == [0.25] * len(stated) != []
    assert {each.products for each in found} == {products}


def test_the_norm_of_heads_adds_its_epsilon_to_the_mean_square() -> None:
    norm = HeadNorm(ModelConfig(num_heads=2, hidden_size=8, norm_epsilon=0.5), Parallel(Mesh().tp)).double()
    norm.weight.data = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", [Norm, RMSNorm, HeadNorm])
def test_backward_of_each_norm_is_by_the_kernel_that_was_decided(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by no other: it is decided for all ranks alike."""
    calls: list[tuple[int, ...]] = []

    def compiled(grad: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
        calls.append(tuple(x.shape))
        return grad

    monkeypatch.setattr(norms.compiled, "norm_backward", compiled)
    for chosen in (Kernels(), Kernels(weight_gradient="compiled")):
        products = Products(fp32=chosen)
        if kind is HeadNorm:
            module = HeadNorm(ModelConfig(num_heads=2, hidden_size=2 * H), Parallel(Mesh().tp, products=products))
        else:
            module = kind(H, epsilon=1e-5, products=products)
        module(torch.randn(2, 3, H).requires_grad_()).sum().backward()
        assert calls == ([(2, 3, H)] if chosen.weight_gradient == "compiled" else [])
