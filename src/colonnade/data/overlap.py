"""How much of an evaluation set occurs in a corpus: the share of its n-grams (the Megatron-LM paper, section 4.2, gives
10.8 % of WikiText-103's 8-grams and 1.4 % of LAMBADA's).

Every place of the evaluation set where n words stand in a row counts; passages shorter than n words have none. The
corpus is read once, on all cores; memory grows with the evaluation set only. Tokens are turned back into text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colonnade.config.numbers import counted
from colonnade.corpus.formats import InputSplit, content_of, rows
from colonnade.corpus.plan import splits_of
from colonnade.corpus.recipe import ReadStep
from colonnade.corpus.rows import Reject, broken_off, of_any_length, text_of, unreadable
from colonnade.corpus.streams import Damaged
from colonnade.corpus.testsets import contained, passages
from colonnade.corpus.words import Hashes, WordHashes, ngram_hashes, spans_of, union
from colonnade.data.indexed import TokenFile, idx_path
from colonnade.data.parallel import ordered_map
from colonnade.data.sidecar import read_sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError, printable
from colonnade.storage import as_given, not_here

_SPLIT_BYTES = 32 << 20
_SPLIT_TOKENS = 8 << 20


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
        lines = f"{counted(self.rejected, 'line')} of the corpus"
        return printable(
            f"{self.share:.2%} of the {self.ngrams:,} {self.ngram}-grams of {self.test} occur in the corpus "
            f"({self.shared:,}; in {self.passages_touched:,} of {self.passages:,} passages, from "
            f"{self.documents_touched:,} of {self.documents:,} documents)"
            + (f"; {lines} {'is no document' if self.rejected == 1 else 'are no documents'}" if self.rejected else "")
        )


class Found(NamedTuple):
    """What a worker makes of one split of the corpus."""

    hits: NDArray[np.int64]
    """Numbers of the evaluation set's distinct n-grams that occur."""
    documents: int
    documents_touched: int
    rejected: int
    first_rejected: str
    """Of the lines that are no documents, the file and the reason of the first; "" where there is none."""


class TokenSplit(NamedTuple):
    """Some documents of a token file."""

    name: str
    """Its prefix."""
    tokenizer: str
    first: int
    stop: int


def overlap(
    corpus: Sequence[Path],
    test: Path,
    *,
    ngram: int = 8,
    key: str = "text",
    tokenizer: Path | None = None,
    workers: int = 1,
) -> Overlap:
    """Compares files or folders of text, or token files (their prefixes, and the `tokenizer` that made them), with an
    evaluation set. Raises DataError where either cannot be read, and where one of `corpus` has no document.
    """
    hashes = WordHashes()
    places = [ngram_hashes(hashes.of(words), ngram) for words in passages(test, key)]
    places = [each for each in places if len(each)]
    if not places:
        raise DataError(f"{test} has no passage of {ngram} words or more. Set a smaller --ngram.")
    wanted = union(places)
    read = of_any_length(key)
    splits = [(path, split) for path in corpus for split in _splits(path, tokenizer)]
    seen, touched, first_rejected = np.zeros(len(wanted), np.bool_), 0, dict[Path, str]()
    documents, rejected = Counter[Path](), Counter[Path]()
    tasks = [split for _, split in splits]
    searched = ordered_map(partial(_searcher, wanted, ngram, read), tasks, workers=workers)
    for (path, _), found in zip(splits, searched, strict=True):
        seen[found.hits] = True
        touched += found.documents_touched
        documents[path] += found.documents
        rejected[path] += found.rejected
        first_rejected[path] = first_rejected.get(path) or found.first_rejected
    for path in corpus:
        _check_any(path, documents[path], rejected[path], first_rejected[path])
    shared = [seen[np.searchsorted(wanted, each)] for each in places]
    return Overlap(
        test=str(test),
        ngram=ngram,
        passages=len(places),
        passages_touched=sum(bool(each.any()) for each in shared),
        ngrams=sum(map(len, places)),
        shared=sum(int(each.sum()) for each in shared),
        documents=documents.total(),
        documents_touched=touched,
        rejected=rejected.total(),
    )


