"""Pairs of answers to one prompt, of which one is preferred: two sequences a sample, from token files of preferences.

    document    prompt │ chosen │ prompt │ rejected          as `colonnade data examples preferences` writes it
    sample      [2, s]: prompt and chosen; prompt and rejected. Only the answers count; behind them is padding.

What does not fit into model.seq_length is left out at the end. What a reference model thinks of the two answers is put
beside them when it is known (`reference`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.data.curriculum import Curriculum
from colonnade.data.datasets import Dataset, TrainingDataset
from colonnade.data.indexed import TokenFile
from colonnade.data.made_dataset import MadeDataset
from colonnade.data.phased_dataset import LENGTH_KEYS, PhasedDataset
from colonnade.data.rows import Flags, Integers, Samples
from colonnade.data.sampler import Order
from colonnade.data.sidecar import PREFERENCES, read_sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError

Floats = NDArray[np.float64]
FIELDS = 4


@dataclass(frozen=True)
class PreferenceRows(Samples):
    """Samples [b] of two sequences of s tokens, the preferred one first."""

    tokens: Integers
    """[b, 2, s]."""
    labels: Integers
    """[b, 2, s]: the token after each."""
    counted: Flags
    """[b, 2, s]: whether the label is a part of the answer."""
    reference: Floats
    """[b, 2]: log-probability of each answer as the reference model has it; 0 where it is not known."""
    options: Floats
    """[b, 3]: beta, label smoothing, and 1 for IPO's loss, else 0."""


class PreferenceDataset(MadeDataset[PreferenceRows]):
    """The pairs of a run of documents, in the order of the run."""

    def __init__(
        self,
        file: TokenFile,
        documents: range,
        seq_length: int,
        *,
        vocab_size: int,
        options: tuple[float, float, float],
        order: Order | None = None,
    ) -> None:
        super().__init__(file, documents, seq_length, vocab_size=vocab_size, num_samples=len(documents), order=order)
        self._options = options
        check_preferences(file)
        _check_lengths(file, documents, seq_length)
        self.reference: Floats = np.zeros((self.num_samples, 2))
        """Of every sample, by its number in the file's order: see `PreferenceRows.reference`."""

    def _make(self, sample: int) -> PreferenceRows:
        document = self.documents.start + sample
        sequences = self.file.sequences(document)
        self._check_tokens(document, sequences)
        sides = [self._side(*sequences[at : at + 2]) for at in (0, 2)]
        tokens, labels, counted = (np.stack(each)[None] for each in zip(*sides, strict=True))
        return PreferenceRows(tokens, labels, counted, self.reference[sample][None], np.array([self._options]))

    def _side(self, prompt: NDArray[np.integer], answer: NDArray[np.integer]) -> tuple[Integers, Integers, Flags]:
        """Tokens, labels and what counts, [s] each."""
        s = self.seq_length
        whole = np.concatenate([prompt, answer]).astype(np.int64)[: s + 1]
        missing = (0, s + 1 - len(whole))
        places = np.arange(1, s + 1)
        padded = np.pad(whole, missing)
        return padded[:-1], padded[1:], (places >= max(len(prompt), 1)) & (places < len(whole))


def check_preferences(file: TokenFile) -> None:
    """DataError for a token file that does not hold pairs of answers."""
    sidecar = read_sidecar(file)
    examples = None if sidecar is None else sidecar.examples
    if examples is None or examples.head != PREFERENCES:
        holds = "text" if examples is None else f"examples of {examples.format}"
        raise DataError(
            f'{file.prefix} holds {holds}, and model.head = "preferences" is trained on pairs of answers. Make it with '
            "`colonnade data examples preferences FILES`."
        )


def _check_lengths(file: TokenFile, documents: range, seq_length: int) -> None:
    """DataError where a document has other fields, or a prompt leaves no room for an answer."""
    first = np.asarray(file.boundaries[documents.start : documents.stop + 1])
    if (np.diff(first) != FIELDS).any():
        number = documents.start + int(np.argmax(np.diff(first) != FIELDS))
        raise DataError(
            f"{file.prefix}: document {number:,} has another number of sequences than prompt, chosen, prompt and "
            "rejected. Make the file again."
        )
    lengths = np.asarray(file.lengths[int(first[0]) : int(first[-1])]).reshape(-1, FIELDS)
    full = np.asarray((lengths[:, [0, 2]] > seq_length).any(axis=1)).reshape(-1)
    if full.any():
        raise DataError(
            f"{file.prefix}: {counted(int(full.sum()), 'prompt')} of {len(full):,} fill sequences of {seq_length:,} "
            "tokens and leave no room for an answer, the first in document "
            f"{documents.start + int(np.argmax(full)):,}. Use a longer {LENGTH_KEYS}, or leave them out of the file."
        )


def preference_samples_of(config: Config, _: Tokenizer | None) -> PreferenceSamples:
    """How a run's samples are made."""
    chosen = config.preferences
    return PreferenceSamples((chosen.beta, chosen.label_smoothing, float(chosen.loss == "ipo")))


@dataclass(frozen=True)
class PreferenceSamples:
    """Pairs of answers (`datasets.SampleKind`)."""

    options: tuple[float, float, float]

    def dataset(self, file: TokenFile, documents: range, seq_length: int, *, vocab_size: int) -> PreferenceDataset:
        return PreferenceDataset(file, documents, seq_length, vocab_size=vocab_size, options=self.options)

    def training(self, of_length: Callable[[int], Dataset], curriculum: Curriculum) -> TrainingDataset:
        """There is one length: the config check refuses others."""
        return PhasedDataset({length: of_length(length) for length in curriculum.lengths}, curriculum)
