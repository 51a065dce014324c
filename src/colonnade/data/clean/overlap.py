"""How much of an evaluation set occurs in a corpus: the share of its n-grams (the Megatron-LM paper, section 4.2, gives
10.8 % of WikiText-103's 8-grams and 1.4 % of LAMBADA's).

Every place of the evaluation set where n words stand in a row counts; passages shorter than n words have none. The
corpus is read once, on all cores; memory grows with the evaluation set only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colonnade.data.clean.formats import Piece, Reject, rows
from colonnade.data.clean.plan import pieces_of
from colonnade.data.clean.recipe import ReadStep
from colonnade.data.clean.streams import HashedFile
from colonnade.data.clean.testsets import contained, passages
from colonnade.data.clean.words import Hashes, WordHashes, ngram_hashes, spans_of, union
from colonnade.data.parallel import ordered_map
from colonnade.errors import DataError

_PIECE = 32 << 20


@dataclass(frozen=True)
class Overlap:
    """The n-grams of an evaluation set, and how many of them a corpus has."""

    test: str
    ngram: int
    passages: int
    passages_touched: int
    """Passages with at least one n-gram of the corpus."""
    ngrams: int
    """Places in the evaluation set."""
    shared: int
    documents: int
    """Of the corpus."""
    documents_touched: int
    """Documents of the corpus with at least one n-gram of the evaluation set."""
    rejected: int
    """Lines of the corpus that are no documents."""

    @property
    def share(self) -> float:
        """Of the evaluation set's n-grams, those that the corpus has."""
        return self.shared / self.ngrams

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}

    def summary(self) -> str:
        """A line for people."""
        return (
            f"{self.share:.2%} of the {self.ngrams:,} {self.ngram}-grams of {self.test} occur in the corpus "
            f"({self.shared:,}; in {self.passages_touched:,} of {self.passages:,} passages, from "
            f"{self.documents_touched:,} of {self.documents:,} documents)"
            + (f"; {self.rejected:,} lines of the corpus are no documents" if self.rejected else "")
        )


class Found(NamedTuple):
    """What a worker makes of one piece of the corpus."""

    hits: NDArray[np.int64]
    """Numbers of the evaluation set's distinct n-grams that occur."""
    documents: int
    documents_touched: int
    rejected: int


def overlap(corpus: Sequence[Path], test: Path, *, ngram: int = 8, key: str = "text", workers: int = 1) -> Overlap:
    """Compares files or folders of text with an evaluation set. Raises DataError where either cannot be read."""
    hashes = WordHashes()
    places = [ngram_hashes(hashes.of(words), ngram) for words in passages(test, key)]
    places = [each for each in places if len(each)]
    if not places:
        raise DataError(f"{test} has no passage of {ngram} words or more. Set a smaller --ngram.")
    wanted = union(places)
    read = ReadStep(paths=[str(path) for path in corpus], key=key)
    pieces = [piece for path in read.paths for piece in pieces_of(path, _PIECE)]
    seen, documents, touched, rejected = np.zeros(len(wanted), np.bool_), 0, 0, 0
    for found in ordered_map(partial(_searcher, wanted, ngram, read), pieces, workers=workers):
        seen[found.hits] = True
        documents, touched = documents + found.documents, touched + found.documents_touched
        rejected += found.rejected
    shared = [seen[np.searchsorted(wanted, each)] for each in places]
    return Overlap(
        test=str(test),
        ngram=ngram,
        passages=len(places),
        passages_touched=sum(bool(each.any()) for each in shared),
        ngrams=sum(map(len, places)),
        shared=sum(int(each.sum()) for each in shared),
        documents=documents,
        documents_touched=touched,
        rejected=rejected,
    )


def _searcher(wanted: Hashes, ngram: int, read: ReadStep) -> Callable[[Piece], Found]:
    return partial(_search, wanted, ngram, read, WordHashes())


def _search(wanted: Hashes, ngram: int, read: ReadStep, hashes: WordHashes, piece: Piece) -> Found:
    hits, documents, rejected = [np.empty(0, np.int64)], 0, 0
    with open(piece.path, "rb") as raw:
        for text in _texts(piece, HashedFile(raw, piece.start, piece.stop), read):
            if text is None:
                rejected += 1
                continue
            documents += 1
            ngrams = ngram_hashes(hashes.of(spans_of(text)[0]), ngram)
            common = ngrams[contained(ngrams, wanted)]
            if len(common):
                hits.append(np.searchsorted(wanted, common))
    return Found(np.unique(np.concatenate(hits)), documents, len(hits) - 1, rejected)


def _texts(piece: Piece, file: HashedFile, read: ReadStep) -> Iterator[str | None]:
    """The documents of a piece; None for each line that is none."""
    for row in rows(piece, file, read):
        text = None if isinstance(row, Reject) else row.values.get(read.key)
        yield text if isinstance(text, str) else None
