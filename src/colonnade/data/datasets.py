"""What a run trains and evaluates on: parts of token files, cut between documents, as samples of some kind.

    token file ──split──▶ train │ validation │ test ──SampleKind──▶ samples, in the order of the run

No document is in two of the parts. Which samples are made of documents is a `SampleKind`'s: text that goes on
(`gpt_dataset.py`), or two texts with words to guess (`bert_dataset.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from colonnade.config.numbers import counted
from colonnade.data.curriculum import Curriculum
from colonnade.data.indexed import TokenFile
from colonnade.data.remote import open_token_file
from colonnade.data.rows import Samples, unknown_token
from colonnade.data.sampler import AllEpochsOrder, EpochOrder, Order
from colonnade.data.sidecar import ANSWERS, read_sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError

SPLITS = ("train", "validation", "test")
Positions = Sequence[int] | NDArray[np.int64]


class Passes(NamedTuple):
    """Which pass over which data each of some positions [b] belongs to."""

    sets: NDArray[np.int64]
    """Number of the data set [b]."""
    epochs: NDArray[np.int64]
    """How many times all of it came before [b]; 0 where all epochs are shuffled as one."""


class NoSampleError(DataError):
    """Documents that do not make one sample."""


class Dataset(Protocol):
    """Samples in the order of a run."""

    seq_length: int

    def __len__(self) -> int:
        """Samples of one pass."""
        ...

    def rows(self, positions: Positions) -> Samples:
        """The samples at positions [b] of the run."""
        ...

    def passes(self, positions: Positions) -> Passes:
        """Which pass over which data each sample [b] is of."""
        ...


class TrainingDataset(Dataset, Protocol):
    """Samples by the positions of a curriculum."""

    def used(self, end: int, curriculum: Curriculum) -> Iterator[tuple[Dataset, int]]:
        """How many samples of which dataset are read up to a position, under a curriculum of the same lengths."""
        ...


class SplitDataset(Dataset, Protocol):
    """Samples of runs of documents."""

    @property
    def parts(self) -> Sequence[FileDataset]:
        """Those of each token file."""
        ...


class FileDataset(SplitDataset, Protocol):
    """The samples of one run of documents of one token file, which is its only part."""

    file: TokenFile
    documents: range
    num_tokens: int
    num_samples: int
    sample_tokens: int
    """Tokens in its samples together, without padding, as far as they are known before samples are made."""
    order: Order


class SampleKind(Protocol):
    """How samples are made of documents."""

    def dataset(self, file: TokenFile, documents: range, seq_length: int, *, vocab_size: int) -> FileDataset:
        """Samples of some documents, one after the other. NoSampleError where there is not enough text for one.

        `vocab_size`: ids from it on are refused when they are read.
        """
        ...

    def training(self, of_length: Callable[[int], Dataset], curriculum: Curriculum) -> TrainingDataset:
        """What is trained on, by the positions of a curriculum, given datasets of samples of any length."""
        ...


@dataclass(frozen=True)
class Datasets:
    """What a run trains and evaluates on; None where the split gives nothing."""

    train: SplitDataset
    validation: SplitDataset | None
    test: SplitDataset | None


def open_datasets(
    *,
    samples: SampleKind,
    train: str,
    validation: str | None = None,
    test: str | None = None,
    split: tuple[float, float, float] = (29, 1, 0),
    needed: frozenset[str] = frozenset(SPLITS),
    seq_length: int,
    vocab_size: int,
    seed: int,
    order: Literal["epoch", "all_epochs"] = "epoch",
    epochs: int | None = None,
    tokenizer: Tokenizer | None = None,
    cache: str | None = None,
) -> Datasets:
    """The datasets of a run: `split` cuts `train` by documents, among those of the three without a file. A part without
    a sample is left out where it is not `needed`.
    """
    own = {"validation": validation, "test": test}
    weights = {name: 0 if own.get(name) else weight for name, weight in zip(SPLITS, split, strict=True)}
    file = open_tokens(train, vocab_size=vocab_size, tokenizer=tokenizer, cache=cache)
    parts = dict(zip(SPLITS, split_documents(file.num_documents, tuple(weights.values())), strict=True))
    opened: dict[str, FileDataset] = {}
    for name in SPLITS[1:]:
        prefix = own[name]
        if prefix is not None:
            other = open_tokens(prefix, vocab_size=vocab_size, tokenizer=tokenizer, cache=cache)
            opened[name] = samples.dataset(other, range(other.num_documents), seq_length, vocab_size=vocab_size)
        elif weights[name] and (parts[name] or name in needed):
            check_documents(file, name, parts[name], split)
            left_out = () if name in needed else (NoSampleError,)
            with suppress(*left_out):
                opened[name] = samples.dataset(file, parts[name], seq_length, vocab_size=vocab_size)
    check_documents(file, "train", parts["train"], split)
    dataset = samples.dataset(file, parts["train"], seq_length, vocab_size=vocab_size)
    dataset.order = order_of(dataset.num_samples, order=order, epochs=epochs, seed=seed)
    return Datasets(dataset, opened.get("validation"), opened.get("test"))


def order_of(num_samples: int, *, order: Literal["epoch", "all_epochs"], epochs: int | None, seed: int) -> Order:
    """The order that `data.order` names."""
    if order == "epoch":
        return EpochOrder(num_samples, seed)
    if epochs is None or epochs < 1:
        raise DataError(
            'data.order = "all_epochs" shuffles all epochs as one and has to know how many: data.epochs is '
            f'{epochs}. Set data.epochs to 1 or more, or data.order = "epoch".'
        )
    return AllEpochsOrder(num_samples, epochs, seed)


def passes_of(dataset: FileDataset, positions: Positions) -> Passes:
    """Which pass over a file's documents each sample [b] is of: there is one where all epochs are shuffled as one."""
    asked = np.asarray(positions, dtype=np.int64)
    mixed = isinstance(dataset.order, AllEpochsOrder)
    return Passes(np.zeros_like(asked), asked * 0 if mixed else asked // dataset.num_samples)


def open_tokens(
    prefix: str, *, vocab_size: int, tokenizer: Tokenizer | None = None, cache: str | None = None
) -> TokenFile:
    """Open a token file and hold it against the tokenizer and the model's vocabulary, as far as it says itself."""
    file = open_token_file(prefix, cache)
    sidecar = read_sidecar(file)
    if sidecar is not None and tokenizer is not None and not tokenizer.is_of(sidecar.tokenizer_sha256):
        raise DataError(
            f"{prefix} was made with another tokenizer than data.tokenizer: its {sidecar.vocab_size:,} ids have sha256 "
            f"{sidecar.tokenizer_sha256[:12]}…, the tokenizer's {tokenizer.vocab_size:,} ids "
            f"{tokenizer.sha256[:12]}…. The same id would mean different text. Set data.tokenizer to the one that "
            "made the file (a run that has begun on it has it as tokenizer.json in its checkpoints), or tokenize again."
        )
    if sidecar is not None and sidecar.vocab_size > vocab_size:
        raise DataError(
            f"{prefix} was made with a vocabulary of {sidecar.vocab_size:,} ids, but model.vocab_size = "
            f"{vocab_size:,}. Set model.vocab_size to {sidecar.vocab_size:,}, or leave it out to take the tokenizer's."
        )
    first = file.read(0, min(file.num_tokens, 1 << 14))
    if int(first.max()) >= vocab_size or int(first.min()) < 0:
        raise DataError(unknown_token(file, first, 0, vocab_size))
    return file


def check_text(file: TokenFile, *, trained: bool = True) -> None:
    """DataError for a token file of examples whose numbers would be read as tokens of text. `trained`: whether it is
    read to train a model.
    """
    sidecar = read_sidecar(file)
    examples = None if sidecar is None else sidecar.examples
    if examples is not None and examples.head != ANSWERS:
        of_text = 'model.head = "pretraining" trains on text' if trained else "a perplexity is one of text"
        head = f'Set model.head = "{examples.head}", or name' if trained else "Name"
        raise DataError(
            f"{file.prefix} holds examples of {examples.format}, with numbers among their tokens, and {of_text}. "
            f"{head} a token file of text."
        )


def split_documents(num_documents: int, weights: tuple[float, ...]) -> list[range]:
    """Consecutive runs of documents whose numbers are as the weights, to the nearest document."""
    total, before = sum(weights), 0.0
    parts: list[range] = []
    start = 0
    for weight in weights:
        before += weight
        stop = int(num_documents * before / total + 0.5)
        parts.append(range(start, stop))
        start = stop
    return parts


def check_documents(file: TokenFile, name: str, documents: range, split: tuple[float, float, float]) -> None:
    """Refuse a part of a split without a document."""
    if documents:
        return
    shares = ":".join(f"{share:g}" for share in split)
    remedy = "" if name == "train" else f", or name a file in data.{name}"
    raise DataError(
        f'{file.prefix} has {counted(file.num_documents, "document")}, of which data.split = "{shares}" leaves none '
        f"for {name}: a split is cut between documents. Give {name} a larger share, use a file of more "
        f"documents{remedy}."
    )
