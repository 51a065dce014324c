"""Several data sets mixed in exact proportions: a pure function from a position to (data set, index within it).

With integer weights k_1 … k_n of sum M, data set i is due P·k_i/M samples among the first P. The order gives it `floor`
or `ceil` of that at every prefix P: the error is below one sample, at any time, for every data set.

    weights 3 : 2 : 1     A B A C B A | A B A C B A | …         six positions: three, two, one

That is single-machine scheduling. The j-th sample of data set i may stand at a position of its window and nowhere else:

    floor((j-1)·M/k_i)  ≤  position  <  ceil(j·M/k_i)           (Baruah et al., "Proportionate progress", 1996)

and taking at each position the sample whose window ends first (EDF) keeps all windows, as the due amounts add up to the
number of positions. EDF has a memory, so it alone gives no random access. Here the positions are cut into blocks no
shorter than the longest window, and the state at a block's start is a function of the block's number only:

  1. `_rounded`: of the amounts due at a position, round up those whose window ends first, as many as it takes. EDF
     keeps all windows from there on: what falls due later is at most what whole windows hold, and what was rounded up
     comes off the first deadlines.
  2. `_boundary`: run EDF for one block from that state. Where it ends up, every sample that could have been begun
     earlier has its window in the block just run, so the state can be reached from any earlier one, too.
  3. `_block`: EDF between two such states, with windows clipped to the block, keeps all windows by Hall's theorem:
     no run of positions at the left end (by 1), at the right end (by 2) or between is wanted by more samples than fit.

So a block is three passes of EDF, in memory, for the positions that are asked for. Tijdeman ("The chairman assignment
problem", 1980) has the theorem that such orders exist.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

_MAX_TOTAL = 1 << 40
END_OF_TOTALS = 2 * _MAX_TOTAL
"""No sum of a blend's weights, without their common divisor, may be so large."""
_SHORTEST_BLOCK, _LONGEST_BLOCK = 1 << 11, 1 << 17
_KEPT_BLOCKS = 4


class Location(NamedTuple):
    """Where the samples of some positions [b] come from."""

    sets: Integers
    """The data set of each [b]."""
    indices: Integers
    """How many samples of that data set came before it [b]."""


