"""MinHash signatures and their bands (Broder 1997; Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", ch. 3).

    set of shingles ── min of each of b·r hash functions ──▶ signature ── r values a band ──▶ b numbers

Two sets of Jaccard similarity s agree in one value with probability s, and in at least one band with
1 − (1 − s^r)^b: the S-curve. Pure functions of their arguments.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colonnade.corpus.words import Hashes, mixed

_CHUNK = 2048  # shingles at a time: [permutations, chunk] stays in the cache
_SEED = 0x5EED_C010


class Bands:
    """The hash functions of b bands of r values."""

    def __init__(self, num_bands: int, num_rows: int) -> None:
        self.num_bands, self.num_rows = num_bands, num_rows
        numbers = mixed(np.arange(1, 2 * num_bands * num_rows + 1, dtype=np.uint64) * np.uint64(_SEED))
        factors, offsets = np.split(numbers, 2)
        self._factors = ((factors >> np.uint64(32)).astype(np.uint32) | np.uint32(1))[:, None]
        self._offsets = (offsets >> np.uint64(32)).astype(np.uint32)[:, None]
        self._of_band = mixed(np.arange(1, num_bands + 1, dtype=np.uint64))

    def signature(self, shingles: Hashes) -> NDArray[np.uint32]:
        """The least value of each hash function [bands · rows] over a set of shingles."""
        short = (shingles >> np.uint64(32)).astype(np.uint32)
        least = np.full(len(self._factors), np.iinfo(np.uint32).max, np.uint32)
        for start in range(0, len(short), _CHUNK):
            values = self._factors * short[start : start + _CHUNK] + self._offsets
            values ^= values >> np.uint32(15)
            values *= np.uint32(0x2C1B3C6D)
            np.minimum(least, values.min(axis=1), out=least)
        return least

    def of(self, shingles: Hashes) -> Hashes:
        """One number [bands] for each band of a set of shingles; equal where all values of the band are."""
        values = self.signature(shingles).astype(np.uint64).reshape(self.num_bands, self.num_rows)
        numbers = self._of_band.copy()
        for row in range(self.num_rows):
            numbers = mixed(numbers ^ values[:, row])
        return numbers


def recall(similarity: float, num_bands: int, num_rows: int) -> float:
    """The probability that two sets of a Jaccard similarity become candidates."""
    return 1.0 - (1.0 - similarity**num_rows) ** num_bands


def jaccard(first: Hashes, second: Hashes) -> float:
    """The exact Jaccard similarity of two sets, each sorted."""
    if len(first) > len(second):
        first, second = second, first
    if not len(second):
        return 1.0
    places = np.searchsorted(second, first)
    places[places == len(second)] = 0
    common = int(np.count_nonzero(second[places] == first))
    return common / (len(first) + len(second) - common)
