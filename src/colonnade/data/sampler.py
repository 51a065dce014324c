"""The order of a run's samples, as a pure function from a position to a sample.

A *position* counts the samples of a run: 0 is the first sample of the first step. It is the whole state of the data
order: a run goes on from a position with any batch size and any number of data-parallel ranks.

The order is a keyed pseudo-random permutation, a bijection on [0, n) that is computed and never stored: a Feistel
network over the smallest power of two that holds n, walked along its cycle until it lands below n again
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The two halves of the bits take turns:

    left ^= hash(key_0, right)      right ^= hash(key_1, left)      left ^= hash(key_2, right)   …

Each line is undone by itself, so the whole is a bijection whatever the hash. The hash is the finisher of SplitMix64
(Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import DataError

Integers = NDArray[np.int64]

_ROUNDS = 12  # half rounds; 4 pass for an adversary's eye on large domains, small ones need a few more to be uniform
_BLOCK = 256  # neighbours that are worked out together, and remembered
_FEW = 4  # indices that are not worth a block: of a file that is one of many in a blend
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


class Order(Protocol):
    """Which sample stands at a position of the run."""

    def samples(self, positions: Integers) -> Integers:
        """Sample indices [b] of positions [b]."""
        ...

    def epochs(self, positions: Integers) -> Integers:
        """Which of its times each position's sample comes [b], counted from 0: no two of a sample are the same."""
        ...


@dataclass(frozen=True)
class InOrder:
    """Samples one after the other, again from the start at the end: for validation."""

    num_samples: int

    def samples(self, positions: Integers) -> Integers:
        return positions % self.num_samples

    def epochs(self, positions: Integers) -> Integers:
        return positions // self.num_samples


@dataclass(frozen=True)
class EpochOrder:
    """Each epoch is a permutation of its own, so that a longer run only adds to what a shorter one did."""

    num_samples: int
    seed: int

    def samples(self, positions: Integers) -> Integers:
        epochs, within = np.divmod(positions, self.num_samples)
        result = np.empty_like(within)
        for epoch in set(epochs.tolist()):
            chosen = epochs == epoch
            result[chosen] = permute(within[chosen], self.num_samples, key=(self.seed, epoch))
        return result

    def epochs(self, positions: Integers) -> Integers:
        return positions // self.num_samples


@dataclass(frozen=True)
class AllEpochsOrder:
    """All epochs laid end to end and shuffled as one, as BLOOM did: a sample may return before the others were seen."""

    num_samples: int
    num_epochs: int
    seed: int

    def samples(self, positions: Integers) -> Integers:
        return self._places(positions) % self.num_samples

    def epochs(self, positions: Integers) -> Integers:
        return self._places(positions) // self.num_samples

    def _places(self, positions: Integers) -> Integers:
        """In all epochs, laid end to end."""
        total = self.num_samples * self.num_epochs
        beyond = positions[positions >= total]
        if beyond.size:
            raise DataError(
                f"the run asks for sample {int(beyond[0]):,}, but data.epochs = {self.num_epochs} of "
                f'{self.num_samples:,} samples end at {total:,}: data.order = "all_epochs" shuffles all epochs at once '
                f"and has to know how many there are. Set data.epochs = {int(beyond[0]) // self.num_samples + 1} or "
                "more (which reorders "
                'the run), or data.order = "epoch".'
            )
        return permute(positions, total, key=(self.seed, self.num_epochs))


def permute(indices: Integers, size: int, *, key: tuple[int, ...]) -> Integers:
    """Images [b] of indices [b] under the permutation of [0, size) that belongs to the key."""
    assert size > 0, "a permutation needs at least one element"
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= size):
        raise IndexError(f"a permutation of [0, {size}) has no place {int(indices.min())}..{int(indices.max())}")
    if indices.size >= _BLOCK:
        return _images(indices, size, key)
    if indices.size < _FEW:
        return np.array([permute_one(index, size, key=key) for index in indices.tolist()], dtype=np.int64)
    result = np.empty(indices.shape, dtype=np.int64)
    blocks = indices // _BLOCK
    for block in set(blocks.tolist()):
        chosen = blocks == block
        result[chosen] = _images_of_block(block, size, key)[indices[chosen] % _BLOCK]
    return result


@lru_cache(maxsize=2048)  # 4 MB
def _images_of_block(block: int, size: int, key: tuple[int, ...]) -> Integers:
    """Images of neighbours: they are asked for one after the other, and all of them cost hardly more than a few."""
    return _images(np.arange(block * _BLOCK, min((block + 1) * _BLOCK, size)), size, key)


def _images(indices: Integers, size: int, key: tuple[int, ...]) -> Integers:
    bits = max(2, (size - 1).bit_length())
    keys = _round_keys(key)
    result = _scramble(indices.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(result >= np.uint64(size))
    while outside.size:
        result[outside] = _scramble(result[outside], bits, keys)
        outside = outside[result[outside] >= np.uint64(size)]
    return result.astype(np.int64)


def permute_one(index: int, size: int, *, key: tuple[int, ...]) -> int:
    """The image of one index: `permute` in plain integers."""
    assert 0 <= index < size, "an index lies in [0, size)"
    bits = max(2, (size - 1).bit_length())
    keys = _round_keys(key)
    index = _scramble_one(index, bits, keys)
    while index >= size:
        index = _scramble_one(index, bits, keys)
    return index


def _scramble(values: NDArray[np.uint64], bits: int, keys: list[int]) -> NDArray[np.uint64]:
    low = bits // 2
    left, right = values >> np.uint64(low), values & np.uint64((1 << low) - 1)
    for turn, key in enumerate(keys):
        if turn % 2:
            right = right ^ (_finish(left + np.uint64(key)) >> np.uint64(64 - low))
        else:
            left = left ^ (_finish(right + np.uint64(key)) >> np.uint64(64 - (bits - low)))
    return (left << np.uint64(low)) | right


def _scramble_one(value: int, bits: int, keys: list[int]) -> int:
    low = bits // 2
    left, right = value >> low, value & ((1 << low) - 1)
    for turn, key in enumerate(keys):
        if turn % 2:
            right ^= _finish_one(left + key) >> (64 - low)
        else:
            left ^= _finish_one(right + key) >> (64 - (bits - low))
    return (left << low) | right


def _finish(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def _finish_one(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _round_keys(key: tuple[int, ...]) -> list[int]:
    state = 0
    for part in key:
        state = _finish_one(state + _GOLDEN + (part & _MASK))
    return [_finish_one(state + _GOLDEN * (turn + 1)) for turn in range(_ROUNDS)]


def cut_in_microbatches(global_batch_size: int, micro_batch_size: int, *, dp_rank: int, dp_size: int) -> list[range]:
    """Which samples of a global batch are in each micro-batch of one dp rank."""
    assert global_batch_size % (dp_size * micro_batch_size) == 0, (
        "the config check lets only whole micro-batches through"
    )
    share = global_batch_size // dp_size
    first = dp_rank * share
    return [range(begin, begin + micro_batch_size) for begin in range(first, first + share, micro_batch_size)]
