"""T5 samples: spans of a text are cut out of the encoder's input and are what the decoder has to write.

    text      a b c d e f g h i                (spans b c and g are cut)
    encoder   a <0> d e f <1> h i </s>
    decoder   <0> b c <1> g </s>               its inputs are these, shifted right by a start token

15 % of the tokens are cut, in spans of three on average (Raffel et al. 2020, section 3.1.4). Which ones is a function
of (seed, sample, epoch): each way to cut the two lengths into spans is equally likely, as in the paper's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.data.draws import Draws, SamplePurpose
from colonnade.data.gpt_dataset import GPTDataset
from colonnade.errors import DataError

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Corruption:
    """How much is cut, and the ids that mark it."""

    sentinels: tuple[int, ...]
    """Ids that stand for the first span, the second, …; T5's <extra_id_0>, <extra_id_1>, …"""
    end: int
    """Id behind both sequences."""
    start: int
    """Id before the decoder's input; T5 uses its padding."""
    share: float = 0.15
    mean_length: float = 3.0

    def lengths(self, text: int) -> tuple[int, int]:
        """Tokens that are cut out of a text of so many, and in how many spans; always the same for one length."""
        cut = min(max(round(text * self.share), 1), text - 1)
        return cut, min(max(round(cut / self.mean_length), 1), cut, text - cut)

    def widths(self, text: int) -> tuple[int, int]:
        """Tokens of the encoder's and of the decoder's sequence for a text of so many."""
        cut, spans = self.lengths(text)
        return text - cut + spans + 1, cut + spans + 1


def text_length(seq_length: int, corruption: Corruption) -> int:
    """The longest text whose encoder sequence fits into `seq_length`."""
    length = 2
    if corruption.widths(length)[0] > seq_length:
        raise DataError(f"model.seq_length = {seq_length} is too short for T5 samples. Set it to 3 or more.")
    while corruption.widths(length + 1)[0] <= seq_length:
        length += 1
    return length


@dataclass(frozen=True)
class T5Batch:
    """The samples of one micro-batch; all sequences are full, nothing is padded."""

    tokens: Tensor
    """int64 [s, b]: the encoder's."""
    decoder_tokens: Tensor
    """int64 [s_d, b]: the labels, shifted right."""
    labels: Tensor
    """int64 [s_d, b]."""
    samples: Tensor
    """int64 [b]: each sample's position in the run; dropout depends on it."""

    def to(self, device: torch.device) -> T5Batch:
        """The same batch on a device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})


class T5Dataset:
    """Texts of another data set, with spans cut out."""

    def __init__(self, texts: GPTDataset, *, corruption: Corruption, seed: int) -> None:
        """`texts`: of `text_length(seq_length, corruption)` tokens each."""
        self._texts, self._corruption, self._seed = texts, corruption, seed
        _, spans = corruption.lengths(texts.seq_length)
        if spans > len(corruption.sentinels):
            raise DataError(
                f"texts of {texts.seq_length:,} tokens have {spans} spans cut out, but the vocabulary has "
                f"{len(corruption.sentinels)} sentinels. Use shorter sequences, or a tokenizer with more <extra_id_…>."
            )

    def __len__(self) -> int:
        return len(self._texts)

    def batch(self, positions: Sequence[int]) -> T5Batch:
        """The samples at positions [b] of the run."""
        rows = self._texts.rows(positions).tokens
        passes = self._texts.passes(positions).epochs
        pairs = [self._cut(*each) for each in zip(rows, passes.tolist(), positions, strict=True)]
        encoder, labels = (torch.from_numpy(np.stack(side, axis=1)) for side in zip(*pairs, strict=True))
        start = torch.full_like(labels[:1], self._corruption.start)
        return T5Batch(encoder, torch.cat([start, labels[:-1]]), labels, torch.tensor(list(positions)))

    def _cut(self, text: Integers, epoch: int, position: int) -> tuple[Integers, Integers]:
        """What the encoder reads and what the decoder writes."""
        kept, cut = spans(len(text), self._corruption, Draws(self._seed, SamplePurpose.T5, epoch, position))
        edges = np.cumsum(np.stack([kept, cut], axis=1).reshape(-1))[:-1]
        parts = np.split(text, edges)
        marks = [np.array([mark]) for mark in self._corruption.sentinels[: len(cut)]]
        end = np.array([self._corruption.end])
        encoder = [part for pair in zip(parts[::2], marks, strict=True) for part in pair]
        decoder = [part for pair in zip(marks, parts[1::2], strict=True) for part in pair]
        return np.concatenate([*encoder, end]), np.concatenate([*decoder, end])


def spans(text: int, corruption: Corruption, draws: Draws) -> tuple[Integers, Integers]:
    """Lengths of what stays and of what is cut, by turns, beginning with what stays: [spans] each, all positive."""
    cut, count = corruption.lengths(text)
    return _parts(text - cut, count, draws), _parts(cut, count, draws)


def _parts(total: int, count: int, draws: Draws) -> Integers:
    """`count` positive integers of a sum, every way alike likely."""
    edges = np.sort(draws.order(total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], edges, [total]]))