def holds_tokens(path: Path) -> bool:
    """Whether a corpus is the prefix of a token file."""
    return idx_path(path).exists() and not path.exists()


def _check_any(path: Path, documents: int, rejected: int, first: str) -> None:
    """A share of nothing would read as 0 %."""
    if documents:
        return
    raise DataError(
        f"{path} holds no document with text to compare: {counted(rejected, 'line')} rejected."
        + (f" The first: {first}." if first else "")
        + " Check the files; `colonnade data overlap --key` names the key of the text in a .jsonl."
    )


def _splits(path: Path, tokenizer: Path | None) -> Sequence[InputSplit | TokenSplit]:
    """Tasks of the workers."""
    if not holds_tokens(path):
        if not path.is_file() and not path.is_dir():
            what = "is neither a file nor a folder." if path.exists() else f"does not exist.{not_here(path)}"
            raise DataError(
                f"{as_given(path)} {what} Name text files, a folder of them, or the prefix of a token file."
            )
        return splits_of(str(path), _SPLIT_BYTES)
    file = TokenFile(path)
    file.check_index()
    if tokenizer is None:
        raise DataError(f"{path} holds tokens: name the tokenizer that made them with --tokenizer.")
    sidecar = read_sidecar(file)
    if sidecar is not None and not Tokenizer.load(tokenizer).is_of(sidecar.tokenizer_sha256):
        raise DataError(
            f"{path} was made with another tokenizer than {tokenizer}: its ids would be turned into other text. "
            f"Name the one with sha256 {sidecar.tokenizer_sha256[:12]}…."
        )
    step = max(1, _SPLIT_TOKENS * file.num_documents // max(file.num_tokens, 1))
    starts = range(0, file.num_documents, step)
    return [TokenSplit(str(path), str(tokenizer), at, min(at + step, file.num_documents)) for at in starts]


def _searcher(wanted: Hashes, ngram: int, read: ReadStep) -> Callable[[InputSplit | TokenSplit], Found]:
    return partial(_search, wanted, ngram, read, WordHashes())


def _search(wanted: Hashes, ngram: int, read: ReadStep, hashes: WordHashes, split: InputSplit | TokenSplit) -> Found:
    hits, documents, rejected, first_rejected = [np.empty(0, np.int64)], 0, 0, ""
    for text in _decoded(split) if isinstance(split, TokenSplit) else _texts(split, read):
        if isinstance(text, Reject):
            first_rejected = first_rejected or f"{split.name}: {text}"
            rejected += 1
            continue
        documents += 1
        ngrams = ngram_hashes(hashes.of(spans_of(text)[0]), ngram)
        common = ngrams[contained(ngrams, wanted)]
        if len(common):
            hits.append(np.searchsorted(wanted, common))
    return Found(np.unique(np.concatenate(hits)), documents, len(hits) - 1, rejected, first_rejected)


def _texts(split: InputSplit, read: ReadStep) -> Iterator[str | Reject]:
    """The documents of a split, and why lines are none; so too for a file that cannot be opened."""
    try:
        with open(split.path, "rb") as raw, content_of(split, raw, read) as file:
            for row in rows(split, file, read):
                yield row if isinstance(row, Reject) else text_of(row, read)
    except Damaged as error:
        yield broken_off(error, 1)
    except OSError as error:
        yield unreadable(error)


def _decoded(split: TokenSplit) -> Iterator[str]:
    """The documents of a token file as text; control tokens are none."""
    file, tokenizer = TokenFile(split.name), Tokenizer.load(split.tokenizer)
    for document in range(split.first, split.stop):
        yield tokenizer.decode(file.document(document).tolist())
