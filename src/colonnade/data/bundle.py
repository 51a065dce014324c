"""The text that comes with the package: what `colonnade demo` trains on."""

from __future__ import annotations

from pathlib import Path

BOOKS_SPLIT = "35:2:0"
"""Of the 37 stories, the last two by title are held out for validation: whole stories that training never sees."""


def books() -> Path:
    """37 Sherlock Holmes stories, one a document (see bundled/README.md)."""
    return Path(__file__).resolve().parent.parent / "bundled" / "books.jsonl.xz"
