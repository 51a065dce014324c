"""BERT samples: two texts, some words to guess, and whether the texts stand in their order.

    tokens  [CLS] a a a a a [SEP] b b b b b b [SEP] [PAD] …
    types     0   0 0 0 0 0   0   1 1 1 1 1 1   1    0

The token file has a sequence a sentence. Sample i is made of sentences that begin in the i-th of equal ranges of
tokens, of one document; the ranges are shifted a little from epoch to epoch, so that other sentences meet. What is
taken, how it is cut in two and what is masked are functions of (seed, sample, epoch): no map of sentences is built.

The two texts are consecutive and half of the time exchanged (sentence-order prediction, Lan et al., "ALBERT", which the
Megatron-LM paper uses), or the second is half of the time from elsewhere (next-sentence prediction, Devlin et al.).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colonnade.config.defaults import REVISION
from colonnade.config.numbers import counted
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
    passes_of,
)
from colonnade.data.draws import Draws, SamplePurpose
from colonnade.data.indexed import TokenFile
from colonnade.data.masking import Flags, Integers, Masking, WordPieces, choose, shown_to_model
from colonnade.data.phased_dataset import LENGTH_KEYS, PhasedDataset
from colonnade.data.rows import Samples, Text
from colonnade.data.sampler import InOrder, Order
from colonnade.data.sidecar import read_sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError

WHOLE_WORDS = Masking()
_TRIES = 4  # to find a text of a length elsewhere


@dataclass(frozen=True)
class BertCut:
    """How samples are made."""

    pairs: Literal["order", "next"] = "order"
    """The second task: whether two texts are in their order, or the second follows the first at all."""
    short: float = 0.1
    """[probability] Samples that are cut to a random length."""
    masking: Masking = WHOLE_WORDS
    revision: int = REVISION
    """data.revision."""


@dataclass(frozen=True)
class PairRows(Samples):
    """Samples [b] of s tokens each."""

    tokens: Integers
    """[b, s]: with words replaced."""
    types: Integers
    """[b, s]: 0 in the first text, 1 in the second."""
    real: Flags
    """[b, s]: False on padding, which nothing attends to."""
    labels: Integers
    """[b, s]: the tokens as they were."""
    chosen: Flags
    """[b, s]: whether a token is to be guessed."""
    pair_labels: Integers
    """[b]: 0 for texts as they stood, 1 for exchanged ones, or where the second is from elsewhere."""


class BertDataset:
    """The samples of a run of documents, in the order of the run: a permutation an epoch."""

    def __init__(
        self,
        file: TokenFile,
        documents: range,
        seq_length: int,
        *,
        pieces: WordPieces,
        seed: int,
        cut: BertCut,
        order: Order | None = None,
    ) -> None:
        """`order` None: one after the other."""
        assert documents.step == 1 and len(documents) > 0, "a run of documents"
        self.file, self.documents, self.seq_length = file, documents, seq_length
        self._pieces, self._seed, self._cut = pieces, seed, cut
        self._room = seq_length - 3  # for text, beside [CLS] and two [SEP]
        start = file.document_start(documents.start)
        self.num_tokens = file.document_start(documents.stop) - start
        self.num_samples = self.num_tokens // max(self._room, 1)
        self.sample_tokens = self.num_samples * self._room
        if self._room < 2 or not self.num_samples:
            raise NoSampleError(
                f"{file.prefix}: documents {documents.start:,} to {documents.stop - 1:,} hold {self.num_tokens:,} "
                f"tokens, and a sample of {seq_length:,} takes {self._room:,} beside its control tokens. Add text, or "
                f"set another {LENGTH_KEYS} (5 or more)."
            )
        self.order: Order = order or InOrder(self.num_samples)
        self._text = Text(file, start, self.num_tokens, seq_length, len(pieces.continues))

    def __len__(self) -> int:
        return self.num_samples

    @property
    def parts(self) -> Sequence[FileDataset]:
        return (self,)

    def rows(self, positions: Positions) -> PairRows:
        """The samples at positions [b] of the run."""
        asked = np.asarray(positions, dtype=np.int64)
        numbers = zip(self.order.samples(asked).tolist(), self.order.epochs(asked).tolist(), strict=True)
        return PairRows.stack([self._make(sample, epoch) for sample, epoch in numbers])

    def passes(self, positions: Positions) -> Passes:
        """Which pass over the data each sample [b] is of."""
        return passes_of(self, positions)

    def _make(self, sample: int, epoch: int) -> PairRows:
        draws = Draws(self._seed, SamplePurpose.BERT, epoch, sample)
        first, second, label = self._pair(sample, epoch, draws)
        p = self._pieces
        text = np.concatenate([[p.classify], first, [p.separate], second, [p.separate]])
        chosen = choose(text, p, self._cut.masking, draws)
        shown = shown_to_model(text, chosen, p, draws)
        types = np.repeat([0, 1], [len(first) + 2, len(second) + 1])
        return PairRows(
            tokens=self._padded(shown, p.pad),
            types=self._padded(types, 0),
            real=(np.arange(self.seq_length) < len(text))[None],
            labels=self._padded(text, p.pad),
            chosen=self._padded(chosen, 0).astype(bool),
            pair_labels=np.array([label]),
        )

    def _pair(self, sample: int, epoch: int, draws: Draws) -> tuple[Integers, Integers, int]:
        """Two texts and their label."""
        room = draws.integer(2, self._room + 1) if draws.chance(self._cut.short) else self._room
        sentences = self._sentences(sample, epoch, room, draws)
        alone = len(sentences) == 1 and len(sentences[0]) > 1
        if alone:
            where = draws.integer(1, len(sentences[0]))
            sentences = [sentences[0][:where], sentences[0][where:]]
        at = draws.integer(1, max(len(sentences), 2))
        label = int(draws.chance(0.5))
        if label and self._cut.pairs == "order" and self._cut.revision > 1:
            at = _mirrored(sentences, at)
        first, second = np.concatenate(sentences[:at]), np.concatenate([sentences[0][:0], *sentences[at:]])
        if self._cut.revision == 1:
            return self._pair_of_before(first, second, label, epoch, room, draws)
        if label and self._cut.pairs == "order":
            first, second = second, first
        if label and self._cut.pairs == "next" and len(second):
            second = self._elsewhere(sample, len(second), epoch, room, draws, within=alone)
        return *_trimmed(first, second, room, draws), label

    def _elsewhere(self, sample: int, length: int, epoch: int, room: int, draws: Draws, *, within: bool) -> Integers:
        """Text of another sample, as near to a length as is found: whole sentences; `within`: such as begins within
        one and ends with one, if any has more than a token.
        """
        found = list[Integers]()
        for _ in range(_TRIES):
            other = (sample + draws.integer(1, max(self.num_samples, 2))) % self.num_samples
            sentences = self._sentences(other, epoch, room, draws)
            text, ends = np.concatenate(sentences), np.cumsum([0, *map(len, sentences)])
            begin, end = (max(len(text) - length, 1), len(text)) if within else _nearest(ends, length)
            found.append(text[begin:end])
            if end - begin == length:
                break
        nearest = min(found, key=lambda text: abs(len(text) - length))
        return nearest if len(nearest) else text  # each was of one token

    def _pair_of_before(
        self, first: Integers, second: Integers, label: int, epoch: int, room: int, draws: Draws
    ) -> tuple[Integers, Integers, int]:
        """As revision 1 has them: lengths and cuts tell some of the labels."""
        if label and self._cut.pairs == "next":
            elsewhere = self._sentences(draws.integer(0, self.num_samples), epoch, room, draws)
            second = np.concatenate(elsewhere)[: max(room - len(first), 1)]
        first, second = _trimmed(first, second, room, draws)
        return (second, first, 1) if label and self._cut.pairs == "order" else (first, second, label)

    def _sentences(self, sample: int, epoch: int, room: int, draws: Draws) -> list[Integers]:
        """Sentences, at least one: of one document, begun in a sample's range and in `room` tokens from the first."""
        shift = Draws.key(self._seed, SamplePurpose.BERT_GRID, epoch) % self._room
        begin = min(sample * self._room + shift, self._text.num_tokens - self._room)
        stop = min(begin + 2 * self._room, self._text.num_tokens)
        starts = np.append(self._text.sentences(begin, stop), stop)
        if starts[0] >= begin + self._room:  # the range lies within one sentence
            starts = np.append(begin, starts)
        mine = starts[starts < begin + self._room]
        ends = starts[1 : len(mine) + 1]
        documents = np.searchsorted(self._text.documents(begin + 1, stop), mine, side="right")
        token = draws.integer(0, int(ends[-1] - mine[0]))  # a document with a chance in proportion to its tokens
        kept = documents == documents[np.searchsorted(mine - mine[0], token, side="right") - 1]
        kept &= mine < mine[kept][0] + room
        return [self._text.read(a, b - a) for a, b in zip(mine[kept].tolist(), ends[kept].tolist(), strict=True)]

    def _padded(self, values: NDArray[Any], with_: int) -> NDArray[Any]:
        """[text] -> [1, s]"""
        return np.pad(values, (0, self.seq_length - len(values)), constant_values=with_)[None]


