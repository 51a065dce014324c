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
        return lambda keep, *_, **__: self._run(keep)


def fails(_: torch.Tensor) -> None:
    raise RuntimeError("compiling the launcher\nPython.h: No such file or directory\n")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda keep: keep.fill_(1), ""),
        (lambda keep: None, "Triton's kernels compute [0, 0] in place of [1, 1]"),
        (fails, "Triton's kernels fail (RuntimeError: Python.h: No such file or directory)"),
    ],
)
def test_a_kernel_is_tried(run: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "kernels", lambda: SimpleNamespace(keep_mask=Launched(run)))
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
