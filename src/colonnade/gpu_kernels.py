"""Whether kernels of this program's own can be had on a GPU (`kernels/gpu.py`).

They are written in Triton, which comes with torch for CUDA. It compiles a kernel when that is first called, and needs a
C compiler for what starts them.
"""

import importlib.util
import shutil
from functools import cache

import torch


@cache
def lacking() -> str:
    """What they need and have not here; "" where they can be had."""
    if not torch.cuda.is_available():
        return "CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    return "" if any(map(shutil.which, ("gcc", "clang", "cc"))) else "C compiler, which Triton needs,"


def takes(device: torch.device) -> bool:
    """Whether what lies there is a matter of these kernels. What merely says that it is on CUDA is not."""
    return device.type == "cuda" and lacking() == ""
