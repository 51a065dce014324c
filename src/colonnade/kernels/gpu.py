"""What takes torch several kernels on a GPU, in one each: dropout masks, and the weight gradients of norms.

They are written in Triton (`triton_kernels.py`). Where `gpu_kernels.takes` says no, callers do the same by torch's
operators: masks are then equal to the bit, and sums differ by rounding.
"""

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.randomness import offset_and_gamma
from colonnade.upload import upload

_MASK_BLOCK = 1024
"""Elements of a stream that a program of the first kernel decides on."""
_COLUMNS, _ROWS, _TILE = 128, 256, 32
"""Columns and rows of a program of the second kernel, and how many rows it holds at a time."""


def keep_mask(keys: np.ndarray, start: int, count: int, least: int, device: torch.device) -> Tensor:
    """True where the element of a stream is `least` or more, as an integer of 16 bits without sign: elements
    `start … start + count` of every stream of `keys`, bool [len(keys), count]. See `randomness.uniform_16bit`.
    """
    first = start // 2
    streams = upload(torch.from_numpy(np.stack(offset_and_gamma(keys, first))), device)
    keep = torch.empty((len(keys), count), dtype=torch.bool, device=device)
    grid = (-(-count // _MASK_BLOCK), len(keys))
    _kernels().keep_mask[grid](keep.view(torch.uint8), *streams, start - 2 * first, count, least, BLOCK=_MASK_BLOCK)
    return keep


def norm_gradients(grad: Tensor, x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Gradients of a LayerNorm's weight and bias, [2, h] in fp32: of the output's gradient and the input [..., h], and
    what the input's rows were normalised with, [..., 1] in fp32. Summed in one order.
    """
    h = x.shape[-1]
    grad, x = grad.reshape(-1, h).contiguous(), x.reshape(-1, h).contiguous()
    parts = -(-len(x) // _ROWS)
    sums = torch.empty((parts, 2, h), dtype=torch.float32, device=x.device)
    operands = sums, grad, x, mean.reshape(-1), deviation.reshape(-1), len(x), h
    _kernels().norm_gradients[-(-h // _COLUMNS), parts](*operands, COLUMNS=_COLUMNS, ROWS=_ROWS, TILE=_TILE)
    return sums.sum(0)


def _kernels() -> Any:
    """Imported where it is used: Triton is not everywhere."""
    return importlib.import_module("colonnade.kernels.triton_kernels")
