"""What takes torch several kernels on a GPU, in one each: dropout masks, and the backward of norms.

Where `gpu_kernels.takes` says no, callers do the same by torch's operators: masks then have the same bits, and
gradients differ by rounding.
"""

import numpy as np
import torch
from torch import Tensor

from colonnade.gpu_kernels import kernels, takes
from colonnade.randomness import offset_and_gamma, words_of
from colonnade.upload import upload

_MASK_BLOCK = 1024
"""Elements of a stream that a program of the first kernel decides on."""
_PROGRAMS = 512
"""Of the second kernel, which fill any GPU; so many partial sums are added up, everywhere in the same order."""
_NARROWEST, _WIDEST = 256, 16_384
"""Rows that are a program's work, and stay in its registers."""


def keep_mask(keys: np.ndarray, start: int, count: int, least: int, device: torch.device) -> Tensor:
    """True where the element of a stream is `least` or more, as an integer of 16 bits without sign: elements
    `start … start + count` of every stream of `keys`, bool [len(keys), count]. See `randomness.uniform_16bit`.
    """
    first, _ = words_of(start, count)
    streams = upload(torch.from_numpy(np.stack(offset_and_gamma(keys, first))), device)
    keep = torch.empty((len(keys), count), dtype=torch.bool, device=device)
    blocks = -(-count // _MASK_BLOCK)
    operands = keep.view(torch.uint8), *streams, blocks, start - 2 * first, count, least
    kernels().keep_mask[(blocks * len(keys),)](*operands, BLOCK=_MASK_BLOCK)  # other dims of a grid end at 65,535
    return keep


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """[..., h], weight [h] of the same type -> [..., h] of it, and what rows were multiplied with, [..., 1] in fp32 or
    fp64. By torch's kernel.
    """
    if x.is_meta:  # planned: torch spells it out there, and LayerNorm's kernel reads and writes as much
        y, _, scale = torch.native_layer_norm(x, weight.shape, weight, None, epsilon)
        return y, scale
    found: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, epsilon)
    return found


def differentiates(x: Tensor) -> bool:
    """Whether `norm_backward` is there for norms of such an input."""
    fits = x.dtype.itemsize == 2 and _NARROWEST <= x.shape[-1] <= _WIDEST
    return fits and (takes(x.device) or (x.is_meta and x.is_cuda))


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a LayerNorm, or an RMSNorm where `mean` is None: the gradient of the output, and the input, [..., h] in 16
    bits, and what the rows of the input were normalised with, [..., 1] in fp32 -> gradients of the input in its own
    type, of the weight and of the bias, [h] in fp32.
    """
    h = x.shape[-1]
    grad, x, scale = grad.contiguous(), x.contiguous(), scale.contiguous()
    sums = torch.empty((_PROGRAMS, 2, h), dtype=torch.float32, device=x.device)
    if x.is_meta:  # planned: torch's kernel of dx alone reads and writes as much
        normed_by = scale, scale, weight, None, [True, False, False]
        dx = torch.ops.aten.native_layer_norm_backward(grad, x, (h,), *normed_by)[0]
    else:
        dx, block = torch.empty_like(x), 1 << (h - 1).bit_length()
        operands = dx, sums, grad, x, weight, scale if mean is None else mean.contiguous(), scale, x.numel() // h, h
        how = {"CENTRED": mean is not None, "PROGRAMS": _PROGRAMS, "BLOCK": block, "num_warps": max(4, block // 512)}
        kernels().norm_backward[(_PROGRAMS,)](*operands, **how)
    of_weight, of_bias = sums.sum(0)
    return dx, of_weight, of_bias
