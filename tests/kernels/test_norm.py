"""What a GPU computes in 16 bits, by the same lines on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm as plain

from colonnade.kernels.norm import _backward_of_16_bits


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
