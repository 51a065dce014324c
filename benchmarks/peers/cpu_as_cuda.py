"""Lets code that asks for CUDA run on a CPU: megatron-core names the device `cuda` in some 250 places.

Importing this file changes `torch` for the whole process: tensors asked for on CUDA come on the CPU, `.cuda()` is the
identity, streams wait for nothing, and `Tensor.type()` answers `torch.cuda.FloatTensor` (gradient clipping asserts it).
Only a benchmark of a peer may do such a thing.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """`factory`, taking any CUDA device for the CPU."""

    @functools.wraps(factory)
    def create(*arguments: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return factory(*arguments, **options)

    return create


def with_cuda_name(name_type: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`, which without an argument names the tensor's type as if it were on CUDA."""

    @functools.wraps(name_type)
    def name_or_cast(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        answer = name_type(tensor, *arguments, **options)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    return name_or_cast


class NoStream:
    """A stream on which nothing has to be waited for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


def install() -> None:
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    changes: dict[Any, dict[str, Any]] = {
        torch.Tensor: {"cuda": lambda tensor, *_, **__: tensor, "type": with_cuda_name(torch.Tensor.type)},
        torch.nn.Module: {"cuda": lambda module, *_, **__: module},
        torch.cuda: {
            "current_device": lambda: torch.device("cpu"),
            "synchronize": lambda *_, **__: None,
            "Stream": NoStream,
            "stream": lambda *_: nullcontext(),
            "current_stream": NoStream,
            "default_stream": NoStream,
        },
        torch.cuda.nvtx: {"range_push": lambda *_: None, "range_pop": lambda *_: None},
    }
    for owner, replaced in changes.items():
        for name, value in replaced.items():
            setattr(owner, name, value)


install()
