"""Boxes: overlaps against a brute-force count, tiling, and even shares."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.checkpoint.plan import Box, Shard, names_in_words, overlap, relative, share_out, tile
from tests.checkpoint.grids import grid, grids


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    dims = draw(st.integers(0, 3))
    sides = [[draw(st.tuples(st.integers(0, 5), st.integers(0, 4))) for _ in range(dims)] for _ in range(2)]
    first, second = (Box(tuple(o for o, _ in side), tuple(n for _, n in side)) for side in sides)
    return first, second


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True))))


@given(pairs())
def test_the_overlap_is_what_both_contain(pair: tuple[Box, Box]) -> None:
    common = overlap(*pair)
    assert (elements(common) if common else set()) == elements(pair[0]) & elements(pair[1])
    assert overlap(*pair) == overlap(*reversed(pair))


def test_relative_offsets() -> None:
    assert relative(Box((5, 2), (1, 1)), Box((4, 2), (3, 3))) == Box((1, 0), (1, 1))


@given(grids())
def test_grids_tile(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert tile(shape, boxes)
    assert sum(box.volume for box in boxes) == math.prod(shape)
    assert not tile(shape, boxes[1:])
    assert not tile(shape, [*boxes, boxes[0]])


def test_an_overlap_that_makes_up_for_a_gap_does_not_tile() -> None:
    assert not tile((4,), [Box((0,), (2,)), Box((1,), (2,))])
    assert not tile((2, 2), [Box((0, 0), (2, 1)), Box((1, 0), (1, 2))])


def test_one_thousand_slices_are_checked_fast() -> None:
    assert tile((1_000_000, 8), grid((1_000_000, 8), (1000, 2)))


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 1000), min_size=1), st.integers(1, 5))
def test_shares_are_even_where_all_hold_all(sizes: dict[int, int], num_ranks: int) -> None:
    owner = share_out(sizes, {key: list(range(num_ranks)) for key in sizes}, num_ranks)
    load = [sum(n for key, n in sizes.items() if owner[key] == rank) for rank in range(num_ranks)]
    assert max(load) - min(load) <= max(sizes.values())


@given(st.dictionaries(st.integers(), st.lists(st.integers(0, 3), min_size=1)))
def test_each_is_given_to_one_that_holds_it(holders: dict[int, list[int]]) -> None:
    owner = share_out(dict.fromkeys(holders, 7), holders, 4)
    assert owner.keys() == holders.keys() and all(owner[key] in holders[key] for key in holders)


def test_a_shard_must_lie_within_its_tensor() -> None:
    assert Shard("x", (4, 3), (2, 0), torch.zeros(2, 3)).box == Box((2, 0), (2, 3))
    for shape, offsets in (((4, 3), (3, 0)), ((4, 3), (-1, 0)), ((4,), (0,))):
        with pytest.raises(AssertionError):
            Shard("x", shape, offsets, torch.zeros(2, 3))


def test_names_in_words() -> None:
    assert names_in_words(["b", "a"]) == "a, b"
    assert names_in_words("gfedcba") == "a, b, c, d, e and 2 more"


def test_a_box_reads_as_an_index() -> None:
    assert str(Box((2, 0), (2, 3))) == "[2:4, 0:3]"
