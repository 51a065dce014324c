"""Whether kernels of this program's own can be had on a GPU (`triton_kernels.py`), and they themselves.

They are written in Triton, which comes with torch for CUDA. It compiles a kernel when that is first called, and needs a
C compiler, Python's headers and a folder to write to: whether all is there is tried once.
"""

import importlib
import importlib.util
from collections.abc import Collection
from functools import cache
from typing import Any

import torch


@cache
def lacking() -> str:
    """Why they cannot be had here; "" where they can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton"
    return tried(torch.device("cuda", torch.cuda.current_device()))


def tried(device: torch.device) -> str:
    """What happened to both kernels there: "" if they did what they should."""
    words, keep = (torch.zeros(2, dtype=dtype, device=device) for dtype in (torch.int32, torch.uint8))
    row, ones = (torch.ones(256, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    dx, sums = torch.ones_like(row), torch.zeros((2, 256), device=device)
    try:
        kernels().keep_mask[(2,)](keep, words, words, 1, 0, 1, 0, BLOCK=16)
        how = {"CENTRED": False, "PROGRAMS": 1, "BLOCK": 256}
        kernels().norm_backward[(1,)](dx, sums, row, row, row, ones, ones, 1, 256, **how)
        found = [*keep.tolist(), float(dx.abs().max()), float(sums.min()), float(sums.max())]
    except Exception as error:  # noqa: BLE001  compilers, headers, folders: whatever Triton lacks
        last = (str(error).strip().splitlines() or [""])[-1]
        return f"Triton's kernels fail ({type(error).__name__}: {last[:200]})"
    wanted = [1, 1, 0.0, 1.0, 1.0]  # of a row of ones the gradient is all in the length that is taken from it
    return "" if found == wanted else f"Triton's kernels compute {found} in place of {wanted}"


def kernels() -> Any:
    """Their module."""
    return importlib.import_module("colonnade.triton_kernels")


_left_alone: set[str] = set()
"""Why this process does without kernels that it could have."""


def agree(by_all: Collection[str]) -> None:
    """Do without where another rank of a run does, of which these are all the reasons: sums differ in their last bits
    from those of torch's operators, and copies of a weight that several ranks have may not.
    """
    _left_alone.clear()
    _left_alone.update(why for why in by_all if why)


def takes(device: torch.device) -> bool:
    """Whether what lies there is a matter of these kernels. What merely says that it is on CUDA is not."""
    return device.type == "cuda" and not _left_alone and lacking() == ""
