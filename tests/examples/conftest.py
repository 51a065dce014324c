"""A small WordPiece vocabulary, and the real rows of benchmarks that some tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from colonnade.data.tokenizer import Tokenizer
from colonnade.data.wordpiece import train_wordpiece

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    text = "the film was not as good as the book about a dog that ran over the hill yesterday " * 3
    return Tokenizer(train_wordpiece(lambda: [text], 300, min_frequency=1))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real benchmark rows."""
    if not (SHARED / "glue").is_dir():
        pytest.skip(f"{SHARED} with rows of GLUE is not on this machine")
    return SHARED
