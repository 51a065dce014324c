"""Random numbers of one sample: a pure function of (seed, purpose, epoch, sample), drawn one after the other."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1_024


class SamplePurpose(IntEnum):
    """What a sample's numbers are for; beside `randomness.Purpose`, and as permanent."""

    BERT = 101
    BERT_GRID = 102
    T5 = 103


class Draws:
    """A sample's numbers, in the order in which they are asked for."""

    def __init__(self, seed: int, purpose: SamplePurpose, epoch: int, sample: int) -> None:
        from colonnade.randomness import stream_keys, uniform  # with torch, which opening a dataset does without

        self._uniform, self._key = uniform, stream_keys(seed, purpose, epoch, last=[sample])
        self._left: NDArray[np.float64] = np.empty(0)
        self._drawn = 0

    @staticmethod
    def key(seed: int, purpose: SamplePurpose, number: int) -> int:
        """A whole number of 64 bits, the same for all samples."""
        from colonnade.randomness import stream_keys

        return int(stream_keys(seed, purpose, last=[number])[0])

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Numbers in (0, 1): [count]."""
        while len(self._left) < count:
            block = self._uniform(self._key, self._drawn, _BLOCK).numpy()[0]
            self._left, self._drawn = np.concatenate([self._left, block]), self._drawn + _BLOCK
        numbers, self._left = self._left[:count], self._left[count:]
        return numbers

    def chance(self, probability: float) -> bool:
        """True with a probability."""
        return bool(self.uniform(1)[0] < probability)

    def integer(self, low: int, high: int) -> int:
        """One of low, …, high - 1."""
        assert low < high, "something to choose from"
        return low + int(self.uniform(1)[0] * (high - low))

    def order(self, count: int) -> NDArray[np.int64]:
        """A permutation of 0, …, count - 1."""
        return np.argsort(self.uniform(count), kind="stable")
