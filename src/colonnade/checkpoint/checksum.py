"""A 64-bit checksum of a tensor's bits, computed where the tensor lies.

    words   x_i of 64 bits                        w_i, v_i   fixed odd numbers, different for each place
    sum     Σ x_i·w_i + (x_i >> 32)·v_i           modulo 2^64

One changed number always changes it, whatever bit it is. Of several changes the products alone could cancel: two
flipped signs in the upper half of a word do, for any odd w. The second product takes the upper half by itself, which
leaves a chance of about 2^-32 for the worst pairs of single bits, and 2^-64 for changes of many bits (multilinear
hashing: Carter and Wegman, "Universal classes of hash functions", 1979; Thorup, "High speed hashing for integers and
strings", 2015). Zeros of both signs are different, and so are kinds of nan.
"""

import numpy as np
import torch
from torch import Tensor

from colonnade.randomness import name_id, stream_keys

CHUNK = 1 << 15  # words of CPU memory that are summed together: with their factors they stay in the cache
CHUNK_OF_GPU = 1 << 22  # words: few kernels, and 64 MiB for the factors
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: what the sum so far is multiplied with before the next chunk
_WORD = 8  # bytes


class Checksum:
    """Sums the bits of tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self._chunk = CHUNK if device.type == "cpu" else CHUNK_OF_GPU
        self._whole, self._upper = (_odd_numbers(self._chunk, stream).to(device) for stream in (1, 2))

    def of(self, x: Tensor) -> Tensor:
        """The checksum of contiguous `x`, int64 []."""
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        for words in _words(x.detach()):
            for part in torch.split(words, self._chunk):
                upper = _dot(part >> 32, self._upper[: len(part)])
                total = total * _FACTOR + _dot(part, self._whole[: len(part)]) + upper
        return total


def _words(x: Tensor) -> list[Tensor]:
    """All bits of x as int64: what fills words as a view of it, and the rest with zeros behind."""
    flat = x.reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    whole = len(flat) * flat.element_size() // _WORD * _WORD // flat.element_size()
    rest = torch.zeros(_WORD, dtype=torch.uint8, device=x.device)
    left = flat[whole:].clone().view(torch.uint8)
    rest[: len(left)] = left
    words = [flat[:whole].view(torch.int64)] if whole else []
    return [*words, rest.view(torch.int64)] if len(left) else words


def _dot(x: Tensor, factors: Tensor) -> Tensor:
    return torch.dot(x, factors) if x.is_cpu else (x * factors).sum()  # CUDA has no dot of integers


def _odd_numbers(count: int, stream: int) -> Tensor:
    """Fixed odd int64 numbers [count] without a pattern."""
    numbers = stream_keys(name_id("checksum"), stream, last=range(count))
    return torch.from_numpy((numbers | np.uint64(1)).view(np.int64))
