"""Layout arithmetic, at the size of a large cluster."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.errors import LayoutError
from colonnade.mesh.layout import AXES, Layout, ranks_in_words

LARGE = Layout(tp=8, pp=16, dp=8)  # 1,024 ranks
sizes = st.integers(1, 12)
layouts = st.builds(Layout, tp=sizes, pp=sizes, dp=sizes)


def test_eight_ranks_as_drawn() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups("pp", "tp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert layout.groups(*AXES) == [tuple(range(8))]
    assert layout.coordinates(6) == {"pp": 1, "dp": 1, "tp": 0}
    assert str(layout) == "pp2 dp2 tp2"


@pytest.mark.parametrize("along", [("tp",), ("dp",), ("pp",), ("pp", "tp"), AXES], ids="-".join)
def test_every_one_of_1024_ranks_is_in_one_group(along: tuple[str, ...]) -> None:
    groups = LARGE.groups(*along)
    assert sorted(rank for group in groups for rank in group) == list(range(1024))
    assert {len(group) for group in groups} == {prod(LARGE.size(name) for name in along)}


def test_tensor_parallel_ranks_are_neighbours() -> None:
    assert all(group == tuple(range(group[0], group[0] + 8)) and group[0] % 8 == 0 for group in LARGE.groups("tp"))


def test_two_axes_meet_in_one_rank() -> None:
    for one, other in [("tp", "dp"), ("dp", "pp"), ("tp", "pp")]:
        lines = [set(group) for group in LARGE.groups(other)]
        assert all(len(set(group) & line) <= 1 for group in LARGE.groups(one)[:16] for line in lines)


@given(layouts)
def test_coordinates_are_the_inverse_of_rank_at(layout: Layout) -> None:
    for rank in range(layout.num_ranks):
        at = layout.coordinates(rank)
        assert layout.rank_at(**at) == rank
        assert all(0 <= at[name] < layout.size(name) for name in AXES)


@given(layouts, st.sets(st.sampled_from(AXES)))
def test_a_groups_ranks_differ_along_its_axes_alone(layout: Layout, along: set[str]) -> None:
    groups = layout.groups(*along)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.num_ranks))
    for group in groups:
        assert list(group) == sorted(group)
        assert len(group) == prod(layout.size(name) for name in along)
        for name in set(AXES) - along:
            assert len({layout.coordinates(rank)[name] for rank in group}) == 1


@given(layouts, st.sampled_from(AXES))
def test_a_rank_stands_in_its_group_at_its_coordinate(layout: Layout, name: str) -> None:
    for group in layout.groups(name):
        assert [layout.coordinates(rank)[name] for rank in group] == list(range(layout.size(name)))


@pytest.mark.parametrize("name", AXES)
def test_an_axis_of_no_ranks_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match=f"parallel.{name} = 0"):
        Layout(**{name: 0})


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} does not exist in a layout of 8 ranks"):
        Layout(tp=4, dp=2).coordinates(rank)


def test_an_axis_of_stages_is_named_by_all_of_them() -> None:
    layout = Layout(pp=4, tp=2)
    assert layout.axis_of([0, 3]) == "ends"
    assert layout.axis_of([0, 2, 3]) == "holders 0,2,3" and layout.axis_of([0, 2]) == "holders 0,2"
    assert layout.holders([0, 2, 3])[:2] == [(0, 4, 6), (1, 5, 7)]


@given(layouts)
def test_ends_are_the_first_and_the_last_stage(layout: Layout) -> None:
    ends = layout.ends()
    assert sorted(rank for group in ends for rank in group) == list(range(layout.num_ranks))
    for group in ends:
        at = [layout.coordinates(rank) for rank in group]
        if len(group) == 1:
            assert layout.pp == 1 or 0 < at[0]["pp"] < layout.pp - 1
        else:
            assert [place["pp"] for place in at] == [0, layout.pp - 1]
            assert at[0] | {"pp": 0} == at[1] | {"pp": 0}


def test_ranks_are_counted_in_words() -> None:
    for ranks, words in {
        (3,): "rank 3",
        (0, 1): "ranks 0 and 1",
        (0, 1, 2): "ranks 0-2",
        (0, 2, 4): "ranks 0, 2 and 4",
        (0, 1, 3, 4, 5, 9): "ranks 0, 1, 3-5 and 9",
    }.items():
        assert ranks_in_words(ranks) == words
