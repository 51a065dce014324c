"""Boxes: overlaps against a brute-force count, tiling, and even shares."""

import itertools
import math
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.checkpoint.plan import (
    Box,
    Shard,
    boxes_of_span,
    cut,
    names_in_words,
    overlap,
    relative,
    shards_of_range,
    share_boxes,
    share_out,
    tile,
)
from tests.checkpoint.grids import grid, grids, number, view_of


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


def test_shares_are_even_by_size_and_not_by_number() -> None:
    owner = share_out({"large": 100.0, **dict.fromkeys("abcdefghij", 10.0)}, defaultdict(lambda: [0, 1]), 2)
    assert [owner[name] for name in ("large", *"abcdefghij")] == [0] + [1] * 10


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


# --- ranges of flattened tensors -------------------------------------------------------------------------------------


@st.composite
def spans(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    ends = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(ends), draw(ends)))
    return shape, start, stop


@given(spans())
def test_a_span_is_made_of_its_boxes_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes, x = boxes_of_span(shape, start, stop), number(shape)
    parts = [view_of(x, box).reshape(-1) for box in boxes]
    assert torch.cat([*parts, torch.zeros(0)]).tolist() == list(range(start + 1, stop + 1))
    assert len(boxes) <= max(1, 2 * len(shape) - 1) and all(box.volume for box in boxes)
    assert all(view_of(x, box).is_contiguous() for box in boxes)


def test_spans_of_a_matrix() -> None:
    assert boxes_of_span((4, 5), 3, 17) == [Box((0, 3), (1, 2)), Box((1, 0), (2, 5)), Box((3, 0), (1, 2))]
    assert boxes_of_span((4, 5), 6, 9) == [Box((1, 1), (1, 3))]
    assert boxes_of_span((4, 5), 0, 20) == [Box((0, 0), (4, 5))]
    assert boxes_of_span((4, 5), 3, 7) == [Box((0, 3), (1, 2)), Box((1, 0), (1, 2))]
    assert boxes_of_span((4, 5), 7, 7) == []
    assert boxes_of_span((), 0, 1) == [Box((), ())]
    with pytest.raises(AssertionError, match=r"\[0, 21\) must lie in a tensor of shape \[4, 5\]"):
        boxes_of_span((4, 5), 0, 21)


@given(spans(), st.data())
def test_shards_of_a_span_are_views_of_its_real_part(
    case: tuple[tuple[int, ...], int, int], data: st.DataObject
) -> None:
    """`held` lies anywhere: beside the tensor's beginning, over its end, outside of it."""
    sizes, start, stop = case
    offsets = tuple(data.draw(st.integers(0, 4)) for _ in sizes)
    shape = tuple(data.draw(st.integers(1, 6)) for _ in sizes)
    offsets = tuple(min(o, n) for o, n in zip(offsets, shape, strict=True))
    flat = torch.zeros(stop - start)
    for count, shard in enumerate(shards_of_range("w", shape, Box(offsets, sizes), flat, start), start=1):
        assert shard.data.eq(0).all(), "no element twice"
        shard.data.fill_(count)
    written, real = torch.zeros(math.prod(sizes)), torch.zeros(sizes)
    common = overlap(Box(offsets, sizes), Box((0,) * len(shape), shape))
    if common is not None:
        view_of(real, relative(common, Box(offsets, sizes))).fill_(1)
    written[start:stop] = flat
    assert torch.equal(written.ne(0)[start:stop], real.reshape(-1)[start:stop].ne(0))


# --- sharing the writing ----------------------------------------------------------------------------------------------


def test_a_box_is_cut_in_whole_rows_where_there_are_enough() -> None:
    """So that each part lies in one range of memory."""
    assert cut(Box((2, 0), (4, 8)), [1, 3]) == [Box((2, 0), (1, 8)), Box((3, 0), (3, 8))]
    assert cut(Box((0, 0), (3, 8)), [1, 3]) == [Box((0, 0), (3, 2)), Box((0, 2), (3, 6))]


