"""The covering set covers: every valid pair of values occurs, and nothing else runs."""

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.check import check
from tests.parity.covering import (
    CORE,
    FACTORS,
    FREE,
    MOST_RANKS,
    Combination,
    cores,
    covering,
    handful,
    is_valid,
    job,
    subsets,
    uneven_cuts,
    valid_values,
)
from tests.parity.runs import configured

any_combination = st.fixed_dictionaries({name: st.sampled_from(list(values)) for name, values in FACTORS.items()})


def pairs_of(combination: Combination) -> set[tuple[str, Any, str, Any]]:
    """Written apart from the program's own."""
    return {(a, combination[a], b, combination[b]) for a, b in combinations(FACTORS, 2)}


@pytest.mark.slow
@given(any_combination)
def test_every_valid_pair_occurs(combination: Combination) -> None:
    """Any valid combination at all has no pair that the covering set has not."""
    if is_valid(combination):
        assert pairs_of(combination) <= set().union(*(pairs_of(chosen) for chosen in covering()))


def test_every_pair_that_cannot_be_is_known() -> None:
    """What is missing are layouts of more than eight ranks, and interleaved steps with too few micro-batches."""
    values = [[(name, value) for value in FACTORS[name]] for name in FACTORS]
    every = {frozenset(pair) for a, b in combinations(values, 2) for pair in product(a, b)}
    assert every - valid_values(2) == {frozenset({("tp", 4), ("pp", 4)}), frozenset({("tp", 4), ("dp", 4)})} | {
        frozenset({("pp", 4), ("dp", 4)})
    }


def test_only_valid_combinations_are_chosen() -> None:
    for combination in covering():
        case, way = job(combination)
        assert way.layout.num_ranks <= MOST_RANKS and check(configured(case, way)) == []


@pytest.mark.slow
@given(any_combination, any_combination)
def test_the_core_alone_decides_what_is_valid(one: Combination, other: Combination) -> None:
    mixed = {**other, **{name: one[name] for name in CORE}}
    assert is_valid(one) == is_valid(mixed)
    assert is_valid(one) == ({name: one[name] for name in CORE} in cores())


def test_a_handful_has_every_value() -> None:
    seen = {values for combination in handful() for values in subsets(combination, 1)}
    assert seen == {frozenset({(name, value)}) for name, values in FACTORS.items() for value in values}
    assert set(map(str, handful())) <= set(map(str, covering())) and len(handful()) <= 8


@pytest.mark.slow
def test_it_is_small_and_the_same_each_time() -> None:
    assert len(covering()) <= 60
    first = covering()
    covering.cache_clear()
    assert covering() == first


THREE = (*CORE, "sequence_parallel", "zero", "tied")


@pytest.mark.slow
@given(any_combination)
def test_three_at_a_time(combination: Combination) -> None:
    """Strength 3 covers every valid choice of three among the factors it is told."""
    if is_valid(combination):
        seen = {values for chosen in covering(3, THREE) for values in subsets(chosen, 3)}
        assert set(subsets({name: combination[name] for name in THREE}, 3)) <= seen


def test_factors_that_are_not_covered_still_change() -> None:
    for name in FREE:
        assert {combination[name] for combination in covering(3, THREE)} == set(FREE[name])


def test_strength_one_has_every_value_once() -> None:
    assert len(covering(1)) == max(len(values) for values in FACTORS.values())


def test_combinations_become_jobs() -> None:
    plain = {name: values[0] for name, values in FACTORS.items()}
    case, way = job({**plain, "pp": 4, "schedule": "interleaved", "recompute": "full, every 2", "partition": "cuts"})
    assert case.num_layers == 6, "eight chunks, the embedding's and the head's among them"
    assert (way.virtual_stages, way.recompute, way.recompute_every) == (2, "full", 2)
    assert way.cuts == (1,) * 8
    assert job({**plain, "pp": 2, "partition": "cuts"})[1].cuts == (3, 1) == uneven_cuts(4, 2)
    assert set(FREE) | set(CORE) == set(FACTORS)
