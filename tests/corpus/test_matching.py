"""Which documents of one bucket are compared, where they are many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colonnade.corpus import matching


class Shingles:
    """Stands for a SignatureIndex, of whose documents the first is of an earlier run, unless it is told otherwise."""

    def __init__(self, sets: list[set[int]], earlier: int = 1) -> None:
        self._earlier = earlier
        self._sets = [np.array(sorted(each), np.uint64) for each in sets]

    def shingles(self, document: int) -> Any:
        return self._sets[document]

    def num_shingles(self, document: int) -> int:
        return len(self._sets[document])

    def is_earlier(self, document: int) -> bool:
        return document < self._earlier


@pytest.mark.parametrize("others", [1, matching.ALL_PAIRS])
@pytest.mark.parametrize(("earlier", "own"), [(100, 95), (95, 100), (100, 100)])
def test_a_copy_of_what_an_earlier_run_kept_is_found_whichever_is_longer(earlier: int, own: int, others: int) -> None:
    unlike = [{1_000 * number, 1_000 * number + 1} for number in range(1, others + 1)]
    sets = [set(range(earlier)), *unlike, set(range(own))]
    matcher = matching.Matcher(Shingles(sets), 0.9)  # type: ignore[arg-type]
    matcher.add(list(range(len(sets))))
    assert matcher.pairs == [(0, len(sets) - 1, min(earlier, own) / max(earlier, own))]


@pytest.mark.parametrize("all_pairs", [matching.ALL_PAIRS, 2])
def test_no_two_documents_are_compared_that_others_have_connected(
    all_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor two again that are known to be unlike: many agree in most bands."""
    monkeypatch.setattr(matching, "ALL_PAIRS", all_pairs)
    alike = [{*range(40), 100 + number} for number in range(6)]
    matcher = matching.Matcher(Shingles([*alike, {*range(30, 40), 1_000}], earlier=0), 0.9)  # type: ignore[arg-type]
    for bucket in (range(6), range(5, -1, -1), (5, 6), (5, 6)):
        matcher.add(list(bucket))
    assert [(first, second) for first, second, _ in matcher.pairs] == [(0, number) for number in range(1, 6)]
    assert matcher.num_compared == 5 + 1


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "ALL_PAIRS", 2)
    monkeypatch.setattr(matching, "_BLOCK", 400)


def test_of_equal_documents_of_a_large_bucket_all_are_found(small_blocks: None) -> None:
    """Whatever lies between them; each is compared with the first alone."""
    unlike = [{*range(number * 100, number * 100 + 20)} for number in range(1, 40)]
    sets = [*unlike, {*range(20)}, *unlike, {*range(20)}, *unlike]
    matcher = matching.Matcher(Shingles(sets, earlier=0), 0.9)  # type: ignore[arg-type]
    matcher.add(list(range(len(sets))))
    assert sorted(matcher.pairs, key=lambda pair: pair[1]) == [
        (sets.index(each), place, 1.0) for place, each in enumerate(sets) if sets.index(each) != place
    ]
    assert matcher.num_compared == len(matcher.pairs)


@pytest.mark.parametrize("apart", [1, 4, 9])
def test_what_is_alike_is_found_over_the_borders_of_blocks(apart: int, small_blocks: None) -> None:
    """Of documents of one size: of half a block, ten of them, and less."""
    for place in range(60 - apart):
        sets = [{*range(number * 100, number * 100 + 20)} for number in range(60)]
        sets[place + apart] = sets[place] - {place * 100} | {1}
        matcher = matching.Matcher(Shingles(sets, earlier=0), 0.9)  # type: ignore[arg-type]
        matcher.add(list(range(60)))
        assert [pair[:2] for pair in matcher.pairs] == [(place, place + apart)]


def test_a_large_bucket_is_taken_in_blocks_by_size(small_blocks: None) -> None:
    """Those that are alike come into one block, wherever they stand in it."""
    sizes = [20 + number * 37 % 60 for number in range(59)]
    sets = [{*range(number * 100, number * 100 + size)} for number, size in enumerate(sizes)]
    matcher = matching.Matcher(Shingles([*sets, sets[0] - {0} | {6000}], earlier=0), 0.9)  # type: ignore[arg-type]
    matcher.add(list(range(60)))
    assert [pair[:2] for pair in matcher.pairs] == [(0, 59)]


def test_pages_are_not_likely_to_be_alike_by_what_all_of_a_template_share() -> None:
    """Of 30 shingles 20 are all pages': only the two that share others too are worth a comparison."""
    template = range(100, 120)
    own = [range(1_000 * n, 1_000 * n + 10) for n in range(1, 41)]
    own[30] = range(own[12].start, own[12].start + 9)
    pages = [np.array(sorted({*template, *each}), np.uint64) for each in own]
    assert matching.likely_pairs(pages, 0.7) == [(12, 30)]
