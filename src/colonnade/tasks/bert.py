"""Masked language modelling, and which of two texts came first: BERT's pre-training.

    masked            mean over the tokens that are to be guessed      Devlin et al., "BERT", 2019
    sentence order    mean over the samples                            Lan et al., "ALBERT", 2020

The loss is the sum of the two, each over its own denominator in the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.data.bert_dataset import WHOLE_WORDS, PairRows
from colonnade.data.rows import Samples
from colonnade.errors import DataError
from colonnade.kernels.dropout import Masks
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Axis
from colonnade.model.bert import BERT, BertInputs
from colonnade.tasks.scores import as_shares
from colonnade.tasks.task import Hidden, own_generator
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.upload import upload


@dataclass(frozen=True)
class BertBatch:
    """The samples of one micro-batch."""

    tokens: Tensor
    """int64 [s, b]: with words replaced."""
    types: Tensor
    """int64 [s, b]: 0 in the first text, 1 in the second."""
    real: Tensor
    """bool [s, b]: False on padding, which nothing attends to."""
    labels: Tensor
    """int64 [s, b]: the tokens as they were."""
    loss_mask: Tensor
    """float32 [s, b]: 1 where a token is to be guessed."""
    pair_labels: Tensor
    """int64 [b]: 0 for texts as they stood, 1 for exchanged ones, or where the second is from elsewhere."""
    pair_mask: Tensor
    """float32 [b]: 1 where the pair counts."""
    samples: Tensor
    """int64 [b], on the CPU: each sample's position in the run; dropout depends on it."""

    def to(self, device: torch.device) -> BertBatch:
        """The same batch on a device; `samples`, which only the program reads, stay where they are."""
        moved = [field.name for field in fields(self) if field.name != "samples"]
        return replace(self, **{name: upload(getattr(self, name), device) for name in moved})

    def uncounted(self) -> BertBatch:
        """The same batch, with nothing to guess."""
        return replace(self, loss_mask=torch.zeros_like(self.loss_mask), pair_mask=torch.zeros_like(self.pair_mask))


def as_bert_batch(rows: PairRows, samples: Sequence[int]) -> BertBatch:
    """Samples [b, s] as sequences [s, b]; `samples` [b] name them."""
    return BertBatch(
        tokens=_sequence_first(rows.tokens),
        types=_sequence_first(rows.types),
        real=_sequence_first(rows.real),
        labels=_sequence_first(rows.labels),
        loss_mask=_sequence_first(rows.chosen.astype(np.float32)),
        pair_labels=torch.from_numpy(rows.pair_labels),
        pair_mask=torch.ones(len(rows.pair_labels)),
        samples=torch.tensor(list(samples), dtype=torch.int64),
    )


def _sequence_first(rows: NDArray[np.generic]) -> Tensor:
    """[b, s] -> [s, b]"""
    return torch.from_numpy(np.ascontiguousarray(rows.T))


@dataclass(frozen=True)
class Guesses:
    """What an evaluation of a masked model found, the same on every rank."""

    masked_loss: float
    """[nats per masked token]"""
    masked_accuracy: float
    """Share of the masked tokens that the model finds likeliest among all."""
    order_loss: float
    """[nats per sample]"""
    order_accuracy: float
    """Share of the samples whose order of texts it tells."""
    masked_tokens: int
    samples: int

    @property
    def loss(self) -> float:
        """What is trained on."""
        return self.masked_loss + self.order_loss

    def numbers(self) -> dict[str, float]:
        """For metrics."""
        return {
            "loss": self.loss,
            "masked_loss": self.masked_loss,
            "masked_accuracy": self.masked_accuracy,
            "sentence_order_loss": self.order_loss,
            "sentence_order_accuracy": self.order_accuracy,
        }

    def summary(self) -> str:
        """One line for people."""
        return (
            f"loss {self.loss:.4f}: masked {self.masked_loss:.4f} ({self.masked_accuracy:.2%} of "
            f"{self.masked_tokens:,} right), sentence order {self.order_loss:.4f} ({self.order_accuracy:.2%} of "
            f"{self.samples:,} right)"
        )