class Blend:
    """The order of a mixture with integer weights: data set i gets `weights[i]` of each `sum(weights)` positions.

    Every prefix has less than one sample more or less of each data set than is due. Where the rarest data set makes
    less than one position in 131,072, the rare ones are mixed among themselves and take the place that is due to them
    all together; the error is then below one and a half.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        assert weights and all(weight > 0 for weight in weights), "every data set of a blend has a weight"
        divisor = math.gcd(*weights)
        self.weights = tuple(weight // divisor for weight in weights)
        self.total = sum(self.weights)
        assert self.total < END_OF_TOTALS, "see whole_weights"
        self._mixed = _mixer(self.weights, self.total)

    def locate(self, positions: Integers) -> Location:
        """Where the samples at positions [b] come from."""
        return self._mixed.locate(positions)

    def counts(self, position: int) -> Integers:
        """Samples of each data set among the first `position` of the run [num_sets]."""
        return self._mixed.counts(position)

    def length(self, sizes: Sequence[int]) -> int:
        """Positions before the first of the data sets, of so many samples, begins again: at most as many as are due."""
        due = min(size * self.total // weight for size, weight in zip(sizes, self.weights, strict=True))
        return due if isinstance(self._mixed, _Fair) else min(due, self._mixed.length(sizes))


def whole_weights(weights: Sequence[float | int | Fraction]) -> tuple[int, ...]:
    """Integers in the proportions of the weights, which are taken as they are written: 0.1 is one tenth.

    Exact where the integers' sum stays below 2⁴⁰; else to the nearest 2⁻⁴⁰ of the sum, and at least that.
    """
    fractions = [weight if isinstance(weight, Fraction) else Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    divisor, total = math.gcd(*whole), sum(whole)
    if total // divisor <= _MAX_TOTAL:
        return tuple(weight // divisor for weight in whole)
    return tuple(max(1, (2 * weight * (_MAX_TOTAL >> 1) + total) // (2 * total)) for weight in whole)


def _mixer(weights: tuple[int, ...], total: int) -> _Fair | _WithRare:
    frequent = [i for i, weight in enumerate(weights) if weight * _LONGEST_BLOCK >= total]
    return _Fair(weights, total) if len(frequent) == len(weights) else _WithRare(weights, total)


class _Fair:
    """The order of a blend without rare data sets."""

    def __init__(self, weights: tuple[int, ...], total: int) -> None:
        self._weights, self._total = np.array(weights, dtype=np.int64), total
        longest = -(-total // min(weights))
        self.length = max(_SHORTEST_BLOCK, 1 << (longest - 1).bit_length())
        self._boundaries: OrderedDict[int, Integers] = OrderedDict()
        self._blocks: OrderedDict[int, Location] = OrderedDict()

    def locate(self, positions: Integers) -> Location:
        numbers, within = np.divmod(positions, self.length)
        location = Location(np.empty_like(within), np.empty_like(within))
        for number in np.unique(numbers):
            chosen = numbers == number
            block = self._block(int(number))
            location.sets[chosen] = block.sets[within[chosen]]
            location.indices[chosen] = block.indices[within[chosen]]
        return location

    def counts(self, position: int) -> Integers:
        number, within = divmod(position, self.length)
        due = _due(self._weights, self._total, number * self.length)
        start = due.whole + self._boundary(number)
        if not within:
            return start
        return start + np.bincount(self._block(number).sets[:within], minlength=len(start))

    def _block(self, number: int) -> Location:
        """The whole of one block: the last few are kept."""
        if number not in self._blocks:
            self._blocks[number] = self._make_block(number)
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[number]

    def _make_block(self, number: int) -> Location:
        due, next_due = (_due(self._weights, self._total, (number + n) * self.length) for n in (0, 1))
        done = self._boundary(number)
        last = next_due.whole + self._boundary(number + 1) - due.whole
        sets = _earliest_deadline_first(due, done, last, self._weights, self._total, self.length)
        return Location(sets, _ranks(sets, len(done)) + (due.whole + done)[sets])

    def _boundary(self, number: int) -> Integers:
        """0 or 1 for each data set [num_sets]: what it has at the start of a block beyond the whole part of its due."""
        if number == 0:
            return np.zeros(len(self._weights), dtype=np.int64)
        if number not in self._boundaries:
            self._boundaries[number] = self._make_boundary(number)
            while len(self._boundaries) > _KEPT_BLOCKS:
                self._boundaries.popitem(last=False)
        return self._boundaries[number]

    def _make_boundary(self, number: int) -> Integers:
        due, next_due = (_due(self._weights, self._total, (number - n) * self.length) for n in (1, 0))
        done = _rounded(due, self._weights, self._total)
        begun = -(-(due.rest + self.length * self._weights) // self._total)  # windows that open within the block
        sets = _earliest_deadline_first(due, done, begun, self._weights, self._total, self.length)
        had: Integers = due.whole + done + np.bincount(sets, minlength=len(done))
        return had - next_due.whole


class _WithRare:
    """Rare data sets as one, beside all others: two orders, and a rounded line that says whose turn it is."""

    def __init__(self, weights: tuple[int, ...], total: int) -> None:
        self._total = total
        self._groups = [
            np.array([i for i, weight in enumerate(weights) if (weight * _LONGEST_BLOCK < total) == rare])
            for rare in (False, True)
        ]
        parts = [[weights[i] for i in group] for group in self._groups]
        self._rare, self._num_sets = sum(parts[1]), len(weights)
        self._orders = [Blend(part) for part in parts]

    def locate(self, positions: Integers) -> Location:
        before, after = self._num_rare(positions), self._num_rare(positions + 1)
        location = Location(np.empty_like(positions), np.empty_like(positions))
        for rare, (group, order) in enumerate(zip(self._groups, self._orders, strict=True)):
            chosen = (after > before) == bool(rare)
            if chosen.any():
                inner = order.locate((before if rare else positions - before)[chosen])
                location.sets[chosen], location.indices[chosen] = group[inner.sets], inner.indices
        return location

    def counts(self, position: int) -> Integers:
        rare = int(self._num_rare(np.array([position], dtype=np.int64))[0])
        counts = np.empty(self._num_sets, dtype=np.int64)
        for group, order, number in zip(self._groups, self._orders, (position - rare, rare), strict=True):
            counts[group] = order.counts(number)
        return counts

    def length(self, sizes: Sequence[int]) -> int:
        """Positions before one of the two orders has gone through as many as its data sets, of so many samples, give
        it.
        """
        frequent, rare = (
            order.length([sizes[i] for i in group]) for group, order in zip(self._groups, self._orders, strict=True)
        )
        ends: tuple[int, int] = (
            (2 * frequent + 1) * self._total // (2 * (self._total - self._rare)),
            ((2 * rare + 1) * self._total - 1) // (2 * self._rare),
        )
        return min(ends)

    def _num_rare(self, positions: Integers) -> Integers:
        """Positions before each that belong to rare data sets: what is due, to the nearest whole."""
        exact = (2 * self._rare * positions.astype(object) + self._total) // (2 * self._total)
        return np.asarray(exact, dtype=np.int64)


@dataclass(frozen=True)
class _Due:
    """What is due to each data set at a position: `whole + rest / total` samples."""

    whole: Integers
    rest: Integers


def _due(weights: Integers, total: int, position: int) -> _Due:
    pairs = np.array([divmod(position * weight, total) for weight in weights.tolist()], dtype=np.int64)
    return _Due(pairs[:, 0], pairs[:, 1])


def _rounded(due: _Due, weights: Integers, total: int) -> Integers:
    """0 or 1 for each data set [num_sets]: due amounts rounded to integers of the same sum, first deadlines up."""
    deadlines = np.where(due.rest > 0, -((due.rest - total) // weights), np.iinfo(np.int64).max)
    first = np.argsort(deadlines, kind="stable")[: int(sum(due.rest.tolist()) // total)]
    up = np.zeros(len(weights), dtype=np.int64)
    up[first] = 1
    return up


def _earliest_deadline_first(
    due: _Due, done: Integers, last: Integers, weights: Integers, total: int, length: int
) -> Integers:
    """Data sets of the positions of a block [length], from samples `done + 1 … last` (after `due.whole`) of each."""
    sets = np.repeat(np.arange(len(done)), last - done)
    number = np.arange(len(sets)) - np.repeat(np.cumsum(last - done) - last, last - done) + 1
    rest, weight = due.rest[sets], weights[sets]
    opens = np.maximum(((number - 1) * total - rest) // weight, 0)
    closes = -((rest - number * total) // weight)  # beyond the block too: its end comes after all within it
    by_opening = np.argsort(opens, kind="stable")
    keys = (closes * len(done) + sets)[by_opening].tolist()
    open_by = np.searchsorted(opens[by_opening], np.arange(length), side="right").tolist()
    taken = np.array(_take(keys, open_by), dtype=np.int64)
    late = np.flatnonzero(taken // len(done) <= np.arange(length))
    assert not late.size, "a window was missed: the proof at the top of this file does not hold"
    return taken % len(done)


def _take(keys: list[int], open_by: list[int]) -> list[int]:
    """The smallest key at each step among the first `open_by[step]`, each taken once."""
    heap: list[int] = []
    taken: list[int] = []
    before = 0
    for stop in open_by:
        for key in keys[before:stop]:
            heapq.heappush(heap, key)
        before = stop
        taken.append(heapq.heappop(heap))
    return taken


def _ranks(sets: Integers, num_sets: int) -> Integers:
    """How many equal entries stand before each entry."""
    order = np.argsort(sets, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(sets, minlength=num_sets))])
    ranks = np.empty_like(sets)
    ranks[order] = np.arange(len(sets)) - starts[sets[order]]
    return ranks
