"""datatrove's Gopher repetition filter, with most of its work left out.

The filter counts repeated runs of 2 to 10 words, one after the other, in dictionaries of text. Nearly all documents
are far from its limits, and that can be told from the hashes of the runs, all at once: an upper bound of what the
filter would count. Only where the bound is above a limit is the filter asked itself. The verdicts are its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.filters import GopherRepetitionFilter
from numpy.typing import NDArray

from colonnade.corpus.words import Hashes, PlainWords, WordHashes, ngram_hashes_by_length


class RepetitionFilter:
    """Rae et al. 2021, table A1."""

    def __init__(self) -> None:
        self._words, self._hashes = PlainWords(), WordHashes()
        self._whole: Any = GopherRepetitionFilter(language=self._words)
        self._of_lines: Any = GopherRepetitionFilter(language=self._words, top_n_grams=(), dup_n_grams=())

    def filter(self, document: Document) -> Any:
        """True, or False and the reason."""
        text = document.text
        verdict = self._of_lines.filter(document)
        if verdict is not True or not self._may_exceed(self._words.word_tokenize(text), len(text)):
            return verdict
        return self._whole.filter(document)

    def _may_exceed(self, words: list[str], size: int) -> bool:
        """Whether any limit on repeated runs of words may be exceeded in a text of `size` characters."""
        top, repeated = dict(self._whole.top_n_grams), dict(self._whole.dup_n_grams)
        ends = np.cumsum([0, *map(len, words)])
        for n, runs in ngram_hashes_by_length(self._hashes.of(words), {*top, *repeated}).items():
            if len(runs):
                lengths = ends[n:] - ends[:-n]
                spaces = n - 1 if n in top else 0
                bound = _most_of_one(runs, lengths + spaces) if n in top else _repeated(runs, lengths)
                if bound > (top | repeated)[n] * size:
                    return True
        return False


def _most_of_one(runs: Hashes, lengths: NDArray[Any]) -> float:
    """No run takes more characters, all its occurrences together."""
    _, kinds, counts = np.unique(runs, return_inverse=True, return_counts=True)
    return float((lengths * counts[kinds]).max())


def _repeated(runs: Hashes, lengths: NDArray[Any]) -> float:
    """Characters of all runs that have stood before: overlapping ones count twice, so it is never too little."""
    _, first = np.unique(runs, return_index=True)
    return float(lengths.sum() - lengths[first].sum())
