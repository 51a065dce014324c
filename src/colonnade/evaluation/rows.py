"""The rows in which a text is scored: its documents joined, separate or packed, as the model met them in training.

    windows     sliding over the text (`windows.py`), documents kept apart within each where `Cut.separate` says so
    packed      best-fit packing, row for row what a run's own validation reads; then what is left, as a window

A label that a run does not count (`data.no_loss_on`; the first token of a separate document) is not scored here either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from colonnade.data.loader import Batch, as_batch
from colonnade.data.rows import Cut, PackedRows, Rows, stream_row
from colonnade.errors import DataError
from colonnade.evaluation.windows import Window, num_windows, window_at


@dataclass(frozen=True)
class TokenText:
    """Tokens of a text, and where its documents begin."""

    tokens: NDArray[np.integer]
    """[n], possibly memory-mapped: read as they are needed."""
    starts: NDArray[np.int64]
    """First token of each document, rising. Read only where documents are separate."""
    vocab_size: int
    """Of the model: ids from it on are refused when they are read."""
    seq_length: int
    answers: NDArray[np.bool_] | None = None
    """Which tokens [n] are parts of answers; None: it is not marked, and all are scored."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Full rows, of which each token but the first is a label once."""
        return (len(self.tokens) - 1) // self.seq_length

    def read(self, begin: int, count: int) -> NDArray[np.int64]:
        """Tokens [count] from `begin` on."""
        tokens = self.tokens[begin : begin + count].astype(np.int64)
        unknown = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if len(unknown):
            raise DataError(
                f"the text has token id {unknown[0]:,} near token {begin:,}, but the model's vocabulary has "
                f"{self.vocab_size:,} ids (0 to {self.vocab_size - 1:,}): it was tokenized with another tokenizer. "
                "Tokenize it with the checkpoint's own."
            )
        return tokens

    def documents(self, begin: int, stop: int) -> NDArray[np.int64]:
        """Where documents begin, of those that begin at tokens `begin … stop`."""
        first, last = np.searchsorted(self.starts, (begin, stop))
        return self.starts[first:last]

    def answered(self, begin: int, stop: int) -> NDArray[np.bool_]:
        """Whether each of the tokens `begin … stop` is scored."""
        return np.ones(stop - begin, dtype=bool) if self.answers is None else self.answers[begin:stop]


class ScoredRows(Protocol):
    """Rows of equal length, by number."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Rows:
        """One row: [1, s]. What is scored counts in it."""
        ...


@dataclass(frozen=True)
class WindowRows:
    """The sliding windows over a text."""

    text: TokenText
    stride: int
    cut: Cut

    def __len__(self) -> int:
        return num_windows(len(self.text.tokens), self.text.seq_length, self.stride)

    def row(self, number: int) -> Rows:
        """One row: [1, s]."""
        return window_row(
            self.text, window_at(number, len(self.text.tokens), self.text.seq_length, self.stride), self.cut
        )


class PackedText:
    """The packed samples of a text, and behind them the tokens that are too few for one."""

    def __init__(self, text: TokenText, cut: Cut) -> None:
        self._text, self._cut, self._packed = text, cut, PackedRows(text, cut)
        self._rest = text.num_rows * text.seq_length < len(text.tokens) - 1

    def __len__(self) -> int:
        return self._text.num_rows + self._rest

    def row(self, number: int) -> Rows:
        """One row: [1, s]."""
        if number < self._text.num_rows:
            return self._packed.row(number)
        begin = number * self._text.seq_length
        return window_row(self._text, Window(begin, begin, len(self._text.tokens) - 1), self._cut)


def window_row(text: TokenText, window: Window, cut: Cut) -> Rows:
    """One window as a row [1, s]. A shorter one is filled up behind its end, which a causal model does not notice."""
    length = window.stop - window.start
    row, missing = stream_row(text, window.start, length, cut), ((0, 0), (0, text.seq_length - length))
    counted = np.pad(row.counted, missing)
    counted[:, : window.scored - window.start] = False
    documents = None if row.documents is None else np.pad(row.documents, missing, mode="edge")
    return Rows(np.pad(row.tokens, missing), np.pad(row.labels, missing), counted, documents)


def batches_of(rows: ScoredRows, microbatches: Sequence[range]) -> Iterator[Batch]:
    """A batch for each run of row numbers; tokens are read as they are needed."""
    return (as_batch(Rows.stack([rows.row(number) for number in numbers]), numbers) for numbers in microbatches)
