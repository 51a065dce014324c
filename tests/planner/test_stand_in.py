"""What a program learns of tensors without memory, and that those with memory are as they are."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade.kernels.dropout import keep_mask
from colonnade.planner.stand_in import META, StandIn, device_of
from colonnade.randomness import stream_keys


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_where_a_tensor_is() -> None:
    with StandIn("cuda") as place:
        x = meta(3)
        copy = x.cpu()
        zeros, others = torch.zeros_like(copy), torch.zeros_like(x)
        assert (x.is_cuda, copy.is_cuda, zeros.is_cuda, others.is_cuda) == (True, False, False, True)
        assert copy.cpu() is copy and copy.pin_memory() is copy and not torch.ones(3).is_cuda
        assert [place.is_on_host(each) for each in (x, copy, zeros, others)] == [False, True, True, False]
        with pytest.raises(RuntimeError, match="pinned"):
            x.pin_memory()
    with StandIn("cpu"):
        assert not x.is_cuda and x.cpu() is x


@pytest.mark.parametrize("value", [2.5, 7])
def test_numbers_that_are_not_there_are_ones(value: float) -> None:
    real = torch.tensor([value, value])
    with StandIn("cuda"):
        there, gone = real[0], meta(dtype=real.dtype)
        assert (there.item(), float(there), int(there), real.tolist()) == (value, value, int(value), [value, value])
        assert (gone.item(), float(gone), int(gone), meta(2, dtype=real.dtype).tolist()) == (1, 1.0, 1, [1, 1])
        assert type(gone.item()) is type(value) and bool(gone) and not bool(torch.tensor(0))
    with META, StandIn("cuda"):
        assert meta(2, dtype=real.dtype).tolist() == [1, 1], "where all that is made has no numbers too"


def test_what_is_gone_from_cpu_memory_leaves_its_place_to_others() -> None:
    with StandIn("cuda") as place:
        for _ in range(50):
            assert place.is_on_host(meta(3).cpu())
            assert meta(3).is_cuda


def test_zeros_alike_are_of_the_type_that_is_asked_for() -> None:
    with StandIn("cuda"):
        assert torch.zeros_like(meta(3), dtype=torch.float64).dtype is torch.float64
        assert torch.zeros_like(meta(3).cpu()).dtype is torch.float32


@pytest.mark.parametrize(("name", "device"), [("cpu", "cpu"), ("cuda", "cuda"), ("auto", "cuda")])
def test_what_is_no_cpu_is_planned_as_a_gpu(name: str, device: str) -> None:
    assert device_of(name) == device


def test_a_dropout_mask_of_a_gpu_is_drawn_by_one_operator() -> None:
    keys, seen = stream_keys(1, last=range(3)), []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.is_meta and function is not torch.ops.aten.empty.memory_format:
                seen.append((made.shape, made.dtype))
            return made

    for device in ("cuda", "cpu"):
        seen.clear()
        with StandIn(device), Sees():  # type: ignore[arg-type]
            keep = keep_mask(keys, 1, 7, 0.1, torch.device("meta"))
        assert keep.shape == (3, 7) and keep.dtype is torch.bool
        assert (seen == [((3, 7), torch.bool)]) == (device == "cuda"), seen


def test_a_mask_without_numbers_takes_all() -> None:
    with StandIn("cpu"):
        assert meta(2, 3, 4)[meta(2, 3, dtype=torch.bool)].shape == (6, 4)
        assert meta(2, 3, 4)[1].shape == (3, 4)
        assert torch.ones(2, 3)[torch.tensor([True, False])].shape == (1, 3)
        assert meta(5, 4)[meta(2, 3, dtype=torch.int64)].shape == (2, 3, 4), "places are no mask"


def test_backward_is_within_too() -> None:
    seen = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(gradient.is_cuda)
            return gradient * 2

    x = meta(3).requires_grad_()
    with StandIn("cuda"):
        torch.autograd.backward(Asks.apply(x))  # type: ignore[no-untyped-call]
        torch.autograd.backward((Asks.apply(x),))  # type: ignore[no-untyped-call]
    assert seen == [True, True] and x.grad is not None and x.grad.shape == (3,)
