"""Signatures estimate similarity, bands find what theory says, and Jaccard is exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.corpus.manifest import duplicates
from colonnade.corpus.minhash import Bands, jaccard, recall
from colonnade.corpus.recipe import DeduplicateStep
from colonnade.corpus.words import Hashes


def pair(similarity: float, size: int, draw: np.random.Generator) -> tuple[Hashes, Hashes]:
    """Two sets of about `size` numbers with a Jaccard similarity."""
    common = round(size * 2 * similarity / (1 + similarity))
    values = draw.integers(0, 2**64, 2 * size - common, np.uint64)
    return np.sort(values[:size]), np.sort(values[size - common :])


@given(st.frozensets(st.integers(0, 30)), st.frozensets(st.integers(0, 30)))
def test_jaccard_is_that_of_sets(first: frozenset[int], second: frozenset[int]) -> None:
    arrays = [np.array(sorted(each), np.uint64) for each in (first, second)]
    expected = len(first & second) / len(first | second) if first | second else 1.0
    assert jaccard(arrays[0], arrays[1]) == expected == jaccard(arrays[1], arrays[0])


@pytest.mark.parametrize("similarity", [0.2, 0.5, 0.7, 0.9])
def test_values_agree_with_the_probability_of_the_similarity(similarity: float) -> None:
    draw, bands = np.random.default_rng(1), Bands(64, 4)
    agree = [
        np.mean(bands.signature(one) == bands.signature(other))
        for one, other in (pair(similarity, 300, draw) for _ in range(60))
    ]
    assert np.mean(agree) == pytest.approx(similarity, abs=0.02)


@pytest.mark.parametrize("similarity", [0.3, 0.45, 0.6, 0.7])
def test_recall_is_the_curve(similarity: float) -> None:
    """Measured on 400 pairs, within four standard deviations."""
    draw, bands, count = np.random.default_rng(2), Bands(32, 4), 400
    pairs = [pair(similarity, 200, draw) for _ in range(count)]
    found = np.mean([bool((bands.of(one) == bands.of(other)).any()) for one, other in pairs])
    exact = np.mean([recall(jaccard(one, other), 32, 4) for one, other in pairs])
    assert abs(found - exact) < 4 * np.sqrt(exact * (1 - exact) / count) + 1e-3


def test_bands_are_those_that_earlier_runs_have_in_their_index() -> None:
    """Numbers of before: with others no document would be near to any that is known."""
    shingles = np.arange(1, 6, dtype=np.uint64) * np.uint64(0x0123456789ABCDEF)
    assert [hex(each) for each in Bands(2, 3).of(shingles).tolist()] == ["0x68e390873910082c", "0xa889ad02ede5ce55"]


def test_the_defaults_find_all_but_one_in_five_thousand() -> None:
    assert recall(0.7, 32, 4) > 0.9998


def test_long_sets_are_taken_in_pieces() -> None:
    draw, bands = np.random.default_rng(3), Bands(4, 2)
    values = np.sort(draw.integers(0, 2**64, 5000, np.uint64))
    parts = [bands.signature(values[start : start + 700]) for start in range(0, 5000, 700)]
    assert (bands.signature(values) == np.min(parts, axis=0)).all()


def test_a_manifest_tells_which_share_of_duplicates_its_bands_find(tmp_path: Path) -> None:
    (tmp_path / "state" / "pairs").mkdir(parents=True)
    (tmp_path / "state" / "groups.json").write_text('{"groups": 3}')
    for number, compared in enumerate((5, 7)):
        (tmp_path / "state" / "pairs" / f"{number}.json").write_text(f'{{"compared": {compared}}}')
    told = duplicates(DeduplicateStep(bands=8, rows=2), tmp_path)
    assert (told["groups"], told["compared"]) == (3, 12)
    assert told["recall"]["0.50"] == pytest.approx(1 - (1 - 0.5**2) ** 8, abs=1e-6) and told["recall"]["1.00"] == 1.0
    assert len(told["recall"]) == 20
