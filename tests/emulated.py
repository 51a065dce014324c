"""Devices that are not here, on CPU numbers: their branches of the program run, and their products round as theirs do.

`emulated_cuda`: every tensor says that it is on CUDA, 16-bit matrices are multiplied with `out_dtype=` as CUDA does,
and what a CUDA kernel would refuse (operands of two types, an `out_dtype` that is none) fails. `backward` is called
instead of `loss.backward()`, which leaves the mode.

`emulated_amx`: a CPU whose bf16 units are fast. Where fp32 products are allowed to be computed in bf16, operands are
rounded to it, as such a CPU rounds them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade.kernels import choice

PRODUCTS = {
    torch.mm: torch.mm,
    torch.bmm: torch.bmm,
    torch.matmul: torch.matmul,
    Tensor.matmul: torch.matmul,
    Tensor.__matmul__: torch.matmul,
    Tensor.mm: torch.mm,
    Tensor.bmm: torch.bmm,
}
SUMS = {torch.addmm: torch.addmm, Tensor.addmm_: Tensor.addmm_, Tensor.addmm: torch.addmm}
BACKWARD_OF_NORM = torch.ops.aten.native_layer_norm_backward
RMS_NORM = torch.ops.aten._fused_rms_norm
NARROW = (torch.bfloat16, torch.float16)


class _Cuda(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if function in PRODUCTS and args[0].dtype in NARROW:
            return _product(PRODUCTS[function], *args, **kwargs)
        if function in SUMS and args[1].dtype in NARROW:
            found = _sum(*args, **kwargs)
            return args[0].copy_(found) if function == Tensor.addmm_ else found
        if function == RMS_NORM:
            assert args[0].dtype is args[2].dtype, "CUDA's norm takes operands of one type"
        if function in (torch.native_layer_norm, BACKWARD_OF_NORM) and args[0].dtype in NARROW:
            return _norm(function, args)
        return function(*args, **kwargs)


def _norm(function: Any, args: Any) -> tuple[Tensor | None, ...]:
    """CUDA's kernels take 16-bit operands, compute in fp32, and keep mean and deviation in fp32."""
    operands = [arg for arg in args if isinstance(arg, Tensor)]
    narrow = [t.dtype for t in operands if t.dtype in NARROW]
    statistics = 2 if function == BACKWARD_OF_NORM else 0
    assert len(operands) - len(narrow) == statistics, "CUDA's norm takes operands of one type"
    out = function(*(arg.float() if isinstance(arg, Tensor) else arg for arg in args))
    assert function != BACKWARD_OF_NORM or args[-1][1:] == [False, False], "weight gradients would be rounded"
    return (out[0].to(narrow[0]), *out[1:])


def _product(
    multiply: Callable[..., Tensor], a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Any = None
) -> Tensor:
    """a b summed in fp32; rounded to `out_dtype`, or to the operands' type without."""
    assert a.dtype is b.dtype, f"a CUDA product takes operands of one type, not {a.dtype} and {b.dtype}"
    made = a.dtype if out_dtype is None else out_dtype
    assert made in (a.dtype, torch.float32), f"a CUDA product of {a.dtype} makes no {made}"
    found = multiply(a.float(), b.float()).to(made)
    if out is None:
        return found
    assert out.dtype is made, f"`out` is {out.dtype}, the product {made}"
    assert out.shape == found.shape, f"`out` is {tuple(out.shape)}, the product {tuple(found.shape)}"
    return out.copy_(found)  # type: ignore[no-any-return]


def _sum(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Any = None) -> Tensor:
    """total + a b; torch 2.11 to 2.13 take a `total` of the operands' type or of `out_dtype`."""
    made = a.dtype if out_dtype is None else out_dtype
    assert total.dtype in (a.dtype, made), f"a CUDA sum of {a.dtype} products takes no {total.dtype}"
    product = _product(torch.mm, a, b, out_dtype=torch.float32)
    found = (total.float() + product).to(made)
    if out is None:
        return found
    assert out.dtype is made, f"`out` is {out.dtype}, the sum {made}"
    return out.copy_(found)  # type: ignore[no-any-return]