class MaskedPairs:
    """`Task` of a BERT."""

    def build(self, model: ModelConfig, vocab_size: int, parallel: Parallel, units: Sequence[str] | None) -> BERT:
        return BERT(model, vocab_size, parallel, units=units)

    def batch(self, samples: Samples, positions: Sequence[int]) -> BertBatch:
        assert isinstance(samples, PairRows), "samples of two texts"
        return as_bert_batch(samples, positions)

    def random_batch(self, model: ModelConfig, size: int, vocab_size: int, *, separate_documents: bool) -> BertBatch:
        seq_length, draw = model.seq_length, own_generator()
        tokens = torch.randint(0, vocab_size, (seq_length, size), generator=draw)
        types = (torch.arange(seq_length)[:, None] > seq_length // 2).long().expand_as(tokens).contiguous()
        return BertBatch(
            tokens=tokens,
            types=types,
            real=torch.ones_like(tokens).bool(),
            labels=tokens,
            loss_mask=(torch.rand(tokens.shape, generator=draw) < WHOLE_WORDS.share).float(),
            pair_labels=torch.arange(size) % 2,
            pair_mask=torch.ones(size),
            samples=torch.arange(size),
        )

    def counts(self, batch: BertBatch) -> Tensor:
        return torch.stack([batch.loss_mask.sum(dtype=torch.float64), batch.pair_mask.sum(dtype=torch.float64)])

    def inputs(self, batch: BertBatch, weights: Tensor | None, seed: int | None) -> BertInputs:
        return BertInputs(
            batch.tokens,
            batch.labels,
            None if weights is None else batch.loss_mask.double() * weights[0],
            None if seed is None else Masks(seed, batch.samples.numpy()),
            types=batch.types,
            real=batch.real,
            pair_labels=batch.pair_labels,
            pair_weights=None if weights is None else batch.pair_mask.double() * weights[1],
        )

    def evaluate(
        self,
        model: BERT,
        batches: Iterable[BertBatch],
        *,
        dp: Axis,
        pp: Axis,
        hidden: Hidden,
        byte_lengths: Tensor | None,
        tokenizer_checked: bool,
    ) -> Guesses:
        """Sums are float64; all-reduces 6 numbers over dp and over pp, at the end."""
        device = next(model.parameters()).device
        sums = torch.zeros(6, dtype=torch.float64, device=device)
        with torch.no_grad():
            for batch in batches:
                sums += self._sums(model, batch.to(device), hidden)
        masked, hits, tokens, order, right_orders, samples = all_reduce(all_reduce(sums, dp), pp).tolist()
        if tokens == 0 or samples == 0:
            raise DataError("the evaluation has no token to guess: it has no samples. Give it more text.")
        return Guesses(
            masked_loss=masked / tokens,
            masked_accuracy=hits / tokens,
            order_loss=order / samples,
            order_accuracy=right_orders / samples,
            masked_tokens=round(tokens),
            samples=round(samples),
        )

    def _sums(self, model: BERT, batch: BertBatch, hidden: Hidden) -> Tensor:
        """Over a batch: of masked tokens losses, right guesses and number, and the same of pairs: float64 [6]."""
        carry = hidden(self.inputs(batch, None, None))
        if carry is None:
            return batch.loss_mask.new_zeros(6, dtype=torch.float64)
        x = model.residual(carry)
        found = [(*model.head.guesses(x, batch.labels), batch.loss_mask)]
        found.append((*model.head.tell_order(x, batch.pair_labels), batch.pair_mask))
        return torch.stack(
            [
                (values.double() * mask).sum()
                for losses, right, mask in found
                for values in (losses, as_shares(right, losses), torch.ones_like(losses))
            ]
        )
