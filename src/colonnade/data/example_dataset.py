"""Examples with a label as samples: a text, or two, of a `data examples` token file, between BERT's control tokens.

    classification   [CLS] a a a [SEP] b b [SEP] [PAD] …      or [CLS] a a a [SEP] of one text
    choice           [CLS] passage [SEP] question, option [SEP] [PAD] …     a sequence for each option

A document is an example, and all of it is one sample. Of texts that are too long the longer one loses its end, token by
token: truncation "longest_first" of Hugging Face `tokenizers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.data.curriculum import Curriculum
from colonnade.data.datasets import Dataset, TrainingDataset
from colonnade.data.indexed import TokenFile, Tokens
from colonnade.data.made_dataset import MadeDataset
from colonnade.data.phased_dataset import LENGTH_KEYS, PhasedDataset
from colonnade.data.rows import Flags, Integers, Samples
from colonnade.data.sampler import Order
from colonnade.data.sidecar import ExampleFields, read_sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.storage import is_remote

_CONTROL = ("[CLS]", "[SEP]", "[PAD]")


@dataclass(frozen=True)
class LabelledRows(Samples):
    """Samples [b] of c sequences of s tokens each."""

    tokens: Integers
    """[b, c, s]"""
    types: Integers
    """[b, c, s]: 0 in the first text, 1 in the second."""
    real: Flags
    """[b, c, s]: False on padding, which nothing attends to."""
    targets: NDArray[np.float64]
    """[b]: the label, or the score; NaN where there is none."""


def missing_control(tokenizer: Tokenizer) -> list[str]:
    """Which control tokens around texts a vocabulary does not have."""
    return [name for name in _CONTROL if tokenizer.id_of(name) is None]


@dataclass(frozen=True)
class PairTokens:
    """The control tokens around texts."""

    classify: int
    separate: int
    pad: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> PairTokens:
        """Of a BERT tokenizer. DataError for a vocabulary without them."""
        found = {name: tokenizer.id_of(name) for name in _CONTROL}
        if missing := missing_control(tokenizer):
            raise DataError(
                f"the tokenizer has no {', '.join(missing)}, which stand around the texts of an example. Use the "
                "vocabulary of the BERT that is fine-tuned, such as bert-base-uncased's vocab.txt."
            )
        return cls(*(token for token in found.values() if token is not None))

    def sequence(self, first: Tokens, second: Tokens | None, length: int) -> tuple[Integers, Integers, Flags]:
        """Tokens, types and what is no padding, [length] each."""
        texts = [first] if second is None else list(cut_longest_first(first, second, length - 3))
        texts[0] = texts[0][: length - 2] if second is None else texts[0]
        ends = [[self.separate]] * len(texts)
        parts = [part for text, end in zip(texts, ends, strict=True) for part in (text, end)]
        tokens = np.concatenate([[self.classify], *parts]).astype(np.int64)
        first_length = len(texts[0]) + 2
        missing = (0, length - len(tokens))
        types = (np.arange(length) >= first_length) & (np.arange(length) < len(tokens))
        return (
            np.pad(tokens, missing, constant_values=self.pad),
            types.astype(np.int64),
            np.arange(length) < len(tokens),
        )


def cut_longest_first(first: Tokens, second: Tokens, room: int) -> tuple[Tokens, Tokens]:
    """Two texts of `room` tokens together: the longer one loses its end, until both are alike; then both do."""
    short, long = sorted((len(first), len(second)))
    long = min(long, max(short, room - short))
    if short + long > room:
        short, long = room // 2, room - room // 2
    lengths = (long, short) if len(first) > len(second) else (short, long)
    return first[: lengths[0]], second[: lengths[1]]


@dataclass(frozen=True)
class Reading:
    """How samples are made of documents."""

    tokens: PairTokens
    head: str
    """model.head."""
    num_labels: int
    labelled: bool = True
    """Whether an example without a label is refused."""


class ExampleDataset(MadeDataset[LabelledRows]):
    """The examples of a run of documents, in the order of the run: a permutation an epoch."""

    def __init__(
        self,
        file: TokenFile,
        documents: range,
        seq_length: int,
        *,
        vocab_size: int,
        reading: Reading,
        order: Order | None = None,
    ) -> None:
        super().__init__(file, documents, seq_length, vocab_size=vocab_size, num_samples=len(documents), order=order)
        self._reading, self._fields = reading, fields_of(file)
        check_fields(file, self._fields, reading)
        if seq_length < 8:
            raise DataError(
                f"sequences of {seq_length} tokens leave no room for two texts and three control tokens. Use a "
                f"{LENGTH_KEYS} of 8 or more."
            )
        if not is_remote(file.prefix):  # where each would be a request; they are checked when they are read
            check_labels(file, documents, self._fields, reading)

    def _make(self, sample: int) -> LabelledRows:
        document = self.documents.start + sample
        *texts, numbers = self._read(document)
        pairs = [(texts[0], option) for option in texts[1:]] if self._reading.head == "choice" else [tuple(texts)]
        made = [self._reading.tokens.sequence(pair[0], (*pair[1:], None)[0], self.seq_length) for pair in pairs]
        tokens, types, real = (np.stack(each)[None] for each in zip(*made, strict=True))
        return LabelledRows(tokens, types, real, np.array([self._target(document, numbers)]))

    def _read(self, document: int) -> list[Tokens]:
        sequences, texts = self.file.sequences(document), len(self._fields.fields)
        if len(sequences) != texts + 1:
            raise DataError(
                f"{self.file.prefix}: document {document:,} has {counted(len(sequences), 'sequence')}, and an example "
                f"of {self._fields.format} has {texts + 1}: {', '.join(self._fields.fields)}, and its label."
            )
        self._check_tokens(document, sequences[:-1])
        return sequences

    def _target(self, document: int, numbers: Tokens) -> float:
        if not len(numbers) and not self._reading.labelled:
            return float("nan")
        if len(numbers) != 1:
            raise DataError(_without_label(self.file, 1, document))
        number = int(numbers[0])
        if self._reading.num_labels > 1 and number >= self._reading.num_labels:
            raise DataError(_out_of_range(self.file, document, number, self._reading.num_labels))
        return number / self._fields.scale


def fields_of(file: TokenFile) -> ExampleFields:
    """What the documents of a token file are. DataError where it does not say that they are examples."""
    sidecar = read_sidecar(file)
    if sidecar is None or sidecar.examples is None:
        what = "has no .json beside it that says" if sidecar is None else "holds text, as its .json says, and not"
        raise DataError(
            f"{file.prefix} {what} examples of a task, which a model with labels is trained on. Make them with "
            '`colonnade data examples FORMAT FILES`, or set model.head = "pretraining" to train on text.'
        )
    return sidecar.examples


def check_fields(file: TokenFile, fields: ExampleFields, reading: Reading) -> None:
    """DataError where the examples are not for this head, or have another number of labels."""
    wrong = misfit(fields, reading)
    if wrong is not None:
        raise DataError(f"{file.prefix} has {wrong.what}. Set {wrong.wanted}, or name another file.")


class Misfit(NamedTuple):
    """Why examples are not those that a model reads."""

    what: str
    """The examples, beside what the model has."""
    wanted: str
    """The key and the value that they are for."""


def misfit(fields: ExampleFields, reading: Reading) -> Misfit | None:
    """None where the examples are for this head, with its number of labels."""
    if fields.head != reading.head:
        key = f'model.head = "{fields.head}"'
        return Misfit(f'examples of {fields.format}, for {key}, and model.head is "{reading.head}"', key)
    options = len(fields.fields) - 1
    wanted = options if reading.head == "choice" else len(fields.labels) or 1
    if wanted == reading.num_labels:
        return None
    what = (
        counted(wanted, "text") + " to choose from"
        if reading.head == "choice"
        else (counted(wanted, "label") + f": {', '.join(fields.labels)}" if fields.labels else "scores, and no labels")
    )
    there = f"examples of {fields.format} with {what}"
    return Misfit(f"{there}, and model.num_labels = {reading.num_labels}", f"model.num_labels = {wanted}")


def check_labels(file: TokenFile, documents: range, fields: ExampleFields, reading: Reading) -> None:
    """DataError for an example without a label, or with one that there is not. Reads a number of each."""
    last = np.asarray(file.boundaries[documents.start + 1 : documents.stop + 1]) - 1
    lengths = np.asarray(file.lengths)[last]
    missing = np.flatnonzero(lengths != 1)
    if len(missing) and reading.labelled:
        raise DataError(_without_label(file, len(missing), documents.start + int(missing[0])))
    if not fields.labels and reading.head != "choice":
        return
    numbers = file.read(0, file.num_tokens)[file.sequence_ends(last[lengths == 1]) - 1]
    wrong = np.flatnonzero(numbers >= reading.num_labels)
    if len(wrong):
        document = documents.start + int(np.flatnonzero(lengths == 1)[wrong[0]])
        raise DataError(_out_of_range(file, document, int(numbers[wrong[0]]), reading.num_labels))


def _without_label(file: TokenFile, number: int, first: int) -> str:
    return (
        f"{file.prefix} has {counted(number, 'example')} without a label, the first is document {first:,}: nothing can "
        "be trained or scored on them. Name a file of labelled examples, such as the development set."
    )


def _out_of_range(file: TokenFile, document: int, number: int, num_labels: int) -> str:
    return (
        f"{file.prefix}: document {document:,} has label {number}, and model.num_labels = {num_labels} has 0 to "
        f"{num_labels - 1}. Make the file again from a list with these labels, or set model.num_labels."
    )


def pair_tokens_of(config: Config, tokenizer: Tokenizer | None) -> PairTokens:
    """The control tokens of a run whose head reads pairs of texts. DataError where its tokenizer is not known."""
    if tokenizer is None:
        raise DataError(
            f'model.head = "{config.model.head}" puts control tokens around texts, and data.tokenizer is not set: '
            "which ids these are is not known. Set data.tokenizer to that of the model that is fine-tuned."
        )
    return PairTokens.of(tokenizer)


def example_samples_of(config: Config, tokenizer: Tokenizer | None) -> ExampleSamples:
    """How a run's samples are made. DataError where its tokenizer lacks what they need."""
    control = pair_tokens_of(config, tokenizer)
    assert config.model.num_labels is not None, "the config check asks for it"
    return ExampleSamples(Reading(control, config.model.head, config.model.num_labels))


@dataclass(frozen=True)
class ExampleSamples:
    """Examples with labels (`datasets.SampleKind`)."""

    reading: Reading

    def dataset(self, file: TokenFile, documents: range, seq_length: int, *, vocab_size: int) -> ExampleDataset:
        return ExampleDataset(file, documents, seq_length, vocab_size=vocab_size, reading=self.reading)

    def training(self, of_length: Callable[[int], Dataset], curriculum: Curriculum) -> TrainingDataset:
        """Texts are cut and padded at each phase's own length."""
        return PhasedDataset({length: of_length(length) for length in curriculum.lengths}, curriculum)
