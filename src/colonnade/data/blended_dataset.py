"""Several token files as one data set: each with its own split and its own order, mixed as `blend` says.

    position ──Blend──▶ (file, how many of its samples came before) ──Order──▶ sample of the file

A file that is used up begins its next epoch, which is another permutation of all its samples: it is never read past its
end, and no sample comes a second time before all came once (unless all its epochs are shuffled as one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from colonnade.config.defaults import REVISION
from colonnade.data.blend import END_OF_TOTALS, Blend, whole_weights
from colonnade.data.changing_blend import ChangingBlend
from colonnade.data.datasets import (
    SPLITS,
    Datasets,
    FileDataset,
    NoSampleError,
    Passes,
    Positions,
    SampleKind,
    check_documents,
    open_tokens,
    order_of,
    split_documents,
)
from colonnade.data.rows import Samples
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError

BlendBy = Literal["samples", "tokens", "epochs", "temperature"]


@dataclass(frozen=True)
class Mixture:
    """Token files and their numbers, as in data.blend."""

    numbers: Mapping[str, float]
    by: BlendBy = "samples"
    temperature: float | None = None
    earlier: tuple[tuple[int, Mapping[str, float]], ...] = ()
    """Up to which position, in samples, the run had which other numbers, in rising order."""
    revision: int = REVISION
    """data.revision."""


class BlendedDataset:
    """The samples of several data sets in one order."""

    def __init__(self, parts: Sequence[FileDataset], blend: Blend | ChangingBlend, *, end: int | None = None) -> None:
        """`end`: positions there are; None: any number, each part begins again when it is used up."""
        assert len(parts) == len(blend.weights), "a weight for each data set"
        assert len({part.seq_length for part in parts}) == 1, "samples of one length"
        self.parts, self.blend, self.end = list(parts), blend, end
        self.seq_length = parts[0].seq_length
        self.num_tokens = sum(part.num_tokens for part in parts)
        self.num_samples = end or blend.length([part.num_samples for part in parts])

    def __len__(self) -> int:
        """Samples until the first of the data sets begins again, or the end."""
        return self.num_samples

    def rows(self, positions: Positions) -> Samples:
        """The samples at positions [b] of the run."""
        asked = np.asarray(positions, dtype=np.int64)
        self.check_length(int(asked.max(initial=-1)) + 1)
        place = self.blend.locate(asked)
        groups = [np.flatnonzero(place.sets == number) for number in np.unique(place.sets)]
        rows = [self.parts[place.sets[group[0]]].rows(place.indices[group]) for group in groups]
        stacked: Samples = type(rows[0]).stack(rows)
        return stacked.take(np.argsort(np.concatenate(groups)))

    def passes(self, positions: Positions) -> Passes:
        """Which pass over which part each sample [b] is of."""
        place = self.blend.locate(np.asarray(positions, dtype=np.int64))
        epochs = np.empty_like(place.indices)
        for number in np.unique(place.sets):
            chosen = place.sets == number
            epochs[chosen] = self.parts[number].passes(place.indices[chosen]).epochs
        return Passes(place.sets, epochs)

    def first_of_each(self, num_samples: int) -> list[int]:
        """How many samples of each data set are among the first `num_samples`; one at least, and no more than it has
        for one pass.
        """
        found: list[int] = self.blend.counts(num_samples).tolist()
        return [min(max(1, count), len(part)) for count, part in zip(found, self.parts, strict=True)]

    def check_length(self, num_samples: int) -> None:
        """Refuse a run of more samples than there are."""
        if self.end is None or num_samples <= self.end:
            return
        raise DataError(
            f'the run asks for {num_samples:,} samples, but the epochs of data.blend (data.blend_by = "epochs") '
            f"have {self.end:,} in all. Lower train.steps or train.global_batch_size, or give the files more "
            "epochs in another run."
        )


def open_blend(
    mixture: Mixture,
    *,
    samples: SampleKind,
    split: tuple[float, float, float],
    seq_length: int,
    vocab_size: int,
    seed: int,
    order: Literal["epoch", "all_epochs"] = "epoch",
    tokenizer: Tokenizer | None = None,
    cache: str | None = None,
) -> Datasets:
    """The data sets of a blended run: `split` cuts each file by documents, and the parts are blended alike."""
    found: list[list[FileDataset]] = [[], [], []]
    shares: list[list[float]] = [[], [], []]
    for number, (prefix, value) in enumerate(mixture.numbers.items()):
        file = open_tokens(prefix, vocab_size=vocab_size, tokenizer=tokenizer, cache=cache)
        for part, documents in enumerate(split_documents(file.num_documents, split)):
            if part and not documents:
                continue
            check_documents(file, SPLITS[part], documents, split)
            try:
                in_order = samples.dataset(file, documents, seq_length, vocab_size=vocab_size)
            except NoSampleError:
                if not part:
                    raise
                continue
            found[part].append(in_order if part else _shuffled(in_order, mixture, value, order, seed + (number << 32)))
            shares[part].append(value)
    opened = [_blended(parts, mixture, values) for parts, values in zip(found[1:], shares[1:], strict=True)]
    return Datasets(_training(found[0], mixture, shares[0]), *opened)


def _shuffled(
    dataset: FileDataset, mixture: Mixture, number: float, order: Literal["epoch", "all_epochs"], seed: int
) -> FileDataset:
    """The data set in its own random order; the first file's is the one that it has alone."""
    epochs = int(number) if mixture.by == "epochs" else None
    dataset.order = order_of(dataset.num_samples, order=order, epochs=epochs, seed=seed)
    return dataset


