"""Dropout masks on a GPU in one kernel: torch's operators take nine, each through all words of the mask.

Where `gpu_kernels.takes` says no, callers do the same by torch's operators, with the same bits.
"""

import numpy as np
import torch
from torch import Tensor

from colonnade.gpu_kernels import kernels
from colonnade.randomness import check_range, offset_and_gamma
from colonnade.upload import upload

_MASK_BLOCK = 1024
"""Elements of a stream that a program of the kernel decides on."""


def keep_mask(keys: np.ndarray, start: int, count: int, least: int, device: torch.device) -> Tensor:
    """True where the element of a stream is `least` or more, as an integer of 16 bits without sign: elements
    `start … start + count` of every stream of `keys`, bool [len(keys), count]. See `randomness.uniform_16bit`.
    """
    first = start // 2
    check_range(first, (start + count + 1) // 2 - first)
    streams = upload(torch.from_numpy(np.stack(offset_and_gamma(keys, first))), device)
    keep = torch.empty((len(keys), count), dtype=torch.bool, device=device)
    blocks = -(-count // _MASK_BLOCK)
    operands = keep.view(torch.uint8), *streams, blocks, start - 2 * first, count, least
    kernels().keep_mask[(blocks * len(keys),)](*operands, BLOCK=_MASK_BLOCK)  # other dims of a grid end at 65,535
    return keep
