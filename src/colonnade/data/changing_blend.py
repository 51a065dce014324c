"""A blend whose proportions change on the way: each data set goes on behind its last sample. Pure.

    positions     0 ……………………… 600 │ 600 …………………… 1,000
    proportions   A 5 : B 1       │ A 1 : B 1
    samples       A 0 … 499       │ A 500 … 699
                  B 0 …  99       │ B 100 … 299

So no sample comes a second time before all of its data set came once, as in a blend that does not change.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from colonnade.data.blend import Blend, Location

Integers = NDArray[np.int64]


class ChangingBlend:
    """Blends of the same data sets one after the other, each from a position on."""

    def __init__(self, blends: Sequence[tuple[int, Blend]]) -> None:
        """`blends`: each with the position where it begins: 0 first, and rising."""
        begins = [begin for begin, _ in blends]
        assert begins[0] == 0 and begins == sorted(set(begins)), "each begins behind the one before"
        assert len({len(blend.weights) for _, blend in blends}) == 1, "blends of the same data sets"
        self._begins, self._blends = np.array(begins, dtype=np.int64), [blend for _, blend in blends]
        self.weights = self._blends[-1].weights
        self._before: list[Integers] = [np.zeros(len(self.weights), dtype=np.int64)]
        for length, blend in zip(np.diff(self._begins), self._blends, strict=False):
            self._before.append(self._before[-1] + blend.counts(int(length)))

    def locate(self, positions: Integers) -> Location:
        """Where the samples at positions [b] come from."""
        location = Location(np.empty_like(positions), np.empty_like(positions))
        numbers = np.searchsorted(self._begins, positions, side="right") - 1
        for number in np.unique(numbers):
            chosen = numbers == number
            inner = self._blends[number].locate(positions[chosen] - self._begins[number])
            location.sets[chosen] = inner.sets
            location.indices[chosen] = inner.indices + self._before[number][inner.sets]
        return location

    def counts(self, position: int) -> Integers:
        """Samples of each data set among the first `position` of the run [num_sets]."""
        number = int(np.searchsorted(self._begins, position, side="right")) - 1
        return self._before[number] + self._blends[number].counts(position - int(self._begins[number]))

    def length(self, sizes: Sequence[int]) -> int:
        """Positions before the first of the data sets, of so many samples, begins again."""
        ends = [*self._begins[1:].tolist(), math.inf]
        for begin, end, before, blend in zip(self._begins.tolist(), ends, self._before, self._blends, strict=True):
            left = [size - count for size, count in zip(sizes, before.tolist(), strict=True)]
            if (length := begin + blend.length(left)) < end:
                break
        return int(length)
