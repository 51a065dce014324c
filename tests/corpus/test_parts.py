"""Which part a document is in, in every run."""

from __future__ import annotations

import pytest

from colonnade.corpus.write import part_of


@pytest.mark.parametrize(("seed", "expected"), [(1234, "acabcbaaaaabbaaababccaaa"), (7, "baaaababaaacbbaaaacbcccc")])
def test_the_part_of_a_document_is_that_of_earlier_runs(seed: int, expected: str) -> None:
    """Parts of before: with others a document of a test set would be trained on."""
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    assert "".join(part_of(f"d{number}", shares, seed=seed) for number in range(24)) == expected
