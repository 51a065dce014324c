"""What a GPU computes in 16 bits, by the same lines on a CPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm as plain
from torch.nn.functional import rms_norm as plain_rms_norm

from colonnade.kernels import gpu
from colonnade.kernels.norm import _backward_of_16_bits, layer_norm, rms_norm
from colonnade.planner.stand_in import StandIn
from tests.emulated import backward, emulated_cuda


@pytest.mark.parametrize("bias", ["trained", "frozen", "none"])
def test_in_16_bits_too_only_what_is_trained_has_a_gradient(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch.ops.aten.native_layer_norm_backward

    def as_on_a_gpu(*given: Any) -> Any:
        """In fp32 inside, which a CPU's kernel does not do of its own."""
        return kernel(*(each.float() if isinstance(each, Tensor) else each for each in given))

    monkeypatch.setattr(torch.ops.aten, "native_layer_norm_backward", as_on_a_gpu)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(5, 3, 16, generator=generator).bfloat16() for _ in range(2))
    weight = torch.nn.Parameter(torch.randn(16, generator=generator))
    shift = None if bias == "none" else torch.nn.Parameter(torch.randn(16, generator=generator), bias == "trained")
    exact = x.float().requires_grad_()
    plain(exact, (16,), weight, shift, 1e-5).backward(grad.float())  # type: ignore[no-untyped-call]
    expected = exact.grad, weight.grad, None if shift is None else shift.grad
    mean, deviation = torch.native_layer_norm(x.float(), (16,), weight, shift, 1e-5)[1:]
    for each in (weight, *([] if shift is None else [shift])):
        each.grad = None
    dx = _backward_of_16_bits(grad, x, weight, shift, mean, deviation)
    found = dx, weight.grad, None if shift is None else shift.grad
    for got, wanted, tolerance in zip(found, expected, (0.02, 1e-5, 1e-5), strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got.float(), wanted, rtol=tolerance, atol=tolerance)