def _trimmed(first: Integers, second: Integers, room: int, draws: Draws) -> tuple[Integers, Integers]:
    """Texts of `room` tokens together: the longer one loses tokens at its beginning or end, one at a time."""
    excess = max(len(first) + len(second) - room, 0)
    ends = [[0, len(first)], [0, len(second)]]
    for at_front in (draws.uniform(excess) < 0.5).tolist():
        longer = ends[int(ends[1][1] - ends[1][0] > ends[0][1] - ends[0][0])]
        longer[0 if at_front else 1] += 1 if at_front else -1
    return first[slice(*ends[0])], second[slice(*ends[1])]


def _mirrored(sentences: list[Integers], at: int) -> int:
    """Where sentences are cut so that the later ones are as long as the first `at` are, as nearly as they can be."""
    lengths = [len(sentence) for sentence in sentences]
    later = np.cumsum(lengths[:0:-1])[::-1]  # behind a cut at 1, 2, …
    return 1 + int(np.argmin(np.abs(later - sum(lengths[:at])))) if len(later) else at


def _nearest(ends: Integers, length: int) -> tuple[int, int]:
    """Two of rising places, the first pair that is as nearly `length` apart as any."""
    apart = np.abs(ends[None, :] - ends[:, None] - length)
    apart[np.tril_indices(len(ends))] = np.iinfo(np.int64).max  # two that rise
    begin, end = divmod(int(np.argmin(apart)), len(ends))
    return int(ends[begin]), int(ends[end])


