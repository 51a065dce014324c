"""Kernels that cannot be had are done without, and it is said why."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade import gpu_kernels

CPU = torch.device("cpu")


class Launched:
    """In place of a kernel: `kernel[grid](keep, …)`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **_: self._run(*given)


def fills(keep: torch.Tensor, *_: Any) -> None:
    keep.fill_(1)


def differentiates(dx: torch.Tensor, sums: torch.Tensor, *_: Any) -> None:
    dx.zero_()
    sums.fill_(1.0)


def does_nothing(*_: Any) -> None: ...


def fails(*_: Any) -> None:
    raise RuntimeError("compiling the launcher\nPython.h: No such file or directory\n")


@pytest.mark.parametrize(
    ("mask", "norm", "said"),
    [
        (fills, differentiates, ""),
        (does_nothing, differentiates, "compute [0, 0, 0.0, 1.0, 1.0] in place of [1, 1, 0.0, 1.0, 1.0]"),
        (fills, does_nothing, "compute [1, 1, 1.0, 0.0, 0.0] in place of [1, 1, 0.0, 1.0, 1.0]"),
        (fails, differentiates, "fail (RuntimeError: Python.h: No such file or directory)"),
        (fills, fails, "fail (RuntimeError: Python.h: No such file or directory)"),
    ],
)
def test_both_kernels_are_tried(mask: Any, norm: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = said and f"Triton's kernels {said}"
    there = SimpleNamespace(keep_mask=Launched(mask), norm_backward=Launched(norm))
    monkeypatch.setattr(gpu_kernels, "kernels", lambda: there)
    assert gpu_kernels.tried(CPU) == said


def test_on_a_cpu_there_are_none() -> None:
    assert gpu_kernels.lacking() == "there is no CUDA device" and not gpu_kernels.takes(CPU)
    assert not gpu_kernels.takes(torch.device("cuda")), "what says that it is there and is not"


def test_all_ranks_do_without_where_one_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "lacking", lambda: "")
    on_gpu = torch.device("cuda")
    assert gpu_kernels.takes(on_gpu)
    gpu_kernels.agree(["", "there is no Triton"])
    assert not gpu_kernels.takes(on_gpu)
    gpu_kernels.agree([""])
    assert gpu_kernels.takes(on_gpu) and not gpu_kernels.takes(CPU)