@contextmanager
def emulated_cuda() -> Iterator[None]:
    """Within: all tensors are on CUDA, as far as the program can see."""
    with pytest.MonkeyPatch.context() as patch, _Cuda():
        patch.setattr(torch.autograd, "backward", backward)
        assert torch.ones(1).is_cuda, "torch asks the mode"
        yield


class _Amx(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.backends.mkldnn.matmul.fp32_precision == "bf16":  # type: ignore[attr-defined]
            if function is torch.nn.functional.linear:
                args = (*map(_rounded, args[:2]), *args[2:])
            elif function in PRODUCTS or function in SUMS:
                args = (*args[:-2], *map(_rounded, args[-2:]))
        return function(*args, **kwargs)


def _rounded(x: Tensor) -> Tensor:
    assert x.dtype is torch.float32
    return x.bfloat16().float()


@contextmanager
def emulated_amx() -> Iterator[None]:
    """Within: the CPU multiplies bf16 natively, and rounds to it where it may."""
    with pytest.MonkeyPatch.context() as patch, _Amx():
        patch.setattr(choice, "has_bf16_units", lambda: True)
        yield


def backward(out: Tensor | Sequence[Tensor], grad: Tensor | Sequence[Tensor | None] | None = None) -> None:
    """`torch.autograd.backward` within a mode: that function, and `out.backward()`, run the graph outside of it."""
    ends = (out,) if isinstance(out, Tensor) else tuple(out)
    given = (grad,) * len(ends) if grad is None or isinstance(grad, Tensor) else tuple(grad)
    starts = tuple(torch.ones_like(end) if start is None else start for end, start in zip(ends, given, strict=True))
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(ends, starts, False, False, (), allow_unreachable=True, accumulate_grad=True)


class Noted(TorchDispatchMode):
    """Within: notes of each matrix product torch's setting for fp32 products, and the type of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, torch.dtype]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            setting = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
            self.seen.append((name, setting, args[-1].dtype))
        return function(*args, **(kwargs or {}))


class NoWaiting(TorchDispatchMode):
    """Within: operators that make a program wait for a CUDA device fail."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indexed = function in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
        masked = indexed and any(i is not None and i.dtype is torch.bool for i in args[1])
        waits = function in (
            torch.ops.aten.nonzero.default,
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.masked_select.default,
        )
        assert not (waits or masked), f"{function} waits for the device{' (nonzero)' if masked else ''}"
        return function(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Within: notes of what crosses between host and device; all of it stays CPU tensors. `on_device`: tensors are
    on CUDA, as far as the program can see, but those that `cpu` and `pin_memory` return; else none is.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        super().__init__()
        self.on_device = on_device
        self.uploads: list[tuple[bool, bool]] = []
        """Of each `to` a CUDA device: whether it is from pinned memory, and whether the host goes on."""
        self.in_place: list[bool] = []
        """Of each `copy_`: whether the host goes on."""
        self._on_host: list[Tensor] = []
        self._pinned: list[Tensor] = []

    def is_pinned(self, x: Tensor) -> bool:
        return _is_of(x, self._pinned)

    def is_cuda(self, x: Tensor) -> bool:
        return self.on_device and not _is_of(x, self._on_host)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        goes_on = (kwargs or {}).get("non_blocking", False)
        if function == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self.is_cuda(args[0])
        if function in (Tensor.cpu, Tensor.pin_memory):
            assert function == Tensor.cpu or not self.is_cuda(args[0]), "only what lies in CPU memory can be pinned"
            copy: Tensor = args[0].clone()
            self._on_host.append(copy)
            self._pinned += [copy] if function == Tensor.pin_memory else []
            return copy
        if function == Tensor.to and isinstance(args[1], str | torch.device) and torch.device(args[1]).type == "cuda":
            self.uploads.append((self.is_pinned(args[0]), goes_on))
            return args[0].clone()
        if function == Tensor.copy_:
            self.in_place.append(goes_on)
        return function(*args, **(kwargs or {}))


def _is_of(x: Tensor, some: Sequence[Tensor]) -> bool:
    """Whether it lies in the memory of one of them."""
    return any(x.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in some)
