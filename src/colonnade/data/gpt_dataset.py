"""Samples of seq_length + 1 tokens, cut from the documents of a token file as if they were one long text.

    tokens    0 1 2 3 4 5 6 7 8 …         seq_length = 4
    sample 0  0 1 2 3 4                   inputs 0..3, labels 1..4
    sample 1          4 5 6 7 8           inputs 4..7, labels 5..8

Each token is a label once (but the first, and a last piece shorter than a sample). Documents end with the
end-of-document token and attention sees across it, as in GPT-2 and Megatron-LM, unless a `Cut` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colonnade.config.schema import DataConfig
from colonnade.data.curriculum import Curriculum
from colonnade.data.curriculum_dataset import CurriculumDataset
from colonnade.data.datasets import (
    Dataset,
    FileDataset,
    NoSampleError,
    Passes,
    Positions,
    TrainingDataset,
    check_text,
    passes_of,
)
from colonnade.data.indexed import TokenFile
from colonnade.data.rows import Cut, PackedRows, RowReader, Rows, StreamRows, Text
from colonnade.data.sampler import InOrder, Order
from colonnade.data.sidecar import ANSWERS, read_sidecar
from colonnade.data.whole_rows import WholeRows
from colonnade.errors import DataError

STREAM = Cut()


def cut_of(data: DataConfig) -> Cut:
    """How [data] makes samples of documents: for training, for validation, and for measuring the trained model."""
    return Cut(
        separate=data.documents == "separate",
        best_fit=data.packing == "best_fit",
        no_loss_on=data.no_loss_on,
        whole=data.packing == "whole",
        too_long=data.too_long,
        answers=data.loss_on == "answers",
        revision=data.revision,
    )


class GPTDataset:
    """The samples of one split of one token file, in the order of the run."""

    def __init__(
        self,
        file: TokenFile,
        documents: range,
        seq_length: int,
        *,
        vocab_size: int,
        order: Order | None = None,
        cut: Cut = STREAM,
    ) -> None:
        """`order` None: one after the other. `vocab_size`: ids from it on are refused when they are read."""
        assert documents.step == 1 and len(documents) > 0, "a run of documents"
        self.file, self.documents, self.seq_length = file, documents, seq_length
        if cut.answers:
            check_answers(file)
        start = file.document_start(documents.start)
        text = Text(file, start, file.document_start(documents.stop) - start, seq_length, vocab_size)
        whole = WholeRows(text, cut) if cut.whole else None
        self.num_dropped = 0 if whole is None else whole.num_dropped
        """Documents that are left out, being longer than a sample."""
        self.num_tokens, self.num_samples = text.num_tokens, text.num_rows if whole is None else len(whole)
        self.sample_tokens = self.num_samples * seq_length if whole is None else whole.num_tokens
        if self.num_samples < 1:
            too_long = whole is not None and text.num_tokens
            raise NoSampleError(_all_too_long(text, documents) if too_long else _too_short(text, documents))
        self._reader: RowReader = whole or (PackedRows(text, cut) if cut.best_fit else StreamRows(text, cut))
        self.order: Order = order or InOrder(self.num_samples)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def parts(self) -> Sequence[FileDataset]:
        return (self,)

    def rows(self, positions: Positions) -> Rows:
        """The samples at positions [b] of the run."""
        indices = self.order.samples(np.asarray(positions, dtype=np.int64))
        return Rows.stack([self._reader.row(index) for index in indices.tolist()])

    def passes(self, positions: Positions) -> Passes:
        """Which pass over the data each sample [b] is of."""
        return passes_of(self, positions)

    def sample(self, position: int) -> NDArray[np.int64]:
        """Token ids [seq_length + 1] at a position of the run."""
        return self.samples([position]).reshape(-1)

    def samples(self, positions: Positions) -> NDArray[np.int64]:
        """Token ids [b, seq_length + 1] at positions [b] of the run: the tokens and the last one's label."""
        rows = self.rows(positions)
        return np.concatenate([rows.tokens, rows.labels[:, -1:]], axis=1)


def _too_short(text: Text, documents: range) -> str:
    return (
        f"{text.file.prefix}: documents {documents.start:,} to {documents.stop - 1:,} hold {text.num_tokens:,} "
        f"tokens, and one sample takes model.seq_length + 1 = {text.seq_length + 1:,}. Give this split more "
        f"documents (data.split), add text, or set model.seq_length to {max(text.num_tokens - 1, 1):,} or less."
    )


def _all_too_long(text: Text, documents: range) -> str:
    return (
        f"{text.file.prefix}: all documents from {documents.start:,} to {documents.stop - 1:,} are longer than "
        f'model.seq_length = {text.seq_length:,}, and data.too_long = "drop" leaves such documents out. Set '
        'model.seq_length higher, or data.too_long = "truncate".'
    )


def check_answers(file: TokenFile) -> None:
    """DataError for a token file whose sequences are not given and answered by turns."""
    sidecar = read_sidecar(file)
    examples = None if sidecar is None else sidecar.examples
    if examples is not None and examples.head == ANSWERS:
        return
    if sidecar is None and file.num_sequences > file.num_documents:  # another program's, whose word counts
        return
    holds = f"holds examples of {examples.format}" if examples else "holds text"
    raise DataError(
        f'data.loss_on = "answers", but {file.prefix} {holds}, in which no answers are marked. Make it with `colonnade '
        'data examples chat`, or set data.loss_on = "all".'
    )


@dataclass(frozen=True)
class TextSamples:
    """Samples of text that goes on: a language model's (`datasets.SampleKind`)."""

    cut: Cut = STREAM

    def dataset(self, file: TokenFile, documents: range, seq_length: int, *, vocab_size: int) -> GPTDataset:
        check_text(file)
        return GPTDataset(file, documents, seq_length, vocab_size=vocab_size, cut=self.cut)

    def training(self, of_length: Callable[[int], Dataset], curriculum: Curriculum) -> TrainingDataset:
        """Samples of the last phase's length, cut in pieces in the phases before."""
        return CurriculumDataset(of_length(curriculum.seq_length), curriculum)
