"""Blends: exact proportions at every prefix, each sample of each data set once, any position alone."""

from __future__ import annotations

import math
import weakref
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colonnade.data import blend as blend_module
from colonnade.data.blend import Blend, whole_weights

weights_ = st.lists(st.integers(1, 10_000), min_size=1, max_size=12)
places = st.one_of(st.just(0), st.integers(0, 10_000), st.integers(0, 2**50))
LENGTH = 2_500


def largest_error(blend: Blend, start: int, length: int) -> float:
    """Of all data sets at all prefixes from `start` to `start + length`, in samples; exact until the last division."""
    sets = blend.locate(np.arange(start, start + length)).sets
    steps = np.arange(length + 1)
    worst = 0
    for i, (weight, had) in enumerate(zip(blend.weights, blend.counts(start).tolist(), strict=True)):
        counts = np.concatenate([[0], np.cumsum(sets == i)])
        errors = (had * blend.total - start * weight) + (counts * blend.total - steps * weight)
        worst = max(worst, int(np.abs(errors).max()))
    return worst / blend.total


@settings(max_examples=40, deadline=None)
@given(weights_, places)
@example([1], 0)
@example([1, 1, 1], 5_000)
@example([10_000, 1], 2**40 + 4_095)
@example([7, 5, 3, 3, 2, 2, 2, 1, 1, 1], 4_000)
def test_every_prefix_has_each_data_set_in_proportion(weights: list[int], start: int) -> None:
    assert largest_error(Blend(weights), start, LENGTH) < 1


def test_a_thousand_data_sets_are_in_proportion() -> None:
    rng = np.random.default_rng(0)
    blend = Blend(whole_weights(rng.uniform(0.2, 5, 1_000).tolist()))
    assert largest_error(blend, 10**9, 5_000) < 1