@given(grids(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_cutting_a_box(case: tuple[tuple[int, ...], list[Box]], shares: list[int]) -> None:
    shape, boxes = case
    for box in boxes:
        if len(shares) == 1 or sum(shares) <= max(box.sizes, default=0):
            parts = cut(box, shares)
            assert len(parts) == len(shares) and all(part.volume for part in parts)
            others = [other for other in boxes if other != box]
            assert tile(shape, [*others, *parts])


@st.composite
def held_boxes(draw: st.DrawFn) -> tuple[dict[tuple[str, Box], int], dict[tuple[str, Box], list[int]]]:
    sizes, holders = {}, {}
    for name in draw(st.sets(st.sampled_from("abcdefgh"), min_size=1)):
        shape = tuple(draw(st.lists(st.integers(1, 3000), min_size=1, max_size=2)))
        key = name, Box((0,) * len(shape), shape)
        sizes[key] = 4 * math.prod(shape)
        holders[key] = sorted(draw(st.sets(st.integers(0, 7), min_size=1)))
    return sizes, holders


@pytest.mark.slow
@given(held_boxes())
def test_what_is_shared_is_all_of_it_once_and_given_to_holders(
    case: tuple[dict[tuple[str, Box], int], dict[tuple[str, Box], list[int]]],
) -> None:
    sizes, holders = case
    shared = share_boxes(sizes, holders, 8)
    for name, box in sizes:
        mine = [(part, rank) for other, part, rank in shared if other == name]
        assert tile(box.sizes, [part for part, _ in mine])
        assert {rank for _, rank in mine} <= set(holders[name, box])
        assert len({rank for _, rank in mine}) == len(mine), "a rank has what it writes of a box in one part"


def loads(sizes: dict[tuple[str, Box], int], holders: dict[tuple[str, Box], list[int]], num_ranks: int) -> list[int]:
    load = [0] * num_ranks
    for _, box, rank in share_boxes(sizes, holders, num_ranks):
        load[rank] += 4 * box.volume
    return load


def gpt(hidden: int, layers: int, vocabulary: int, tp: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Weights of a GPT, with the dim that tp cuts."""
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "tokens": ((vocabulary, hidden), 0),
        "positions": ((1024, hidden), None),
    }
    for i in range(layers):
        shapes |= {f"{i}.qkv": ((3 * hidden, hidden), 0), f"{i}.output": ((hidden, hidden), 1)}
        shapes |= {f"{i}.up": ((4 * hidden, hidden), 0), f"{i}.down": ((hidden, 4 * hidden), 1)}
        shapes |= {f"{i}.norm.{kind}": ((hidden,), None) for kind in "abcd"}
    return shapes


@pytest.mark.parametrize(
    ("tp", "dp", "pp"), [(1, 8, 1), (2, 4, 1), (4, 1, 1), (2, 2, 2), (1, 2, 4), (8, 1, 1), (1, 1, 2), (4, 16, 1)]
)
@pytest.mark.parametrize(("hidden", "layers", "vocabulary"), [(768, 12, 50257), (768, 4, 250000)])
def test_ranks_share_the_writing_evenly(tp: int, dp: int, pp: int, hidden: int, layers: int, vocabulary: int) -> None:
    """GPT-2, and one giant embedding; the tied table is on the first and on the last stage."""
    sizes: dict[tuple[str, Box], int] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for name, (shape, dim) in gpt(hidden, layers, vocabulary, tp).items():
        stages = {0, pp - 1} if name == "tokens" else {int(name.split(".")[0]) * pp // layers if "." in name else 0}
        boxes = grid(shape, [tp if d == dim else 1 for d in range(len(shape))])
        for stage in stages:
            for rank in range(dp * tp):
                key = name, boxes[rank % tp if dim is not None else 0]
                sizes[key] = 4 * key[1].volume
                holders.setdefault(key, []).append(stage * dp * tp + rank)
    load = loads(sizes, holders, tp * dp * pp)
    for stage in range(pp):  # a stage with more weights writes more
        of_stage = load[stage * dp * tp : (stage + 1) * dp * tp]
        assert max(of_stage) < 1.1 * sum(of_stage) / len(of_stage)
    assert sum(load) == sum(sizes.values())
    if pp == 1 or pp == 2:
        assert max(load) < 1.1 * sum(load) / len(load)


@pytest.mark.parametrize("shape", [(1_000_000, 2), (2, 1_000_000), (1_000_000, 1, 3), (7, 50_000)])
def test_a_narrow_table_is_cut_along_its_length(shape: tuple[int, ...]) -> None:
    """A part for each rank that holds it and none for others, and all of it, wherever it begins."""
    box = Box(tuple(range(5, 5 + len(shape))), shape)
    sizes, holders = {("table", box): 4 * box.volume}, {("table", box): [1, 2, 4, 5]}
    shared = share_boxes(sizes, holders, 6)
    assert sorted(rank for _, _, rank in shared) == [1, 2, 4, 5] and {name for name, _, _ in shared} == {"table"}
    assert tile(shape, [relative(part, box) for _, part, _ in shared])
    assert max(loads(sizes, holders, 6)) < 1.1 * box.volume * 4 / 4


def test_what_is_short_is_written_whole() -> None:
    """By ranks in turn: a norm in pieces would take more bytes for their beginnings than for its numbers."""
    keys = [(f"norm.{number}", Box((0,), (1000,))) for number in range(40)]
    shared = share_boxes(dict.fromkeys(keys, 4000), dict.fromkeys(keys, range(4)), 4)
    assert [(name, box) for name, box, _ in shared] == keys
    assert sorted(Counter(rank for _, _, rank in shared).values()) == [10] * 4
    number = ("scale", Box((), ()))
    assert share_boxes({number: 1 << 20}, {number: [0, 1]}, 2) == [(*number, 0)], "nothing of no dims is cut"


def test_what_few_ranks_hold_is_given_first() -> None:
    """What all hold fills what the others leave."""
    shared, own = ("shared", Box((0,), (1_000_000,))), [(f"own.{i}", Box((0,), (1000,))) for i in range(300)]
    sizes = {key: 4 * key[1].volume for key in [shared, *own]}
    load = loads(sizes, {shared: [0, 1, 2, 3], **{key: [2] for key in own}}, 4)
    assert sum(load) == 5_200_000 and max(load) < 1.1 * 5_200_000 / 4


def test_planning_for_many_ranks_is_fast() -> None:
    sizes = {(f"w{i}", Box((0, 0), (4096, 4096))): 4 * 4096**2 for i in range(600)}
    shared = share_boxes(sizes, {key: list(range(128)) for key in sizes}, 128)
    assert len({rank for _, _, rank in shared}) == 128
