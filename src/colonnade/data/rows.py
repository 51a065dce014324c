"""Samples as rows of tokens and labels, and the two ways to cut them from a token file.

    stream     … A A A B│B B B B B│C C D D D│ …          cut wherever a sample is full
    best fit     A A A D D│B B B B B│B C C …               whole documents side by side (`packing`)

A row knows the documents that it holds, so that attention and positions can be kept within each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from colonnade.config.defaults import REVISION
from colonnade.data.indexed import TokenFile, Tokens
from colonnade.data.packing import DocumentSpan, in_any_order, pack
from colonnade.errors import DataError

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

TooLong = Literal["cut", "truncate", "drop"]
WINDOW = 128
"""Samples that are packed together."""
_KEPT_WINDOWS = 16


@dataclass(frozen=True)
class Cut:
    """How documents become samples."""

    separate: bool = False
    """Documents do not see each other, and no loss is counted for the first token of the next one."""
    best_fit: bool = False
    """Documents are packed whole where they fit; they are separate then."""
    no_loss_on: tuple[int, ...] = ()
    """Labels that do not count."""
    whole: bool = False
    """Documents stand in rows as wholes, beside padding (`whole_rows`); they are separate then."""
    too_long: TooLong = "cut"
    """Of whole documents, what becomes of those that are longer than a row."""
    answers: bool = False
    """Answers alone count: tokens of every second sequence of a document."""
    revision: int = REVISION
    """data.revision."""

    def __post_init__(self) -> None:
        assert self.separate or not (self.best_fit or self.whole), (
            "the config check lets only separate documents be packed"
        )


@dataclass(frozen=True)
class Samples:
    """Samples [b] of some kind: every field is an array [b, …], or None in all of them."""

    @classmethod
    def stack(cls, several: Sequence[Self]) -> Self:
        """Samples [b_1], [b_2], … as one [b_1 + b_2 + …]."""
        if len(several) == 1:
            return several[0]
        return cls(*(_stacked([getattr(each, field.name) for each in several]) for field in fields(cls)))

    def take(self, order: Integers) -> Self:
        """The samples of these numbers."""
        columns = (getattr(self, field.name) for field in fields(self))
        return type(self)(*(None if column is None else column[order] for column in columns))


def _stacked(columns: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    there = [column for column in columns if column is not None]
    assert len(there) in (0, len(columns)), "all samples have a field, or none"
    return np.concatenate(there) if there else None


@dataclass(frozen=True)
class Rows(Samples):
    """Samples [b] of s tokens each."""

    tokens: Integers
    """[b, s]."""
    labels: Integers
    """[b, s]: the token after each."""
    counted: Flags
    """[b, s]: whether the label counts in the loss."""
    documents: Integers | None
    """[b, s]: the number of each token's document within its row, rising from 0; None: one document a row."""

    def narrow(self, begins: Integers, length: int) -> Self:
        """From row i, the tokens `begins[i] … begins[i] + length`."""
        columns = begins[:, None] + np.arange(length)
        tokens, labels = (np.take_along_axis(part, columns, axis=1) for part in (self.tokens, self.labels))
        counted = np.take_along_axis(self.counted, columns, axis=1)
        documents = None if self.documents is None else np.take_along_axis(self.documents, columns, axis=1)
        return type(self)(tokens, labels, counted, documents)


def positions_within(documents: Integers) -> Integers:
    """Each token's place in its document [b, s], or in the part of it that the row holds."""
    places = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.diff(documents, axis=1, prepend=-1) != 0
    result: Integers = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return result


@dataclass(frozen=True)
class Text:
    """Tokens `start … start + num_tokens` of a file, to be cut into rows of `seq_length`."""

    file: TokenFile
    start: int
    num_tokens: int
    seq_length: int
    vocab_size: int
    """Ids from it on are refused when they are read."""

    @property
    def num_rows(self) -> int:
        """Full rows; each token but the first is a label once."""
        return (self.num_tokens - 1) // self.seq_length

    def read(self, begin: int, count: int) -> Integers:
        """Tokens [count] from `begin` on, counted from the text's start."""
        tokens = self.file.read(self.start + begin, count)
        if int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0:
            raise DataError(unknown_token(self.file, tokens, self.start + begin, self.vocab_size))
        return tokens.astype(np.int64)

    def sentences(self, begin: int, stop: int) -> Integers:
        """Where sequences of the file begin in `begin … stop`, counted from the text's start."""
        return self.file.sequence_starts(self.start + begin, self.start + stop) - self.start

    def documents(self, begin: int, stop: int) -> Integers:
        """Where documents begin in `begin … stop`, counted from the text's start."""
        return self.file.document_starts(self.start + begin, self.start + stop) - self.start

    def answered(self, begin: int, stop: int) -> Flags:
        """Whether each of the tokens `begin … stop`, counted from the text's start, is a part of an answer."""
        return self.file.answered(self.start + begin, self.start + stop)


