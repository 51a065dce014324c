"""Span corruption: an encoder reads a text with spans cut out, a decoder writes them. T5's pre-training.

The loss is the mean over the labels that are no padding (Raffel et al., 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.config.corruption import Lengths
from colonnade.config.model import ModelConfig
from colonnade.data.rows import Samples
from colonnade.data.t5_dataset import SpanRows
from colonnade.errors import DataError
from colonnade.evaluation.perplexity import exp_of, perplexity_in_words
from colonnade.kernels.dropout import Masks
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Axis
from colonnade.model.t5 import T5, T5Inputs
from colonnade.tasks.scores import as_shares
from colonnade.tasks.task import Hidden, own_generator
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.upload import upload


@dataclass(frozen=True)
class T5Batch:
    """The samples of one micro-batch."""

    tokens: Tensor
    """int64 [s, b]: the encoder's."""
    real: Tensor | None
    """bool [s, b]: False on padding, which nothing attends to. None: there is none."""
    decoder_tokens: Tensor
    """int64 [t, b]: the labels, shifted right."""
    labels: Tensor
    """int64 [t, b]."""
    loss_mask: Tensor
    """float32 [t, b]: 1 where the label counts, 0 on padding."""
    samples: Tensor
    """int64 [b], on the CPU: each sample's position in the run; dropout depends on it."""

    def to(self, device: torch.device) -> T5Batch:
        """The same batch on a device; `samples`, which only the program reads, stay where they are."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "samples"}
        return replace(self, **{name: upload(part, device) for name, part in parts.items() if part is not None})

    def uncounted(self) -> T5Batch:
        """The same batch, none of whose labels counts."""
        return replace(self, loss_mask=torch.zeros_like(self.loss_mask))


def as_t5_batch(rows: SpanRows, samples: Sequence[int]) -> T5Batch:
    """Samples [b, s] and [b, t] as sequences [s, b] and [t, b]; `samples` [b] name them."""
    real = np.arange(rows.tokens.shape[1]) < rows.num_tokens[:, None]
    counted = np.arange(rows.labels.shape[1]) < rows.num_labels[:, None]
    return T5Batch(
        tokens=_sequence_first(rows.tokens),
        real=None if real.all() else _sequence_first(real),
        decoder_tokens=_sequence_first(rows.decoder_tokens),
        labels=_sequence_first(rows.labels),
        loss_mask=_sequence_first(counted.astype(np.float32)),
        samples=torch.tensor(list(samples), dtype=torch.int64),
    )


def _sequence_first(rows: NDArray[np.generic]) -> Tensor:
    """[b, s] -> [s, b]"""
    return torch.from_numpy(np.ascontiguousarray(rows.T))


@dataclass(frozen=True)
class Written:
    """What an evaluation of an encoder and a decoder found, the same on every rank."""

    mean_loss: float
    """[nats per token that is to be written]"""
    accuracy: float
    """Share of these tokens that the model finds likeliest among all, given those before."""
    tokens: int

    @property
    def loss(self) -> float:
        return self.mean_loss

    @property
    def perplexity(self) -> float:
        return exp_of(self.loss)

    def numbers(self) -> dict[str, float]:
        """For metrics."""
        return {"loss": self.loss, "perplexity": self.perplexity, "accuracy": self.accuracy}

    def summary(self) -> str:
        """One line for people."""
        return (
            f"loss {self.loss:.4f}, perplexity {perplexity_in_words(self.perplexity)}: "
            f"{self.accuracy:.2%} of {self.tokens:,} tokens to be written are right"
        )


class SpanCorruption:
    """`Task` of a T5."""

    def build(self, model: ModelConfig, vocab_size: int, parallel: Parallel, units: Sequence[str] | None) -> T5:
        return T5(model, vocab_size, parallel, units=units)

    def batch(self, samples: Samples, positions: Sequence[int]) -> T5Batch:
        assert isinstance(samples, SpanRows), "samples of two texts"
        return as_t5_batch(samples, positions)

    def random_batch(self, model: ModelConfig, size: int, vocab_size: int, *, separate_documents: bool) -> T5Batch:
        s, t, draw = model.seq_length, model.decoder_length, own_generator()
        labels = torch.randint(0, vocab_size, (t, size), generator=draw)
        padded = Lengths().widths(max(2, Lengths().text(s, t)))[0] < s
        return T5Batch(
            tokens=torch.randint(0, vocab_size, (s, size), generator=draw),
            real=torch.ones(s, size, dtype=torch.bool) if padded else None,
            decoder_tokens=labels,
            labels=labels,
            loss_mask=torch.ones(t, size),
            samples=torch.arange(size),
        )

    def counts(self, batch: T5Batch) -> Tensor:
        return batch.loss_mask.sum(dtype=torch.float64)[None]

    def inputs(self, batch: T5Batch, weights: Tensor | None, seed: int | None) -> T5Inputs:
        return T5Inputs(
            batch.tokens,
            batch.labels,
            None if weights is None else batch.loss_mask.double() * weights[0],
            None if seed is None else Masks(seed, batch.samples.numpy()),
            decoder_tokens=batch.decoder_tokens,
            real=batch.real,
        )

    def evaluate(
        self,
        model: T5,
        batches: Iterable[T5Batch],
        *,
        dp: Axis,
        pp: Axis,
        hidden: Hidden,
        byte_lengths: Tensor | None,
        tokenizer_checked: bool,
    ) -> Written:
        """Sums are float64; all-reduces 3 numbers over dp and over pp, at the end."""
        device = next(model.parameters()).device
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.no_grad():
            for batch in batches:
                sums += self._sums(model, batch.to(device), hidden)
        loss, hits, tokens = all_reduce(all_reduce(sums, dp), pp).tolist()
        if tokens == 0:
            raise DataError("the evaluation has no token to be written: it has no samples. Give it more text.")
        return Written(loss / tokens, hits / tokens, round(tokens))

    def _sums(self, model: T5, batch: T5Batch, hidden: Hidden) -> Tensor:
        """Over a batch: losses, right guesses and their number, float64 [3]; zeros on stages without the head."""
        carry = hidden(self.inputs(batch, None, None))
        if carry is None:
            return batch.loss_mask.new_zeros(3, dtype=torch.float64)
        losses, right = model.head.guesses(model.residual(carry), batch.labels)
        found = (losses.double(), as_shares(right, losses), torch.ones_like(losses).double())
        return torch.stack([(values * batch.loss_mask).sum() for values in found])
