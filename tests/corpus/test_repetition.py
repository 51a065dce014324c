"""The quick repetition filter gives datatrove's verdicts."""

from __future__ import annotations

from typing import Any

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import GopherRepetitionFilter
from hypothesis import given
from hypothesis import strategies as st

from colonnade.corpus.repetition import RepetitionFilter
from colonnade.corpus.words import PlainWords

QUICK, WHOLE = RepetitionFilter(), GopherRepetitionFilter(language=PlainWords())
PHRASES = st.sampled_from(
    ["one two three four five six", "a b", "seven eight nine ten eleven", "x", "lone", "\n", "\n\n"]
)
TEXTS = st.lists(st.one_of(PHRASES, st.text("abcdefgh", min_size=1, max_size=6)), min_size=1, max_size=60).map(" ".join)


@given(TEXTS)
def test_verdicts_are_those_of_datatrove(text: str) -> None:
    assert QUICK.filter(Document(text=text, id="")) == WHOLE.filter(Document(text=text, id=""))


@pytest.mark.parametrize("share", range(0, 100, 4))
def test_near_the_limits(share: int, stories: list[str]) -> None:
    words = stories[0].split()[:400]
    text = " ".join(words + words[:share])
    assert QUICK.filter(Document(text=text, id="")) == WHOLE.filter(Document(text=text, id=""))


@pytest.mark.parametrize(("length", "stays"), [(7, False), (13, True)])
def test_the_spaces_of_a_run_are_a_part_of_it(length: int, stays: bool) -> None:
    """`a b` is a fourth of the first text, and a sixth without its space; a sixth of the second, of which it may be a
    fifth."""
    text = " ".join(f"a b {number:0{length}}" for number in range(100))
    assert (QUICK.filter(Document(text=text, id="")) is True) == stays
    assert QUICK.filter(Document(text=text, id="")) == WHOLE.filter(Document(text=text, id=""))


def test_the_filter_itself_is_asked_where_a_limit_may_be_exceeded(
    stories: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nowhere else: that takes most of the time, and finds nothing in nearly all documents."""
    asked, before = list[bool](), GopherRepetitionFilter.filter

    def told(self: Any, document: Document) -> Any:
        asked.append(bool(self.dup_n_grams))
        return before(self, document)

    monkeypatch.setattr(GopherRepetitionFilter, "filter", told)
    words = stories[0].split()[:400]
    assert QUICK.filter(Document(text=" ".join(words), id="")) is True and asked == [False]
    assert QUICK.filter(Document(text=" ".join(words * 2), id="")) is not True and asked == [False, False, True]


def test_real_text(stories: list[str]) -> None:
    pieces = [story[start : start + 4000] for story in stories[:6] for start in range(0, 40_000, 4000)]
    for piece in pieces:
        assert QUICK.filter(Document(text=piece, id="")) == WHOLE.filter(Document(text=piece, id=""))