def test_rare_data_sets_are_in_proportion_too() -> None:
    blend = Blend([10**9, 10**9 + 7, 3, 1])
    rare_ends = sum(blend.weights) // 4
    for start in (0, rare_ends // 2 - 1_000, rare_ends - 1_000, 10**14):
        assert largest_error(blend, start, LENGTH) < 1.5
    assert blend.counts(blend.total).tolist() == list(blend.weights)


def test_a_data_set_of_just_one_sample_in_the_longest_block_is_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that are one sample rarer are mixed as rare ones."""
    monkeypatch.setattr(blend_module, "_LONGEST_BLOCK", 1 << 11)
    for rest, error in ((2_046, 1), (2_047, 1), (2_048, 1.5)):
        blend = Blend([rest, 1])
        assert largest_error(blend, 0, LENGTH) < error
        assert blend.counts(2 * (rest + 1)).tolist() == [2 * rest, 2]


def test_behind_a_rare_sample_the_frequent_ones_go_on_where_they_were() -> None:
    blend = Blend([10**6, 2 * 10**6, 1])
    place = blend.locate(np.arange(1_499_000, 1_501_000))
    assert (place.sets == 2).sum() == 1, "the rare sample is among them"
    for number, first in enumerate(blend.counts(1_499_000).tolist()):
        indices = place.indices[place.sets == number]
        assert indices.tolist() == list(range(first, first + len(indices)))


def test_a_rare_data_set_comes_when_half_of_a_sample_is_due() -> None:
    blend = Blend([10**9, 1])
    assert [blend.counts(position)[1] for position in (0, 5 * 10**8 - 1, 5 * 10**8 + 1, 15 * 10**8 + 5)] == [0, 0, 1, 2]
    assert largest_error(blend, 5 * 10**8 - 1_000, LENGTH) < 0.501


@pytest.mark.parametrize(
    ("weights", "sizes", "length"),
    [
        ([57, 205, 1, 4], [46, 60, 37, 34], 77),  # due 78, of which the second has 61
        ([1000, 5, 5, 2], [10**6, 4, 4, 3], 801),  # due 809, of which a rare one has 5
        ([1000, 1], [10**6, 3], 3003),  # as many as are due
        ([600, 5, 3], [10**6, 3, 4], 341),  # a rare one comes where half of it is due, here the first's fourth
    ],
)
def test_no_data_set_begins_again_within_the_length_where_some_are_rare(
    weights: list[int], sizes: list[int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blend_module, "_SHORTEST_BLOCK", 32)
    monkeypatch.setattr(blend_module, "_LONGEST_BLOCK", 64)
    blend = Blend(weights)
    assert blend.length(sizes) == length
    assert (blend.counts(length) <= sizes).all()


@settings(max_examples=40, deadline=None)
@given(weights_, places)
def test_each_sample_of_each_data_set_comes_once_and_in_turn(weights: list[int], start: int) -> None:
    blend = Blend(weights)
    place = blend.locate(np.arange(start, start + LENGTH))
    for i, had in enumerate(blend.counts(start).tolist()):
        mine = place.indices[place.sets == i]
        assert mine.tolist() == list(range(had, had + len(mine)))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(weights_, st.lists(st.integers(0, 20_000), min_size=1, max_size=20))
def test_any_position_alone_is_the_same_as_in_a_sweep(weights: list[int], positions: list[int]) -> None:
    """A resumed run, another batch size or another dp asks for the same positions in other groups."""
    sweep = Blend(weights).locate(np.arange(20_001))
    for position in positions:
        alone = Blend(weights).locate(np.array([position]))
        assert (alone.sets[0], alone.indices[0]) == (sweep.sets[position], sweep.indices[position])


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_a_whole_period_is_exactly_the_weights(weights: list[int]) -> None:
    blend = Blend(weights)
    for periods in (1, 7):
        assert blend.counts(periods * blend.total).tolist() == [periods * weight for weight in blend.weights]


def test_the_order_never_changes() -> None:
    """A change of these numbers changes the data of every blended run that is resumed."""
    assert Blend([3, 2, 1]).locate(np.arange(12)).sets.tolist() == [0, 1, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    far = Blend([50, 30, 17, 3]).locate(np.arange(10**12, 10**12 + 12))
    assert far.sets.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]
    assert far.indices[:4].tolist() == [500_000_000_000, 300_000_000_000, 500_000_000_001, 170_000_000_000]


# Weights


def test_weights_are_taken_as_they_are_written() -> None:
    assert whole_weights([0.1, 0.7, 0.2]) == (1, 7, 2)
    assert whole_weights([3, 1.5, Fraction(1, 2)]) == (6, 3, 1)
    assert whole_weights([5]) == (1,)
    assert whole_weights([1e-3, 1]) == (1, 1_000)


@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=9), st.integers(1, 10**15))
def test_only_proportions_count_however_large_the_numbers_are(weights: list[int], factor: int) -> None:
    """Numbers of tokens, say, whose sum is above 2⁴⁰ but whose proportions are those of small ones."""
    divisor = math.gcd(*weights)
    assert whole_weights([factor * weight for weight in weights]) == tuple(weight // divisor for weight in weights)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=50))
def test_other_weights_are_rounded_far_below_a_sample(weights: list[float]) -> None:
    whole = whole_weights(weights)
    assert min(whole) >= 1
    assert sum(whole) <= (1 << 40) + len(weights)
    for given_, rounded in zip(weights, whole, strict=True):
        assert abs(rounded / sum(whole) - given_ / math.fsum(weights)) < 2e-11


@pytest.mark.parametrize("weights", [[], [1, 0], [2, -1]])
def test_no_data_set_without_a_weight(weights: list[int]) -> None:
    with pytest.raises(AssertionError):
        Blend(weights)


def test_of_many_blocks_the_last_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes through millions; and those that are worked out again are the same."""
    monkeypatch.setattr(blend_module, "_SHORTEST_BLOCK", 8)
    made, find = list[weakref.ref[np.ndarray[Any, Any]]](), blend_module._earliest_deadline_first

    def finding(*arguments: Any) -> np.ndarray[Any, Any]:
        found = find(*arguments)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(blend_module, "_earliest_deadline_first", finding)
    blend = Blend([3, 2, 1])
    before = [each.tolist() for each in blend.locate(np.arange(400))]
    assert len(made) >= 50 and sum(each() is not None for each in made) <= blend_module._KEPT_BLOCKS
    assert [each.tolist() for each in blend.locate(np.arange(400))] == before
