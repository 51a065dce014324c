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
from colonnade.data.datasets import Dataset, FileDataset, Passes, Positions
from colonnade.data.indexed import TokenFile
from colonnade.data.rows import Cut, PackedRows, RowReader, Rows, StreamRows, Text
from colonnade.data.sampler import AllEpochsOrder, InOrder, Order
from colonnade.errors import DataError

STREAM = Cut()


def cut_of(data: DataConfig) -> Cut:
    """How [data] makes samples of documents: for training, for validation, and for measuring the trained model."""
    return Cut(data.documents == "separate", data.packing == "best_fit", data.no_loss_on)


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
        start = file.document_start(documents.start)
        text = Text(file, start, file.document_start(documents.stop) - start, seq_length, vocab_size)
        self.num_tokens, self.num_samples = text.num_tokens, text.num_rows
        if self.num_samples < 1:
            raise DataError(
                f"{file.prefix}: documents {documents.start:,} to {documents.stop - 1:,} hold {self.num_tokens:,} "
                f"tokens, and one sample takes model.seq_length + 1 = {seq_length + 1:,}. Give this split more "
                f"documents (data.split), add text, or set model.seq_length to {max(self.num_tokens - 1, 1):,} or less."
            )
        self._reader: RowReader = PackedRows(text, cut) if cut.best_fit else StreamRows(text, cut)
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
        asked = np.asarray(positions, dtype=np.int64)
        mixed = isinstance(self.order, AllEpochsOrder)
        return Passes(np.zeros_like(asked), asked * 0 if mixed else asked // self.num_samples)

    def sample(self, position: int) -> NDArray[np.int64]:
        """Token ids [seq_length + 1] at a position of the run."""
        return self.samples([position]).reshape(-1)

    def samples(self, positions: Positions) -> NDArray[np.int64]:
        """Token ids [b, seq_length + 1] at positions [b] of the run: the tokens and the last one's label."""
        rows = self.rows(positions)
        return np.concatenate([rows.tokens, rows.labels[:, -1:]], axis=1)


@dataclass(frozen=True)
class TextSamples:
    """Samples of text that goes on: a language model's (`datasets.SampleKind`)."""

    cut: Cut = STREAM

    def dataset(self, file: TokenFile, documents: range, seq_length: int, *, vocab_size: int) -> GPTDataset:
        return GPTDataset(file, documents, seq_length, vocab_size=vocab_size, cut=self.cut)

    def training(self, of_length: Callable[[int], Dataset], curriculum: Curriculum) -> Dataset:
        """Samples of the last phase's length, cut in pieces in the phases before."""
        return CurriculumDataset(of_length(curriculum.seq_length), curriculum)