def pair_samples_of(config: Config, tokenizer: Tokenizer | None) -> PairSamples:
    """How a run's samples are made. DataError where its tokenizer has not what masking needs."""
    if tokenizer is None:
        raise DataError(
            f'model.kind = "{config.model.kind}" masks whole words, and data.tokenizer is not set: which ids are words '
            "and which one is [MASK] is not known. Set data.tokenizer to the WordPiece vocabulary that made the token "
            "file, such as bert-base-uncased's vocab.txt."
        )
    masking = config.data.masking
    cut = BertCut(masking.pairs, masking.short, Masking(masking.share, masking.longest), config.data.revision)
    return PairSamples(WordPieces.of(tokenizer), config.train.seed, cut)


def _check_sentences(file: TokenFile, seq_length: int) -> None:
    """Refuse a file whose sequences are whole documents: as it says itself, or as their lengths say."""
    sidecar = read_sidecar(file)
    known = None if sidecar is None else sidecar.sentences
    single = file.num_sequences == file.num_documents
    if known is False or (known is None and single and file.num_tokens > file.num_documents * seq_length):
        raise DataError(
            f"{file.prefix} has a single sequence in each of its {counted(file.num_documents, 'document')}: it was "
            "made for a language model, and pairs of texts are made of sentences. Tokenize the text with `colonnade "
            "data tokenize --sentences`."
        )


@dataclass(frozen=True)
class PairSamples:
    """Samples of two texts with words to guess: a masked model's (`datasets.SampleKind`)."""

    pieces: WordPieces
    seed: int
    cut: BertCut

    def dataset(self, file: TokenFile, documents: range, seq_length: int, *, vocab_size: int) -> BertDataset:
        """`vocab_size` is the model's; ids beyond the vocabulary that words are masked in are refused."""
        check_text(file)
        _check_sentences(file, seq_length)
        return BertDataset(file, documents, seq_length, pieces=self.pieces, seed=self.seed, cut=self.cut)

    def training(self, of_length: Callable[[int], Dataset], curriculum: Curriculum) -> TrainingDataset:
        """Pairs are built at each phase's own length: a sample cut in pieces would be none."""
        return PhasedDataset({length: of_length(length) for length in curriculum.lengths}, curriculum)