class Readable(Protocol):
    """A text that can be cut into rows, whatever holds its tokens."""

    @property
    def seq_length(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def read(self, begin: int, count: int) -> Integers: ...

    def documents(self, begin: int, stop: int) -> Integers: ...

    def answered(self, begin: int, stop: int) -> Flags: ...


class RowReader(Protocol):
    """Reads rows by their number in the order of the text."""

    def row(self, index: int) -> Rows:
        """One row: [1, s]."""
        ...


class StreamRows:
    """Rows one after the other, cut wherever one is full."""

    def __init__(self, text: Readable, cut: Cut) -> None:
        self._text, self._cut = text, cut

    def row(self, index: int) -> Rows:
        """One row: [1, s]."""
        s = self._text.seq_length
        return stream_row(self._text, index * s, s, self._cut)


def stream_row(text: Readable, begin: int, length: int, cut: Cut) -> Rows:
    """The row [1, length] of tokens from `begin` on, wherever it cuts documents."""
    both = text.read(begin, length + 1)
    counted, documents = counted_labels(text, begin + 1, both[1:], cut), None
    if cut.separate:
        begins = np.zeros(length + 1, dtype=bool)
        begins[text.documents(begin + 1, begin + length + 1) - begin] = True
        counted &= ~begins[1:]
        documents = np.cumsum(begins[:-1])[None]
    return Rows(both[None, :-1], both[None, 1:], counted[None], documents)


class PackedRows:
    """As many rows of the same tokens, with documents side by side that fit."""

    def __init__(self, text: Readable, cut: Cut) -> None:
        self._text, self._cut = text, cut
        self._windows: OrderedDict[int, list[list[DocumentSpan]]] = OrderedDict()

    def row(self, index: int) -> Rows:
        """One row [1, s]. The label of a span's last token is the next of its document, wherever that is."""
        number, within = divmod(index, WINDOW)
        first = number * WINDOW * self._text.seq_length
        parts = [self._part(first + span.begin, span.length) for span in self._window(number)[within]]
        tokens, labels, counted = (np.concatenate(columns)[None] for columns in zip(*parts, strict=True))
        documents = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
        return Rows(tokens, labels, counted, documents[None])

    def _part(self, begin: int, length: int) -> tuple[Integers, Integers, Flags]:
        """Tokens, labels and what counts, [length] each, of one span."""
        both = self._text.read(begin, length + 1)
        counted = counted_labels(self._text, begin + 1, both[1:], self._cut)
        counted[-1] &= not len(self._text.documents(begin + length, begin + length + 1))
        return both[:-1], both[1:], counted

    def _window(self, number: int) -> list[list[DocumentSpan]]:
        """The spans of each sample of a window; the last few windows are kept."""
        if number not in self._windows:
            s = self._text.seq_length
            num_bins, begin = min(WINDOW, self._text.num_rows - number * WINDOW), number * WINDOW * s
            starts = self._text.documents(begin + 1, begin + num_bins * s) - begin
            bins = pack([0, *starts.tolist()], s, num_bins)
            self._windows[number] = bins if self._cut.revision == 1 else in_any_order(bins, number)
            while len(self._windows) > _KEPT_WINDOWS:
                self._windows.popitem(last=False)
        return self._windows[number]


def counted_labels(text: Readable, begin: int, labels: Integers, cut: Cut) -> Flags:
    """Which labels, the text's tokens from `begin` on, count as far as each itself decides."""
    counted = text.answered(begin, begin + len(labels)) if cut.answers else np.ones(len(labels), dtype=bool)
    return counted & ~np.isin(labels, cut.no_loss_on) if cut.no_loss_on else counted


def unknown_token(file: TokenFile, tokens: Tokens, start: int, vocab_size: int) -> str:
    """What to say of the first id among tokens (from `start` on in the file) that the vocabulary does not have."""
    within = int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])
    document = file.document_at(start + within)
    return (
        f"{file.prefix}: document {document:,} has token id {int(tokens[within]):,} at its position "
        f"{start + within - file.document_start(document):,}, but the vocabulary has {vocab_size:,} ids (0 to "
        f"{vocab_size - 1:,}): the text was tokenized with another tokenizer. Set data.tokenizer and "
        "model.vocab_size to that one's, or tokenize the text again with this one."
    )
