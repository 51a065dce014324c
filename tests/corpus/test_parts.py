"""Which part a document is in, in every run, and what is written of it."""

from __future__ import annotations

import pytest
from datatrove.data import Document

from colonnade.corpus.write import part_of, row_of


@pytest.mark.parametrize(("seed", "expected"), [(1234, "acabcbaaaaabbaaababccaaa"), (7, "baaaababaaacbbaaaacbcccc")])
def test_the_part_of_a_document_is_that_of_earlier_runs(seed: int, expected: str) -> None:
    """Parts of before: with others a document of a test set would be trained on."""
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    assert "".join(part_of(f"d{number}", shares, seed=seed) for number in range(24)) == expected


def test_what_is_known_of_a_document_is_written_and_a_count_of_no_tokens_too() -> None:
    about = {"source": "in", "url": None, "title": "T", "language": None, "tokens": 0, "bytes": 1, "extra": {"k": [1]}}
    document = Document(text="x", id="d", metadata=about)
    known = {"text": "x", "id": "d", "source": "in", "title": "T", "tokens": 0}
    assert row_of(document, metadata=False) == known
    assert row_of(document, metadata=True) == {**known, "metadata": {"k": [1]}}
    document.metadata |= {"tokens": None, "extra": {}}
    assert row_of(document, metadata=True) == {"text": "x", "id": "d", "source": "in", "title": "T"}
