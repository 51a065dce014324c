"""Pairs of answers as samples: what is refused when their file is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from colonnade.data.indexed import TokenFile
from colonnade.data.preference_dataset import PreferenceDataset
from colonnade.data.sidecar import PREFERENCES, ExampleFields, Sidecar
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError

FIELDS = ExampleFields("preferences", PREFERENCES, ("prompt", "chosen", "prompt", "rejected"))
SOUND, CUT, LONG = (2, 3, 4, 1), (2, 3, 4), (2, 3, 5, 1)
"""Tokens of each sequence of a document; behind a prompt of four a sample has room for one, behind five for none."""


def opened(folder: Path, *documents: Sequence[int], first: int = 0) -> PreferenceDataset:
    with TokenFileWriter(folder / "pairs", np.dtype("<u2")) as writer:
        for lengths in documents:
            writer.add_document([7] * sum(lengths), lengths=lengths)
        tokens = sum(map(sum, documents))
        writer.close(Sidecar("0" * 64, 100, None, len(documents), tokens, 0, (), examples=FIELDS))
    file, options = TokenFile(folder / "pairs"), (0.1, 0.0, 0.0)
    return PreferenceDataset(file, range(first, len(documents)), 4, vocab_size=100, options=options)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_document_that_is_no_pair_is_refused_wherever_it_stands(tmp_path: Path, at: int) -> None:
    assert len(opened(tmp_path, SOUND, SOUND, SOUND)) == 3
    for wrong, said in ((CUT, rf"document {at} has another number"), (LONG, rf"1 prompt of 3 .* in document {at}\.")):
        with pytest.raises(DataError, match=said):
            opened(tmp_path, *(wrong if number == at else SOUND for number in range(3)))
    for wrong, said in ((CUT, "document 4 has another number"), (LONG, r"1 prompt of 3 .* in document 4\.")):
        with pytest.raises(DataError, match=said):
            opened(tmp_path, *(wrong if number == 4 else SOUND for number in range(5)), first=2)


@pytest.mark.parametrize(
    ("examples", "holds"),
    [
        (None, "text"),
        (ExampleFields("squad", "spans", ("question", "passage")), "examples of squad"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, examples: ExampleFields | None, holds: str) -> None:
    with TokenFileWriter(tmp_path / "others", np.dtype("<u2")) as writer:
        writer.add_document([7] * 10, lengths=SOUND)
        writer.close(Sidecar("0" * 64, 100, None, 1, 10, 0, (), examples=examples))
    with pytest.raises(DataError, match=rf"others holds {holds}, .* Make it with `colonnade data examples preferences"):
        PreferenceDataset(TokenFile(tmp_path / "others"), range(1), 8, vocab_size=100, options=(0.1, 0.0, 0.0))


def test_a_file_that_says_nothing_of_itself_is_refused(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "bare", np.dtype("<u2")) as writer:
        writer.add_document([7] * 10, lengths=SOUND)
    with pytest.raises(DataError, match="bare holds text, "):
        PreferenceDataset(TokenFile(tmp_path / "bare"), range(1), 8, vocab_size=100, options=(0.1, 0.0, 0.0))
