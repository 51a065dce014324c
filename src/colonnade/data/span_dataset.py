"""Questions about a text as samples: a window of the text behind the question, with the positions that answer it.

    [CLS] question [SEP] text … [SEP] [PAD] …       a sample for every window of a document's text

The windows of a document follow from the lengths of its question and its text, which the .idx has. So a sample's number
tells its document and window by a search in a table, on any layout and at any length, and a file is made once for all
lengths of model.seq_length, those of a curriculum among them.

An answer that is not wholly in a window is not in it: its sample points at [CLS], as that of a question without answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.data.curriculum import Curriculum
from colonnade.data.datasets import Dataset, TrainingDataset
from colonnade.data.example_dataset import PairTokens, fields_of, pair_tokens_of
from colonnade.data.indexed import TokenFile, Tokens
from colonnade.data.made_dataset import MadeDataset
from colonnade.data.phased_dataset import LENGTH_KEYS, PhasedDataset
from colonnade.data.question_windows import CONTROL_TOKENS, Windows
from colonnade.data.rows import Flags, Integers, Samples
from colonnade.data.sampler import Order
from colonnade.data.sidecar import SPANS, ExampleFields
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError

_FIELDS = ("question", "context")


@dataclass(frozen=True)
class SpanRows(Samples):
    """Samples [b] of s tokens each."""

    tokens: Integers
    """[b, s]"""
    types: Integers
    """[b, s]: 0 in the question, 1 in the text."""
    real: Flags
    """[b, s]: False on padding, which nothing attends to."""
    answers: Integers
    """[b, 2]: the positions that the answer begins and ends with; 0, 0: it is not in the window."""


class SpanDataset(MadeDataset[SpanRows]):
    """The windows of a run of documents, in the order of the run: a permutation an epoch."""

    def __init__(
        self,
        file: TokenFile,
        documents: range,
        seq_length: int,
        *,
        vocab_size: int,
        tokens: PairTokens,
        order: Order | None = None,
    ) -> None:
        self._tokens, self._windows = tokens, windows_of(file)
        counts = window_counts(file, documents, seq_length, self._windows)
        self._first = np.concatenate([[0], np.cumsum(counts)])  # number of each document's first window
        super().__init__(
            file, documents, seq_length, vocab_size=vocab_size, num_samples=int(self._first[-1]), order=order
        )

    def _make(self, sample: int) -> SpanRows:
        index = int(np.searchsorted(self._first, sample, side="right")) - 1
        question, text, numbers = self._read(self.documents.start + index)
        window = self._windows.ranges(len(question), len(text), self.seq_length)[sample - int(self._first[index])]
        tokens, types, real = self._tokens.sequence(question, text[window.start : window.stop], self.seq_length)
        first, stop = numbers.tolist()
        inside = window.start <= first < stop <= window.stop
        shift = 2 + len(question) - window.start
        answer = (first + shift, stop - 1 + shift) if inside else (0, 0)
        return SpanRows(tokens[None], types[None], real[None], np.array([answer], dtype=np.int64))

    def _read(self, document: int) -> list[Tokens]:
        sequences = self.file.sequences(document)
        self._check_tokens(document, sequences[:-1])
        *_, text, numbers = sequences
        if not 0 <= int(numbers[0]) <= int(numbers[1]) <= len(text):
            raise DataError(
                f"{self.file.prefix}: document {document:,} is answered by tokens {numbers[0]:,} to {numbers[1]:,} of "
                f"{len(text):,}. The file is damaged: make it again."
            )
        return sequences


def window_counts(file: TokenFile, documents: range, seq_length: int, windows: Windows) -> Integers:
    """Windows of each document. DataError for one that is no question, or leaves no room for its text."""
    bounds = np.asarray(file.boundaries[documents.start : documents.stop + 1])
    others = np.flatnonzero(np.diff(bounds) != len(_FIELDS) + 1)
    if len(others):
        raise DataError(
            f"{file.prefix}: document {documents.start + int(others[0]):,} is no question: it has "
            f"{counted(int(np.diff(bounds)[others[0]]), 'sequence')}, and not question, context and answer. "
            "Make the file again."
        )
    questions, texts, numbers = (np.asarray(file.lengths[bounds[:-1] + each], dtype=np.int64) for each in range(3))
    unlabelled = np.flatnonzero(numbers != 2)
    if len(unlabelled):
        raise DataError(
            f"{file.prefix} has {counted(len(unlabelled), 'question')} without an answer or word that there is "
            f"none, the first is document {documents.start + int(unlabelled[0]):,}: nothing can be trained or "
            "scored on them. Name a file that has answers, such as the development set."
        )
    found = windows.counts(questions, texts, seq_length)
    if (found == 0).any():
        first = int(np.flatnonzero(found == 0)[0])
        raise DataError(
            f"{file.prefix}: document {documents.start + first:,} has a question of "
            f"{counted(int(questions[first]), 'token')}, and a sequence of {seq_length} leaves no room "
            f"for text behind it and {CONTROL_TOKENS} control tokens. Use a {LENGTH_KEYS} of "
            f"{int(questions.max()) + CONTROL_TOKENS + 1} or more, or make the file again with a smaller "
            "--max-query-length."
        )
    return found


def windows_of(file: TokenFile) -> Windows:
    """How a token file of questions is cut. DataError where it is none."""
    fields = fields_of(file)
    if fields.head != SPANS:
        raise DataError(
            f'{file.prefix} has examples of {fields.format}, for model.head = "{fields.head}", and model.head is '
            f'"{SPANS}". Set model.head = "{fields.head}", or name a file of questions about texts (squad).'
        )
    return _windows(file, fields)


def _windows(file: TokenFile, fields: ExampleFields) -> Windows:
    try:
        windows = Windows(**{name: int(value) for name, value in fields.options.items()})
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{file.prefix}.json does not say how windows are cut ({error}). Make the file again."
        ) from None
    windows.check()
    return windows


def span_answer_samples_of(config: Config, tokenizer: Tokenizer | None) -> SpanSamples:
    """How a run's samples are made. DataError where its tokenizer lacks what they need."""
    return SpanSamples(pair_tokens_of(config, tokenizer))


@dataclass(frozen=True)
class SpanSamples:
    """Questions about texts (`datasets.SampleKind`)."""

    tokens: PairTokens

    def dataset(self, file: TokenFile, documents: range, seq_length: int, *, vocab_size: int) -> SpanDataset:
        return SpanDataset(file, documents, seq_length, vocab_size=vocab_size, tokens=self.tokens)

    def training(self, of_length: Callable[[int], Dataset], curriculum: Curriculum) -> TrainingDataset:
        """Windows are cut anew at each phase's own length."""
        return PhasedDataset({length: of_length(length) for length in curriculum.lengths}, curriculum)
