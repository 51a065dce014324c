"""T5 samples: spans of a text are cut out of the encoder's input and are what the decoder has to write.

    text      a b c d e f g h i                (spans c d and h i are cut)
    encoder   a b <0> e f g <1> </s>
    decoder   <0> c d <1> h i </s>             its inputs are these, shifted right by a start token

15 % of the tokens are cut, in spans of three on average (Raffel et al. 2020, section 3.1.4). Which ones is a function
of (seed, sample, epoch): each way to cut the two lengths into spans is equally likely, as in the paper's own code. A
text begins with what stays and ends with a span.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colonnade.config.corruption import Lengths
from colonnade.config.schema import Config
from colonnade.data.curriculum import Curriculum
from colonnade.data.datasets import (
    Dataset,
    FileDataset,
    NoSampleError,
    Passes,
    Positions,
    TrainingDataset,
    check_text,
)
from colonnade.data.draws import Draws, SamplePurpose
from colonnade.data.gpt_dataset import GPTDataset
from colonnade.data.indexed import TokenFile
from colonnade.data.phased_dataset import LENGTH_KEYS, PhasedDataset
from colonnade.data.rows import Samples
from colonnade.data.sampler import Order
from colonnade.data.sentencepiece import SENTINEL
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError

Integers = NDArray[np.int64]
END, START = "</s>", "<pad>"
SHORTEST = 3
"""[tokens] Of either sequence: a token, a sentinel and the end."""


@dataclass(frozen=True)
class Corruption:
    """How much is cut, and the ids that mark it."""

    sentinels: tuple[int, ...]
    """Ids that stand for the first span, the second, …; T5's <extra_id_0>, <extra_id_1>, …"""
    end: int
    """Id behind both sequences."""
    start: int
    """Id before the decoder's input, and behind what is shorter than its sequence; T5 uses its padding."""
    lengths: Lengths = Lengths()  # noqa: RUF009  (it is frozen)

    @classmethod
    def of(cls, tokenizer: Tokenizer, lengths: Lengths) -> Corruption:
        """Of a vocabulary with sentinels; DataError for one without."""
        sentinels: list[int] = []
        while (found := tokenizer.id_of(SENTINEL.format(len(sentinels)))) is not None:
            sentinels.append(found)
        if not sentinels:
            raise DataError(
                f"the tokenizer's {tokenizer.vocab_size:,} ids have no {SENTINEL.format(0)}: T5 samples mark each span "
                "that is cut out with a sentinel. Use the tokenizer.json of a T5, or train one with `colonnade data "
                "train-tokenizer --sentinels 100`, and tokenize the text with it."
            )
        end, start = end_and_start(tokenizer)
        return cls(tuple(sentinels), end, start, lengths)


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Id behind every text: </s>, or what ends documents; None if the vocabulary has neither."""
    ends = (tokenizer.id_of(END), tokenizer.end_of_document)
    return next((token for token in ends if token is not None), None)


def end_and_start(tokenizer: Tokenizer) -> tuple[int, int]:
    """Ids behind every text, `end_of_text`, and before what is written: <pad>, or the end."""
    end = end_of_text(tokenizer)
    if end is None:
        raise DataError(
            f"the tokenizer has neither {END} nor another token that ends a document, which texts of a T5 end with. "
            "Use the tokenizer.json of a T5, or one that `colonnade data train-tokenizer --sentinels 100` wrote."
        )
    start = tokenizer.id_of(START)
    return end, end if start is None else start


GAP = re.compile(f"({SENTINEL.format('[0-9]+')})")


def text_with_gaps(tokenizer: Tokenizer, text: str, *, control: bool = False) -> list[int]:
    """Token ids of a text, in which the names of sentinels are these; DataError for one that there is not. `control`:
    those of other control tokens are, too.
    """
    ids = list[int]()
    for number, part in enumerate(GAP.split(text)):
        if number % 2 == 0:
            ids += tokenizer.encode(part, control=control) if part else []
            continue
        sentinel = tokenizer.id_of(part)
        if sentinel is None:
            raise DataError(f"the vocabulary has no {part}, which the text names. Use a sentinel that it has.")
        ids.append(sentinel)
    return ids


@dataclass(frozen=True)
class SpanRows(Samples):
    """Samples [b] of s tokens to be read and t to be written, padded at their ends."""

    tokens: Integers
    """[b, s]: the encoder's."""
    num_tokens: Integers
    """[b]: of them, without padding."""
    decoder_tokens: Integers
    """[b, t]: the labels, shifted right."""
    labels: Integers
    """[b, t]."""
    num_labels: Integers
    """[b]: of them, without padding."""


