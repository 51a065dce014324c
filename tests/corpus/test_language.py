"""The default identifier on the Universal Declaration of Human Rights in 58 languages: what it takes for what."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.language_identification import confusion, declaration, joined
from colonnade.corpus.language import identifier
from tests.data.conftest import SHARED

NEIGHBOURS = {frozenset(pair) for pair in (("id", "ms"), ("mk", "sr"), ("bg", "sr"), ("da", "no"), ("nl", "af"))}


@pytest.fixture(scope="module")
def paragraphs() -> dict[str, list[str]]:
    """By language."""
    archive = SHARED / "languages" / "udhr2.zip"
    if not archive.is_file():
        pytest.skip(f"{archive} is not on this machine")
    return declaration(archive)


def judged(texts: dict[str, list[str]]) -> tuple[float, Counter[frozenset[str]]]:
    """The share of right answers, averaged over languages, and how often two languages were confused."""
    identify = identifier("cld2")
    table = confusion(lambda text: identify(text).code, texts)
    right = sum(table[code, code] / len(each) for code, each in texts.items()) / len(texts)
    wrong: Counter[frozenset[str]] = Counter()
    for pair, count in table.items():
        if pair[0] != pair[1]:
            wrong[frozenset(pair)] += count
    return right, wrong


def test_documents_are_confused_with_none_but_their_twin(paragraphs: dict[str, list[str]]) -> None:
    right, wrong = judged({code: joined(texts) for code, texts in paragraphs.items()})
    assert len(paragraphs) == 58 and right > 0.995
    assert set(wrong) <= {frozenset(("id", "ms"))}


def test_paragraphs_are_confused_with_neighbours(paragraphs: dict[str, list[str]]) -> None:
    """Some 60 to 300 bytes each: a handful is taken for no language that is near."""
    right, wrong = judged(paragraphs)
    assert right > 0.985
    assert sum(count for pair, count in wrong.items() if pair not in NEIGHBOURS) <= 3