def _training(parts: list[FileDataset], mixture: Mixture, numbers: Sequence[float]) -> BlendedDataset:
    if mixture.by != "epochs":
        ends = [0, *(end for end, _ in mixture.earlier)]
        each = [*(list(before.values()) for _, before in mixture.earlier), numbers]
        blends = [Blend(_weights(parts, mixture, values)) for values in each]
        return BlendedDataset(parts, ChangingBlend(list(zip(ends, blends, strict=True))))
    counts = [max(1, round(Fraction(str(number)) * len(part))) for part, number in zip(parts, numbers, strict=True)]
    if sum(counts) >= END_OF_TOTALS:
        raise DataError(
            f'the epochs of data.blend (data.blend_by = "epochs") have {END_OF_TOTALS:,} samples or more in all, whose '
            "order is not computed. Lower the numbers of data.blend."
        )
    return BlendedDataset(parts, Blend(counts), end=sum(counts))


def _blended(parts: list[FileDataset], mixture: Mixture, numbers: Sequence[float]) -> BlendedDataset | None:
    """A validation or test part: the same proportions, without an end."""
    return BlendedDataset(parts, Blend(_weights(parts, mixture, numbers))) if parts else None


def _weights(parts: list[FileDataset], mixture: Mixture, numbers: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportions in which samples are drawn."""
    if mixture.by == "epochs":
        return whole_weights([Fraction(str(n)) * len(part) for part, n in zip(parts, numbers, strict=True)])
    if mixture.by == "temperature":
        return whole_weights(_tempered(parts, numbers, mixture))
    if mixture.by == "tokens" and mixture.revision > 1:
        return whole_weights([Fraction(str(n)) / _tokens_of_each(part) for part, n in zip(parts, numbers, strict=True)])
    return whole_weights(numbers)


def _tokens_of_each(part: FileDataset) -> Fraction:
    """Tokens of a sample, in the mean."""
    return Fraction(part.sample_tokens, part.num_samples)


def _tempered(parts: list[FileDataset], numbers: Sequence[float], mixture: Mixture) -> list[float]:
    assert mixture.temperature is not None, "the config check asks for a temperature"
    temperature, power = mixture.temperature, 1 / mixture.temperature
    try:
        if mixture.revision == 1:  # which took all samples for equally long
            weights = [n * part.num_tokens**power for part, n in zip(parts, numbers, strict=True)]
        else:
            weights = [
                n * part.sample_tokens**power / float(_tokens_of_each(part))
                for part, n in zip(parts, numbers, strict=True)
            ]
    except OverflowError:
        weights = [math.inf]
    if math.inf in weights:
        raise DataError(
            f"data.temperature = {temperature} makes weights of data.blend (factors on tokens^(1/temperature)) that "
            "no number here is large enough for. Set data.temperature to 1 or more, or lower the factors."
        )
    return weights
