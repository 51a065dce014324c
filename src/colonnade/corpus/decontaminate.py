"""Documents that share n-grams with evaluation sets: dropped, or the shared passages cut out.

Brown et al. 2020 (GPT-3, appendix C) cut 13-grams out with 200 characters on either side; the Megatron-LM paper
removed WikiText-103's articles by title and counted common 8-grams (see `overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import numpy as np
from datatrove.data import Document

from colonnade.corpus.recipe import DecontaminateStep
from colonnade.corpus.step import Drop, MakeCounter, Setting, Step, utf8_length
from colonnade.corpus.tally import Account
from colonnade.corpus.testsets import NGrams, contained, normal_title, read_tests, titles
from colonnade.corpus.words import WordHashes, ngram_hashes_by_length, spans_of, spans_within


class Shared(NamedTuple):
    """A run of words that a document shares with evaluation sets."""

    tests: tuple[str, ...]
    """By name, in the order in which they come in the document."""
    first: int
    """Number of its first word."""
    stop: int


class Decontaminate(Step):
    """Drops or cuts contaminated documents."""

    def __init__(self, how: DecontaminateStep, key: str, counter: MakeCounter | None, setting: Setting) -> None:
        self.how, self.key, self.counter = how, key, counter
        self._tests: list[NGrams] = []
        self._titles: frozenset[str] = frozenset()
        self._hashes = WordHashes()
        self._count: Callable[[str], int] | None = None
        super().__init__("decontaminate", setting)

    def prepare(self, rank: int) -> None:
        """Reads the evaluation sets."""
        self._tests = read_tests(self.how.tests, ngram=self.how.ngram, key=self.key)
        self._titles = frozenset(title for path in self.how.titles for title in titles(Path(path)))
        self._count = self.counter() if self.counter and self.how.action == "cut" else None

    def finish(self, account: Account) -> None:
        """Lets go of the sets, which are large."""
        self._tests, self._count, self._hashes = [], None, WordHashes()

    def examine(self, document: Document, account: Account) -> Drop | Iterable[Document] | None:
        """The document, its pieces, or why nothing of it goes on."""
        title = document.metadata["title"]
        if title and normal_title(title) in self._titles:
            return Drop("title of a test article", title)
        words, spans = spans_of(document.text)
        shared = shared_runs(words, self._tests, self._hashes)
        if not shared:
            return None
        for test in {test for run in shared for test in run.tests}:
            account.tally.count("contaminated documents", test)
        named = shared[0].tests[0]
        cuts = spans_within(document.text, [(spans[run.first][0], spans[run.stop - 1][1]) for run in shared])
        detail = f'"{document.text[slice(*cuts[0])]}"'
        if self.how.action == "remove":
            return Drop(f"shares {self.how.ngram}-grams with {named}", detail)
        pieces = self._pieces(document.text, cuts)
        if not pieces:
            return Drop(f"nothing left beside {self.how.ngram}-grams of {named}", detail)
        if len(pieces) > self.how.max_pieces:
            return Drop(f"in too many pieces beside {self.how.ngram}-grams of {named}", detail)
        account.tally.changed[f"cut around {named}"] += 1
        return self._as_documents(document, pieces)

    def _pieces(self, text: str, cuts: Sequence[tuple[int, int]]) -> list[str]:
        kept = [text[start:stop].strip() for start, stop in outside(cuts, len(text), self.how.cut_characters)]
        return [piece for piece in kept if piece and len(piece) >= self.how.min_piece_characters]

    def _as_documents(self, document: Document, pieces: Sequence[str]) -> Iterator[Document]:
        origin = document.metadata.get("origin", document.id)
        for number, piece in enumerate(pieces, 1):
            about = deepcopy(document.metadata) | {"origin": origin, "bytes": utf8_length(piece)}
            if self._count is not None:
                about["tokens"] = self._count(piece)
            yield Document(text=piece, id=f"{document.id}#{number}", metadata=about)


def shared_runs(words: Sequence[str], tests: Sequence[NGrams], hashes: WordHashes) -> list[Shared]:
    """Every n-gram of the words that is in a set, by place; those that overlap are joined."""
    numbers = hashes.of(words)
    found = []
    ngrams = ngram_hashes_by_length(numbers, {length for test in tests for length in test.by_length})
    for test in tests:
        for length, wanted in test.by_length.items():
            starts = np.flatnonzero(contained(ngrams[length], wanted))
            found += [Shared((test.name,), int(start), int(start) + length) for start in starts]
    joined: list[Shared] = []
    for run in sorted(found, key=lambda run: (run.first, run.stop)):
        if joined and run.first <= joined[-1].stop:
            last = joined[-1]
            names = last.tests if run.tests[0] in last.tests else (*last.tests, *run.tests)
            joined[-1] = Shared(names, last.first, max(last.stop, run.stop))
        else:
            joined.append(run)
    return joined


def outside(cuts: Sequence[tuple[int, int]], length: int, margin: int) -> Iterator[tuple[int, int]]:
    """What is left of [0, length) without the cuts, each wider by `margin` on both sides."""
    place = 0
    for start, stop in sorted(cuts):
        if start - margin > place:
            yield place, start - margin
        place = max(place, stop + margin)
    if place < length:
        yield place, length
