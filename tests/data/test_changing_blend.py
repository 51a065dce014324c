"""A blend that changes on the way: each data set goes on where it was, in the new proportions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data.blend import Blend
from colonnade.data.changing_blend import ChangingBlend


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.lists(st.integers(1, 9), min_size=3, max_size=3)), min_size=1, max_size=4
    )
)
def test_no_sample_comes_twice_or_never_and_each_part_has_its_proportions(
    parts: list[tuple[int, list[int]]],
) -> None:
    begins = np.cumsum([0, *(length for length, _ in parts)]).tolist()
    blend = ChangingBlend([(begin, Blend(weights)) for begin, (_, weights) in zip(begins, parts, strict=False)])
    place = blend.locate(np.arange(begins[-1]))
    for number in range(3):
        assert place.indices[place.sets == number].tolist() == list(range(int((place.sets == number).sum())))
    for begin, (length, weights) in zip(begins, parts, strict=False):
        inside = np.bincount(place.sets[begin : begin + length], minlength=3)
        assert (np.abs(inside - length * np.array(weights) / sum(weights)) < 1).all()
        assert blend.counts(begin).tolist() == np.bincount(place.sets[:begin], minlength=3).tolist()


def test_any_positions_in_any_order() -> None:
    blend = ChangingBlend([(0, Blend([3, 1])), (50, Blend([1, 1])), (81, Blend([1, 5]))])
    whole = blend.locate(np.arange(200))
    asked = np.array([199, 0, 80, 81, 49, 50, 120])
    some = blend.locate(asked)
    assert some.sets.tolist() == whole.sets[asked].tolist()
    assert some.indices.tolist() == whole.indices[asked].tolist()


def test_behind_two_changes_each_data_set_goes_on_where_it_was() -> None:
    blend = ChangingBlend([(0, Blend([5, 1])), (600, Blend([1, 1])), (1000, Blend([1, 2]))])
    assert blend.counts(1000).tolist() == [500 + 200, 100 + 200]
    behind = blend.locate(np.arange(1000, 1003))
    assert sorted(zip(behind.sets.tolist(), behind.indices.tolist(), strict=True)) == [(0, 700), (1, 300), (1, 301)]
    assert blend.weights == (1, 2)


@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        ([400, 1000], 480),  # in the first proportions
        ([500, 100], 600),  # as they end
        ([600, 1000], 800),
        ([1000, 299], 998),
        ([750, 1000], 1150),
        ([10_000, 400], 1150),
    ],
)
def test_it_lasts_until_the_first_data_set_begins_again_in_whatever_proportions(sizes: list[int], length: int) -> None:
    blend = ChangingBlend([(0, Blend([5, 1])), (600, Blend([1, 1])), (1000, Blend([1, 2]))])
    assert blend.length(sizes) == length
    assert (blend.counts(length) <= sizes).all()
    assert (blend.counts(length + turn(length)) > sizes).any()


def turn(position: int) -> int:
    """Samples in which each data set has been drawn once, there."""
    return 6 if position < 600 else 2 if position < 1000 else 3
