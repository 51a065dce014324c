"""A device that is not here: tensors without memory take the program's branches for it.

What a unit keeps depends on its device in two ways. The program asks `x.is_cuda` (which products it computes in fp32,
which kernels it calls), and torch chooses a kernel of attention. Within a `StandIn` both are answered for the device
that it stands for:

    attention on CPUs    `_scaled_dot_product_flash_attention_for_cpu`, always
                 CUDA    flash attention for 16 bits without a bias; else the memory-efficient kernel; for fp64 there is
                         none, and torch spells it out

The CUDA rule is torch's order on Ampere and later GPUs (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), of
features that are a multiple of 8 and keys that are one of 16: others are padded there, which is not counted. How many
elements a mask selects is unknown without numbers: all are taken.

Numbers that the program reads are all ones. What a GPU's program copies to CPU memory is a tensor without memory too,
of which it is known that it lies there.
"""

import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from colonnade.garbage import imports_stay

Device = Literal["cpu", "cuda"]
META = torch.device("meta")


def _ones(x: Tensor) -> Any:
    return torch.ones(x.shape, dtype=x.dtype, device="cpu").tolist()


def device_of(name: str) -> Device:
    """What a prediction is made for, given train.device: anything but CPUs is a GPU."""
    return "cpu" if name == "cpu" else "cuda"


def _import_dynamo() -> None:
    """Operators on tensors without memory import it at their first call. Ranks that predict nothing do without."""
    if "torch._dynamo" not in sys.modules:
        with imports_stay():
            import_module("torch._dynamo")


class StandIn(TorchFunctionMode):
    """Within: tensors without memory are on `device`, as far as the program can see, in backward too."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        _import_dynamo()
        self.device = device
        self._hosted: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def is_on_host(self, x: Tensor) -> bool:
        """Whether `x` was copied to CPU memory from another device."""
        return bool(self._hosted) and x.untyped_storage()._cdata in self._hosted

    def _to_host(self, x: Tensor) -> Tensor:
        if self.device == "cpu" or self.is_on_host(x):
            return x
        copy = torch.empty_like(x)
        self.put_on_host(copy)
        return copy.copy_(x)

    def put_on_host(self, *tensors: Tensor) -> None:
        """Know from now on that these lie in CPU memory."""
        for x in tensors:
            storage = x.untyped_storage()
            self._hosted.setdefault(storage._cdata, weakref.ref(storage, partial(self._gone, storage._cdata)))

    def _gone(self, key: int, _: Any) -> None:
        self._hosted.pop(key, None)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = _ANSWERS.get(function)
        return function(*args, **(kwargs or {})) if answer is None else answer(self, *args, **(kwargs or {}))

    # Each is called in place of the function that `_ANSWERS` names for it, with the same arguments.

    def _is_cuda(self, x: Tensor) -> bool:
        return self.device == "cuda" and x.is_meta and not self.is_on_host(x)

    def _cpu(self, x: Tensor, **keys: Any) -> Tensor:
        return self._to_host(x) if x.is_meta else x.cpu(**keys)

    def _pin_memory(self, x: Tensor) -> Tensor:
        if self._is_cuda(x):
            raise RuntimeError("only what lies in CPU memory can be pinned")  # as torch does
        return x if x.is_meta else x.pin_memory()

    def _zeros_like(self, x: Tensor, **keys: Any) -> Tensor:
        made = torch.zeros_like(x, **keys)
        if self.is_on_host(x):
            self.put_on_host(made)
        return made

    def _at(self, x: Tensor, index: Any) -> Tensor:
        if not _is_mask(index):
            return x[index]
        return x.new_empty((index.numel(), *x.shape[index.ndim :]))

    def _attend(self, *args: Any, **keys: Any) -> Tensor:
        return _attention(self.device, *args, **keys)

    def _backward(self, ends: Tensor | tuple[Tensor, ...], *_: Any, **__: Any) -> None:
        """`torch.autograd.backward` leaves a mode before it runs the graph; the engine below it does not."""
        ends = (ends,) if isinstance(ends, Tensor) else tuple(ends)
        starts = tuple(torch.ones_like(end) for end in ends)
        with self:
            Variable._execution_engine.run_backward(
                ends, starts, False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.is_meta and index.dtype is torch.bool


def _attention(
    device: Device, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """By the kernel that torch would choose."""
    kernels = torch.ops.aten
    if device == "cpu":
        kernel = partial(kernels._scaled_dot_product_flash_attention_for_cpu, attn_mask=attn_mask)
        out, *_ = kernel(q, k, v, 0.0, is_causal)
    elif q.dtype is torch.float64:
        out = scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)
    elif q.dtype is torch.float32 or attn_mask is not None:
        bias = None if attn_mask is None else attn_mask.expand(*q.shape[:-1], k.shape[-2])
        out, *_ = kernels._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal)
    else:
        out, *_ = kernels._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    result: Tensor = out
    return result


def _read(function: Any, value: Callable[[Tensor], Any]) -> Callable[[StandIn, Tensor], Any]:
    """What a program learns that looks at numbers: those that are not there are ones."""
    return lambda _, x: value(x) if x.is_meta else function(x)


_ANSWERS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        Tensor.is_cuda.__get__: StandIn._is_cuda,  # type: ignore[attr-defined]
        Tensor.cpu: StandIn._cpu,
        Tensor.pin_memory: StandIn._pin_memory,
        Tensor.__getitem__: StandIn._at,
        Tensor.tolist: _read(Tensor.tolist, _ones),
        Tensor.item: _read(Tensor.item, lambda x: 1.0 if x.is_floating_point() else 1),
        Tensor.__float__: _read(Tensor.__float__, lambda x: 1.0),
        Tensor.__int__: _read(Tensor.__int__, lambda x: 1),
        Tensor.__bool__: _read(Tensor.__bool__, lambda x: True),
        torch.zeros_like: StandIn._zeros_like,
        torch.autograd.backward: StandIn._backward,
        scaled_dot_product_attention: StandIn._attend,
    }
)
"""All that a stand-in looks at; every other function is as it is."""
