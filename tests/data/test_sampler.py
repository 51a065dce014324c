"""The order of samples: a bijection, each sample once an epoch, the past fixed whatever follows, no visible pattern."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.data.sampler import (
    AllEpochsOrder,
    EpochOrder,
    InOrder,
    Order,
    cut_in_microbatches,
    permute,
    permute_one,
)
from colonnade.errors import DataError

sizes = st.one_of(st.integers(1, 40), st.integers(1, 5_000))
seeds = st.integers(-(2**70), 2**70)


@given(sizes, seeds, st.integers(0, 2**40))
def test_every_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(size), size, key=(seed, epoch))) == list(range(size))


@given(st.integers(1, 2**62), seeds, st.data())
def test_arrays_and_plain_integers_agree(size: int, seed: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    images = permute(np.array(indices, dtype=np.int64), size, key=(seed, 3))
    assert images.tolist() == [permute_one(index, size, key=(seed, 3)) for index in indices]


def test_the_order_never_changes() -> None:
    """A change of these numbers changes the data order of every run that is resumed."""
    assert permute(np.arange(10), 10, key=(1234, 0)).tolist() == [0, 3, 1, 6, 4, 7, 8, 5, 9, 2]
    assert permute(np.arange(4), 10**12, key=(1234, 7)).tolist() == [
        52901811308,
        263810329851,
        453842418053,
        440827014723,
    ]
    assert AllEpochsOrder(5, 2, 1234).samples(np.arange(10)).tolist() == [2, 4, 1, 0, 4, 3, 2, 3, 1, 0]


@pytest.mark.parametrize("index", [-1, 10])
def test_no_place_outside(index: int) -> None:
    with pytest.raises(IndexError):
        permute(np.array([index]), 10, key=(0,))


@given(sizes, st.integers(1, 5), seeds)
def test_each_sample_once_an_epoch(size: int, epochs: int, seed: int) -> None:
    order = EpochOrder(size, seed)
    seen = order.samples(np.arange(size * epochs))
    for epoch in range(epochs):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(sizes, st.integers(1, 5), seeds)
def test_each_sample_as_often_as_there_are_epochs_when_shuffled_as_one(size: int, epochs: int, seed: int) -> None:
    seen = AllEpochsOrder(size, epochs, seed).samples(np.arange(size * epochs))
    assert set(Counter(seen.tolist()).values()) == {epochs}


@settings(max_examples=30)
@given(st.integers(1, 300), seeds, st.lists(st.integers(0, 300), max_size=30))
def test_any_position_alone_is_the_same_as_in_a_sweep(size: int, seed: int, positions: list[int]) -> None:
    """A longer run, another batch size or a resumed run asks for the same positions in other groups."""
    order = EpochOrder(size, seed)
    sweep = order.samples(np.arange(301))
    assert order.samples(np.array(positions, dtype=np.int64)).tolist() == sweep[positions].tolist()


def test_all_epochs_mixes_epochs_and_the_default_does_not() -> None:
    first = AllEpochsOrder(1_000, 4, seed=1).samples(np.arange(1_000))
    assert len(set(first.tolist())) < 800  # a quarter of a shuffle of four copies: 1 - (3/4)**4 = 68 % distinct
    assert len(set(EpochOrder(1_000, seed=1).samples(np.arange(1_000)).tolist())) == 1_000


@pytest.mark.parametrize("kind", ["in order", "epoch", "all epochs"])
def test_no_sample_comes_twice_as_the_same_time(kind: str) -> None:
    """What is drawn for a sample, as the words that are masked, is drawn anew each time that it comes."""
    orders: dict[str, Order] = {
        "in order": InOrder(10),
        "epoch": EpochOrder(10, seed=1),
        "all epochs": AllEpochsOrder(10, 4, seed=1),
    }
    positions = np.arange(40)
    times = list(zip(orders[kind].samples(positions).tolist(), orders[kind].epochs(positions).tolist(), strict=True))
    assert sorted(times) == [(sample, epoch) for sample in range(10) for epoch in range(4)]


def test_all_epochs_end() -> None:
    with pytest.raises(DataError, match=r"sample 30, but data.epochs = 3 of 10 .* Set data.epochs = 4"):
        AllEpochsOrder(10, 3, seed=0).samples(np.array([29, 30]))


def test_the_first_sample_behind_the_end_is_told_with_epochs_that_are_enough() -> None:
    order = AllEpochsOrder(5, 2, 1)
    with pytest.raises(DataError, match=r"asks for sample 10, .* end at 10: .* Set data\.epochs = 3 or more"):
        order.samples(np.array([3, 10, 27]))


def test_no_epoch_repeats_another_nor_another_seeds() -> None:
    """Also of numbers that are alike in their last bits."""
    size, epochs = 60, [*range(20), 2**31, 2**32, 2**32 + 1, 2**40]
    orders = {
        (seed, epoch): EpochOrder(size, seed).samples(epoch * size + np.arange(size)).tobytes()
        for seed in (0, 1, 2, 2**31, 2**32, 2**32 + 1)
        for epoch in epochs
    }
    assert len(set(orders.values())) == len(orders)


def test_an_epoch_is_not_another_seeds_epoch() -> None:
    """Runs that differ in their seed by one do not see each other's orders, one epoch later."""
    first, other = (EpochOrder(1_000, seed).samples(np.arange(3_000)).reshape(3, -1) for seed in (5, 6))
    assert not any((one == another).all() for one in first for another in other)
    assert EpochOrder(10, 1234).samples(np.arange(20)).tolist() == [
        *permute(np.arange(10), 10, key=(1234, 0)),
        *permute(np.arange(10), 10, key=(1234, 1)),
    ]