class ByHand:
    """In place of the kernel in Triton, with its operands, by torch's operators."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == (512,)
        return self._launch

    @staticmethod
    def _launch(
        dx: Tensor,
        sums: Tensor,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        scale: Tensor,
        rows: int,
        h: int,
        *,
        CENTRED: bool,
        PROGRAMS: int,
        BLOCK: int,
        num_warps: int,
    ) -> None:
        assert all(each.is_contiguous() for each in (dx, sums, grad, x, weight, mean, scale))
        assert h <= BLOCK < 2 * h and BLOCK & (BLOCK - 1) == 0 and PROGRAMS == 512
        assert num_warps & (num_warps - 1) == 0 and 1 <= BLOCK / 32 / num_warps <= 16, "elements of a thread"
        g, scales = grad.view(rows, h).float(), scale.view(rows, 1)
        normed = (x.view(rows, h).float() - (mean.view(rows, 1) if CENTRED else 0.0)) * scales
        scaled = g * normed
        for first in range(PROGRAMS):
            sums[first, 0] = scaled[first::PROGRAMS].sum(0)
            sums[first, 1] = g[first::PROGRAMS].sum(0)
        g = g * weight.float()
        d = g - normed * (g * normed).mean(1, keepdim=True) - (g.mean(1, keepdim=True) if CENTRED else 0.0)
        dx.copy_((d * scales).view(dx.shape))


def differentiated(y: Tensor, grad: Tensor) -> None:
    y.backward(grad)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("h", [256, 300, 5000])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_by_the_kernel_of_a_gpu(kind: str, h: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "takes", lambda device: True)
    monkeypatch.setattr(gpu, "kernels", lambda: SimpleNamespace(norm_backward=ByHand()))
    generator = torch.Generator().manual_seed(0)
    x, grad = ((torch.randn(h, 300, 2, generator=generator) + 1.0).bfloat16().permute(1, 2, 0) for _ in range(2))
    weight, shift = (torch.nn.Parameter(torch.randn(h, generator=generator).bfloat16()) for _ in range(2))
    exact = [t.detach().double().requires_grad_() for t in (x, weight, shift)]
    if kind == "rmsnorm":
        differentiated(plain_rms_norm(exact[0], (h,), exact[1], 1e-5), grad.double())
        leaf = x.requires_grad_()
        for _ in range(2):  # what is there is added to
            differentiated(rms_norm(leaf, weight, 1e-5, torch.bfloat16), grad)
        dx = leaf.grad
        assert dx is not None
        dx = dx / 2
    else:
        differentiated(plain(exact[0], (h,), exact[1], exact[2], 1e-5), grad.double())
        mean, deviation = torch.native_layer_norm(x.float(), (h,), weight.float(), shift.float(), 1e-5)[1:]
        for _ in range(2):
            dx = _backward_of_16_bits(grad, x, weight, shift, mean, deviation)
        assert shift.grad is not None and exact[2].grad is not None and shift.grad.dtype is torch.float32
        torch.testing.assert_close(shift.grad.double(), 2 * exact[2].grad, rtol=1e-5, atol=1e-4)
    assert exact[0].grad is not None and exact[1].grad is not None and weight.grad is not None
    assert dx.dtype is torch.bfloat16 and dx.shape == x.shape and weight.grad.dtype is torch.float32
    torch.testing.assert_close(dx.double(), exact[0].grad, rtol=0.01, atol=0.01)
    torch.testing.assert_close(weight.grad.double(), 2 * exact[1].grad, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("trained", ["weight", "bias", "neither", "weight, and there is no bias"])
def test_by_the_kernel_of_a_gpu_too_only_what_is_trained_has_a_gradient(
    trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "takes", lambda device: True)
    monkeypatch.setattr(gpu, "kernels", lambda: SimpleNamespace(norm_backward=ByHand()))
    x, grad = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.nn.Parameter(torch.ones(256).bfloat16(), trained.startswith("weight"))
    shift = None if "no bias" in trained else torch.nn.Parameter(torch.ones(256).bfloat16(), trained == "bias")
    mean, deviation = torch.native_layer_norm(x.float(), (256,), None, None, 1e-5)[1:]
    dx = _backward_of_16_bits(grad, x, weight, shift, mean, deviation)
    assert dx.count_nonzero() > 0 and (weight.grad is not None) == trained.startswith("weight")
    assert shift is None or (shift.grad is not None) == (trained == "bias")
    weight.grad = None
    differentiated(rms_norm(x.requires_grad_(), weight, 1e-5, torch.bfloat16), grad)
    assert x.grad is not None and (weight.grad is not None) == trained.startswith("weight")


@pytest.mark.parametrize("device", [nullcontext, emulated_cuda], ids=["CPU", "GPU"])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_frozen_weight_has_no_gradient_and_a_result_has_the_type_that_is_asked_for(
    kind: str, given: torch.dtype, asked: torch.dtype, device: Callable[[], AbstractContextManager[None]]
) -> None:
    """Whatever the input's is: its own gradient has that one."""
    for trained in (False, True):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(given).requires_grad_()
        weight, shift = (torch.nn.Parameter(torch.ones(8, dtype=asked), trained) for _ in range(2))
        with device():
            y = rms_norm(x, weight, 1e-5, asked) if kind == "rmsnorm" else layer_norm(x, weight, shift, 1e-5, asked)
            backward(y, torch.ones(3, 8, dtype=asked))
        assert y.dtype is asked and x.grad is not None and x.grad.dtype is given
        assert (weight.grad is not None) == trained and (shift.grad is not None) == (trained and kind == "layernorm")


def test_the_kernel_is_for_16_bits_and_rows_that_fill_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "takes", lambda device: True)
    wide = {h: gpu.differentiates(torch.empty(3, h, dtype=torch.bfloat16)) for h in (128, 255, 256, 16_384, 16_385)}
    assert wide == {128: False, 255: False, 256: True, 16_384: True, 16_385: False}
    assert not gpu.differentiates(torch.empty(3, 1024)) and not gpu.differentiates(torch.empty(3, 1024).double())
    monkeypatch.undo()
    assert not gpu.differentiates(torch.empty(3, 1024, dtype=torch.bfloat16)), "on a CPU"
    planned = torch.empty(3, 1024, dtype=torch.bfloat16, device="meta")
    for device, taken in (("cpu", False), ("cuda", True)):
        with StandIn(device):  # type: ignore[arg-type]
            assert gpu.differentiates(planned) == taken, device
