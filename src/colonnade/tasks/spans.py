"""Fine-tuning: which run of a text answers a question about it.

The loss is the mean over the samples, which are windows of texts: see `model/bert_spans.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.data.rows import Samples
from colonnade.data.span_dataset import SpanRows
from colonnade.errors import DataError
from colonnade.kernels.dropout import Masks
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Axis
from colonnade.model.bert_spans import SpanBERT, SpanInputs, span_losses
from colonnade.tasks.scores import as_shares
from colonnade.tasks.task import Hidden, own_generator
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.upload import upload


@dataclass(frozen=True)
class SpanBatch:
    """The samples of one micro-batch."""

    tokens: Tensor
    """int64 [s, b]"""
    types: Tensor
    """int64 [s, b]: 0 in the question, 1 in the text."""
    real: Tensor
    """bool [s, b]: False on padding, which nothing attends to."""
    answers: Tensor
    """int64 [2, b]: the positions that each answer begins and ends with; 0: it is not in the window."""
    answer_mask: Tensor
    """float32 [b]: 1 where the sample counts."""
    samples: Tensor
    """int64 [b], on the CPU: each sample's position in the run; dropout depends on it."""

    def to(self, device: torch.device) -> SpanBatch:
        """The same batch on a device; `samples`, which only the program reads, stay where they are."""
        moved = [field.name for field in fields(self) if field.name != "samples"]
        return replace(self, **{name: upload(getattr(self, name), device) for name in moved})

    def uncounted(self) -> SpanBatch:
        """The same batch, of which no sample counts."""
        return replace(self, answer_mask=torch.zeros_like(self.answer_mask))


def as_span_batch(rows: SpanRows, samples: Sequence[int]) -> SpanBatch:
    """Samples [b, s] as sequences [s, b]; `samples` [b] name them."""
    sides = (rows.tokens, rows.types, rows.real, rows.answers)
    tokens, types, real, answers = (torch.from_numpy(np.ascontiguousarray(each.T)) for each in sides)
    numbers = torch.tensor(list(samples), dtype=torch.int64)
    return SpanBatch(tokens, types, real, answers, torch.ones(len(rows.tokens)), numbers)


@dataclass(frozen=True)
class FoundSpans:
    """What an evaluation found, the same on every rank."""

    loss: float
    """[nats per sample] Mean of beginning and end."""
    start_accuracy: float
    """Share of the samples whose likeliest beginning is right."""
    end_accuracy: float
    span_accuracy: float
    """Share of the samples of which both are."""
    samples: int

    def numbers(self) -> dict[str, float]:
        """For metrics."""
        return {
            "loss": self.loss,
            "start_accuracy": self.start_accuracy,
            "end_accuracy": self.end_accuracy,
            "span_accuracy": self.span_accuracy,
        }

    def summary(self) -> str:
        """One line for people."""
        return (
            f"loss {self.loss:.4f}, {self.span_accuracy:.2%} of {self.samples:,} windows right (beginning "
            f"{self.start_accuracy:.2%}, end {self.end_accuracy:.2%})"
        )


class Spans:
    """`Task` of a BERT with head spans."""

    def build(self, model: ModelConfig, vocab_size: int, parallel: Parallel, units: Sequence[str] | None) -> SpanBERT:
        return SpanBERT(model, vocab_size, parallel, units=units)

    def batch(self, samples: Samples, positions: Sequence[int]) -> SpanBatch:
        assert isinstance(samples, SpanRows), "samples with answers"
        return as_span_batch(samples, positions)

    def random_batch(self, model: ModelConfig, size: int, vocab_size: int, *, separate_documents: bool) -> SpanBatch:
        seq_length, draw = model.seq_length, own_generator()
        tokens = torch.randint(0, vocab_size, (seq_length, size), generator=draw)
        types = (torch.arange(seq_length)[:, None] > seq_length // 8).long().expand_as(tokens).contiguous()
        return SpanBatch(
            tokens=tokens,
            types=types,
            real=torch.ones_like(tokens).bool(),
            answers=(torch.arange(2 * size) % seq_length).view(2, size),
            answer_mask=torch.ones(size),
            samples=torch.arange(size),
        )

    def counts(self, batch: SpanBatch) -> Tensor:
        return batch.answer_mask.sum(dtype=torch.float64)[None]

    def inputs(self, batch: SpanBatch, weights: Tensor | None, seed: int | None) -> SpanInputs:
        return SpanInputs(
            batch.tokens,
            masks=None if seed is None else Masks(seed, batch.samples.numpy()),
            types=batch.types,
            real=batch.real,
            answers=batch.answers,
            answer_weights=None if weights is None else batch.answer_mask.double() * weights[0],
        )

    def evaluate(
        self,
        model: SpanBERT,
        batches: Iterable[SpanBatch],
        *,
        dp: Axis,
        pp: Axis,
        hidden: Hidden,
        byte_lengths: Tensor | None,
        tokenizer_checked: bool,
    ) -> FoundSpans:
        """Sums are float64; all-reduces 5 numbers over dp and over pp, at the end."""
        device = next(model.parameters()).device
        sums = torch.zeros(5, dtype=torch.float64, device=device)
        with torch.no_grad():
            for batch in batches:
                sums += self._sums(model, batch.to(device), hidden)
        loss, start, end, both, samples = all_reduce(all_reduce(sums, dp), pp).tolist()
        if samples == 0:
            raise DataError("the evaluation has no question. Give it a file of some.")
        return FoundSpans(loss / samples, start / samples, end / samples, both / samples, round(samples))

    def _sums(self, model: SpanBERT, batch: SpanBatch, hidden: Hidden) -> Tensor:
        """Over a batch: losses, right beginnings, ends and both, and samples: float64 [5]."""
        carry = hidden(self.inputs(batch, None, None))
        if carry is None:
            return batch.answer_mask.new_zeros(5, dtype=torch.float64)
        logits = model.head.predict(model.residual(carry))
        guessed, losses = logits.argmax(0).t() == batch.answers, span_losses(logits, batch.answers)  # [2, b], [b]
        right = as_shares(guessed, losses)
        found = (losses, right[0], right[1], right.prod(0), torch.ones_like(right[0]))
        return torch.stack([(each.double() * batch.answer_mask).sum() for each in found])
