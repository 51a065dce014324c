"""Samples that are made one by one of the documents of a token file, in the order of a run: what datasets share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from colonnade.data.datasets import FileDataset, Passes, Positions, passes_of
from colonnade.data.indexed import TokenFile, Tokens
from colonnade.data.rows import Samples, unknown_token
from colonnade.data.sampler import InOrder, Order
from colonnade.errors import DataError

Made = TypeVar("Made", bound=Samples)


class MadeDataset(ABC, Generic[Made]):
    """The samples of a run of documents (`datasets.FileDataset`)."""

    def __init__(
        self,
        file: TokenFile,
        documents: range,
        seq_length: int,
        *,
        vocab_size: int,
        num_samples: int,
        order: Order | None = None,
    ) -> None:
        """`order` None: one after the other."""
        self.file, self.documents, self.seq_length = file, documents, seq_length
        self.num_samples = num_samples
        self.num_tokens = file.document_start(documents.stop) - file.document_start(documents.start)
        self.sample_tokens = self.num_tokens
        self.order: Order = order or InOrder(num_samples)
        self._vocab_size = vocab_size

    @abstractmethod
    def _make(self, sample: int) -> Made:
        """The sample [1] of this number in the order of the file."""

    def __len__(self) -> int:
        return self.num_samples

    @property
    def parts(self) -> Sequence[FileDataset]:
        return (self,)

    def rows(self, positions: Positions) -> Made:
        """The samples at positions [b] of the run."""
        asked = np.asarray(positions, dtype=np.int64)
        made = [self._make(sample) for sample in self.order.samples(asked).tolist()]
        return type(made[0]).stack(made)

    def passes(self, positions: Positions) -> Passes:
        """Which pass over the data each sample [b] is of."""
        return passes_of(self, positions)

    def _check_tokens(self, document: int, sequences: Sequence[Tokens]) -> None:
        """DataError for a sequence of a document with an id that the vocabulary does not have."""
        for text in sequences:
            if len(text) and (int(text.max()) >= self._vocab_size or int(text.min()) < 0):
                start = self.file.document_start(document)
                whole = self.file.read(start, self.file.document_start(document + 1) - start)
                raise DataError(unknown_token(self.file, whole, start, self._vocab_size))
