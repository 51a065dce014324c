"""How a GPU's kernels are called: with programs of numpy in their place."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from colonnade import randomness
from colonnade.kernels import gpu
from colonnade.randomness import dropped_values, stream_keys


class Masks:
    """`keep_mask` of `triton_kernels.py`: each program decides on one block of a stream."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(keep: Tensor, offsets: Tensor, gammas: Tensor, *sizes: int, BLOCK: int) -> None:
            blocks, skipped, count, least = sizes
            out = keep.numpy().reshape(-1)
            for program in range(grid[0]):
                stream, begin = program // blocks, program % blocks * BLOCK
                at = np.arange(begin, min(begin + BLOCK, count))
                words = (int(offsets[stream]) + (at + skipped >> 1) * int(gammas[stream])) & 0xFFFFFFFF
                halves = mixed(words) >> ((at + skipped & 1) << 4) & 0xFFFF
                out[stream * count + at] = (halves ^ 0x8000) >= least

        return run


def mixed(words: Any) -> Any:
    """As `randomness` mixes the bits of 32-bit words, here int64."""
    words = (words ^ (words >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    words = (words ^ (words >> 15)) * 0x735A2D97 & 0xFFFFFFFF
    return words ^ (words >> 15)


@pytest.mark.parametrize(
    ("start", "count", "drop"), [(0, 1, 0.5), (3, 5000, 0.1), (7, 1024, 0.5), (2, 2049, 0.9), (5, 2047, 0.25)]
)
def test_every_element_of_a_mask_is_decided_on_as_on_a_cpu(
    start: int, count: int, drop: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all streams, from an odd one on too, in blocks that do not divide them."""
    monkeypatch.setattr(gpu, "kernels", lambda: SimpleNamespace(keep_mask=Masks()))
    keys = stream_keys(5, last=range(3))
    found = gpu.keep_mask(keys, start, count, dropped_values(drop), torch.device("cpu"))
    assert found.dtype is torch.bool
    assert torch.equal(found, randomness.keep_mask(keys, start, count, drop))