def test_in_order_starts_again() -> None:
    assert InOrder(3).samples(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_permutation_of_a_few_is_equally_likely(size: int) -> None:
    trials, kinds = 3_000, math.factorial(size)
    counts = Counter(tuple(permute(np.arange(size), size, key=(seed, 9)).tolist()) for seed in range(trials))
    assert len(counts) == kinds
    chi_square = sum((count - trials / kinds) ** 2 for count in counts.values()) / (trials / kinds)
    assert abs(chi_square - (kinds - 1)) < 5 * math.sqrt(2 * (kinds - 1))


@pytest.mark.parametrize("size", [1_000, 1_024, 1_025, 100_003])
def test_places_and_neighbours_look_random(size: int) -> None:
    """Correlations of a permutation with its place, its neighbour, the next epoch and the next seed: about 1/√n."""
    here = permute(np.arange(size), size, key=(5, 0))
    others = {
        "place": np.arange(size),
        "neighbour": np.roll(here, 1),
        "next epoch": permute(np.arange(size), size, key=(5, 1)),
        "next seed": permute(np.arange(size), size, key=(6, 0)),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(here, other)[0, 1]) < 4.5 / math.sqrt(size), name
        assert (here == other).sum() < 10, name


def test_batches_are_spread_evenly() -> None:
    """Each step's samples fill all parts of the corpus as independent draws would, slightly more evenly."""
    size, batch, parts = 1 << 20, 512, 16
    order = EpochOrder(size, seed=3)
    chi_squares = []
    for step in range(100):
        samples = order.samples(np.arange(step * batch, (step + 1) * batch))
        counts = np.bincount(samples * parts // size, minlength=parts)
        chi_squares.append(((counts - batch / parts) ** 2).sum() / (batch / parts))
    deviation = math.sqrt(2 * (parts - 1) / 100)
    assert abs(np.mean(chi_squares) - (parts - 1)) < 5 * deviation


@settings(max_examples=20)
@given(st.integers(2**40, 2**62))
def test_large_corpora_cost_no_more(size: int) -> None:
    images = permute(np.arange(256), size, key=(0, 0))
    assert len(set(images.tolist())) == 256
    assert 0 <= images.min() <= images.max() < size


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 4), (2, 2), (3, 4), (4, 3), (12, 1)])
def test_microbatches_of_all_ranks_tile_the_batch_in_order(dp: int, micro: int) -> None:
    """Each rank has an equal share of neighbours, in micro-batches of neighbours."""
    shares = [cut_in_microbatches(12, micro, dp_rank=rank, dp_size=dp) for rank in range(dp)]
    assert [sample for share in shares for batch in share for sample in batch] == list(range(12))
    assert {len(batch) for share in shares for batch in share} == {micro}
    assert {len(share) for share in shares} == {12 // dp // micro}


def test_a_batch_that_does_not_divide_is_no_batch() -> None:
    for batch, micro, dp in ((12, 5, 1), (12, 4, 2), (12, 1, 5)):
        with pytest.raises(AssertionError, match="whole micro-batches"):
            cut_in_microbatches(batch, micro, dp_rank=0, dp_size=dp)
