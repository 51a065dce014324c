"""Numbers from this process to its device, without standing still for it.

A copy from ordinary memory to a CUDA device returns when the device has done everything before it. From pinned memory
it is only enqueued, as kernels are; torch keeps the pinned block until the device has read it.
"""

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """CPU tensor `x` on `device`, in the order of the current stream; x itself where that is the CPU."""
    if torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