class T5Dataset:
    """Texts of one split of one token file with spans cut out, in the order of the run."""

    def __init__(
        self,
        file: TokenFile,
        documents: range,
        seq_length: int,
        *,
        decoder_length: int,
        vocab_size: int,
        corruption: Corruption,
        seed: int,
        order: Order | None = None,
    ) -> None:
        """`order` None: one after the other."""
        self.seq_length, self._decoder_length = seq_length, decoder_length
        self._corruption, self._seed = corruption, seed
        length = corruption.lengths.text(seq_length, decoder_length)
        if length < 2:
            raise DataError(
                f"T5 samples of {seq_length} tokens to read and {decoder_length} to write hold no text: each takes a "
                f"token, a sentinel and an end. Use a {LENGTH_KEYS}, and a model.decoder_seq_length, of {SHORTEST} or "
                "more."
            )
        _, spans = corruption.lengths.cut(length)
        if spans > len(corruption.sentinels):
            raise DataError(
                f"texts of {length:,} tokens have {spans} spans cut out, but the vocabulary has "
                f"{len(corruption.sentinels)} sentinels. Use a shorter "
                f"{LENGTH_KEYS}, longer spans (data.corruption.mean_length), or a tokenizer with more <extra_id_…>."
            )
        self.text_length = length
        self.file, self.documents = file, documents
        try:
            self._texts = GPTDataset(file, documents, length, vocab_size=vocab_size, order=order)
        except NoSampleError:
            raise NoSampleError(
                f"{file.prefix}: documents {documents.start:,} to {documents.stop - 1:,} hold no text of "
                f"{length + 1:,} tokens, which a T5 sample of {seq_length:,} to read and {decoder_length:,} to write "
                f"takes. Give this split more documents (data.split), add text, or use a shorter {LENGTH_KEYS}."
            ) from None
        self.num_tokens, self.num_samples = self._texts.num_tokens, self._texts.num_samples
        self.sample_tokens = self._texts.sample_tokens

    @property
    def order(self) -> Order:
        return self._texts.order

    @order.setter
    def order(self, order: Order) -> None:
        self._texts.order = order

    def __len__(self) -> int:
        return self.num_samples

    @property
    def parts(self) -> Sequence[FileDataset]:
        return (self,)

    def rows(self, positions: Positions) -> SpanRows:
        """The samples at positions [b] of the run."""
        asked = np.asarray(positions, dtype=np.int64)
        texts = self._texts.rows(asked).tokens
        numbers = zip(self.order.samples(asked).tolist(), self.order.epochs(asked).tolist(), strict=True)
        return SpanRows.stack([self._make(text, *number) for text, number in zip(texts, numbers, strict=True)])

    def passes(self, positions: Positions) -> Passes:
        """Which pass over the data each sample [b] is of."""
        return self._texts.passes(positions)

    def _make(self, text: Integers, sample: int, epoch: int) -> SpanRows:
        read, written = self._cut(text, sample, epoch)
        labels = self._padded(written, self._decoder_length)
        return SpanRows(
            tokens=self._padded(read, self.seq_length),
            num_tokens=np.array([len(read)]),
            decoder_tokens=np.concatenate([[[self._corruption.start]], labels[:, :-1]], axis=1),
            labels=labels,
            num_labels=np.array([len(written)]),
        )

    def _padded(self, tokens: Integers, length: int) -> Integers:
        """[tokens] -> [1, length]"""
        return np.pad(tokens, (0, length - len(tokens)), constant_values=self._corruption.start)[None]

    def _cut(self, text: Integers, sample: int, epoch: int) -> tuple[Integers, Integers]:
        """What the encoder reads and what the decoder writes."""
        corruption = self._corruption
        kept, cut = spans(len(text), corruption.lengths, Draws(self._seed, SamplePurpose.T5, epoch, sample))
        edges = np.cumsum(np.stack([kept, cut], axis=1).reshape(-1))[:-1]
        parts = np.split(text, edges)
        marks = [np.array([mark]) for mark in corruption.sentinels[: len(cut)]]
        end = np.array([corruption.end])
        encoder = [part for pair in zip(parts[::2], marks, strict=True) for part in pair]
        decoder = [part for pair in zip(marks, parts[1::2], strict=True) for part in pair]
        return np.concatenate([*encoder, end]), np.concatenate([*decoder, end])


def spans(text: int, lengths: Lengths, draws: Draws) -> tuple[Integers, Integers]:
    """Lengths of what stays and of what is cut, by turns, beginning with what stays: [spans] each, all positive."""
    cut, count = lengths.cut(text)
    return _parts(text - cut, count, draws), _parts(cut, count, draws)


def _parts(total: int, count: int, draws: Draws) -> Integers:
    """`count` positive integers of a sum, every way alike likely."""
    edges = np.sort(draws.order(total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], edges, [total]]))


def span_samples_of(config: Config, tokenizer: Tokenizer | None) -> SpanSamples:
    """How a run's samples are made. DataError where its tokenizer has no sentinels."""
    if tokenizer is None:
        raise DataError(
            f'model.kind = "{config.model.kind}" marks what it cuts out with sentinels, and data.tokenizer is not set: '
            "which ids these are is not known. Set data.tokenizer to the vocabulary that made the token file, with "
            "<extra_id_0>, <extra_id_1>, …"
        )
    corruption = Corruption.of(tokenizer, config.data.corruption.lengths)
    return SpanSamples(corruption, config.model.decoder_length, config.train.seed)


@dataclass(frozen=True)
class SpanSamples:
    """Texts with spans cut out: an encoder's and a decoder's (`datasets.SampleKind`)."""

    corruption: Corruption
    decoder_length: int
    seed: int

    def dataset(self, file: TokenFile, documents: range, seq_length: int, *, vocab_size: int) -> T5Dataset:
        check_text(file)
        return T5Dataset(
            file,
            documents,
            seq_length,
            decoder_length=self.decoder_length,
            vocab_size=vocab_size,
            corruption=self.corruption,
            seed=self.seed,
        )

    def training(self, of_length: Callable[[int], Dataset], curriculum: Curriculum) -> TrainingDataset:
        """Samples are made at each phase's own length, and padded for the decoder up to the whole run's."""
        return PhasedDataset({length: of_length(length) for length in curriculum.lengths}, curriculum)
