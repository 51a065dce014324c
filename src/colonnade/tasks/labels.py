"""Fine-tuning: the label of a text or two, a score, or which of several texts is the answer.

The loss is the mean over the examples: cross entropy, or of scores the squared error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.data.example_dataset import LabelledRows
from colonnade.data.rows import Samples
from colonnade.errors import DataError
from colonnade.kernels.dropout import Masks
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Axis
from colonnade.model.bert_labels import LabelBERT, LabelInputs, label_losses
from colonnade.tasks.scores import scores_of
from colonnade.tasks.task import Hidden, own_generator
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.upload import upload


@dataclass(frozen=True)
class LabelBatch:
    """The samples of one micro-batch: b of them, of c sequences each, which stand side by side in c·b columns."""

    tokens: Tensor
    """int64 [s, c·b]"""
    types: Tensor
    """int64 [s, c·b]: 0 in the first text, 1 in the second."""
    real: Tensor
    """bool [s, c·b]: False on padding, which nothing attends to."""
    targets: Tensor
    """float64 [b]: labels or scores; NaN where there is none."""
    target_mask: Tensor
    """float32 [b]: 1 where the sample counts."""
    samples: Tensor
    """int64 [b], on the CPU: each sample's position in the run; dropout depends on it."""

    def to(self, device: torch.device) -> LabelBatch:
        """The same batch on a device; `samples`, which only the program reads, stay where they are."""
        moved = [field.name for field in fields(self) if field.name != "samples"]
        return replace(self, **{name: upload(getattr(self, name), device) for name in moved})

    def uncounted(self) -> LabelBatch:
        """The same batch, of which no sample counts."""
        return replace(self, target_mask=torch.zeros_like(self.target_mask))

    @property
    def columns(self) -> Tensor:
        """int64 [c·b]: a number of its own for each sequence of the run."""
        sequences = self.tokens.shape[1] // len(self.samples)
        return (self.samples[:, None] * sequences + torch.arange(sequences)).reshape(-1)


def as_label_batch(rows: LabelledRows, samples: Sequence[int]) -> LabelBatch:
    """Samples [b, c, s] as sequences [s, c·b]; `samples` [b] name them."""
    tokens, types, real = (
        torch.from_numpy(np.ascontiguousarray(each.reshape(-1, each.shape[-1]).T))
        for each in (rows.tokens, rows.types, rows.real)
    )
    targets = torch.from_numpy(rows.targets)
    numbers = torch.tensor(list(samples), dtype=torch.int64)
    return LabelBatch(tokens, types, real, targets, torch.ones(len(targets)), numbers)


@dataclass(frozen=True)
class Labelled:
    """What an evaluation found, the same on every rank."""

    loss: float
    """[nats per example], or the mean squared error of scores."""
    scores: dict[str, float]
    """Accuracy and what goes with it, by name; see `scores.py`."""
    examples: int

    def numbers(self) -> dict[str, float]:
        """For metrics."""
        return {"loss": self.loss, **self.scores}

    def summary(self) -> str:
        """One line for people."""
        shown = ", ".join(f"{name} {score:.4f}" for name, score in self.scores.items())
        return f"loss {self.loss:.4f}, {shown} of {self.examples:,} examples"


class Labels:
    """`Task` of a BERT with head classification or choice."""

    def build(self, model: ModelConfig, vocab_size: int, parallel: Parallel, units: Sequence[str] | None) -> LabelBERT:
        return LabelBERT(model, vocab_size, parallel, units=units)

    def batch(self, samples: Samples, positions: Sequence[int]) -> LabelBatch:
        assert isinstance(samples, LabelledRows), "samples with labels"
        return as_label_batch(samples, positions)

    def random_batch(self, model: ModelConfig, size: int, vocab_size: int, *, separate_documents: bool) -> LabelBatch:
        seq_length, labels, draw = model.seq_length, model.num_labels or 1, own_generator()
        tokens = torch.randint(0, vocab_size, (seq_length, size * model.sequences), generator=draw)
        types = (torch.arange(seq_length)[:, None] > seq_length // 2).long().expand_as(tokens).contiguous()
        return LabelBatch(
            tokens=tokens,
            types=types,
            real=torch.ones_like(tokens).bool(),
            targets=(torch.arange(size) % labels).double(),
            target_mask=torch.ones(size),
            samples=torch.arange(size),
        )

    def counts(self, batch: LabelBatch) -> Tensor:
        return batch.target_mask.sum(dtype=torch.float64)[None]

    def inputs(self, batch: LabelBatch, weights: Tensor | None, seed: int | None) -> LabelInputs:
        return LabelInputs(
            batch.tokens,
            masks=None if seed is None else Masks(seed, batch.columns.numpy()),
            types=batch.types,
            real=batch.real,
            targets=batch.targets,
            target_weights=None if weights is None else batch.target_mask.double() * weights[0],
        )

    def evaluate(
        self,
        model: LabelBERT,
        batches: Iterable[LabelBatch],
        *,
        dp: Axis,
        pp: Axis,
        hidden: Hidden,
        byte_lengths: Tensor | None,
        tokenizer_checked: bool,
    ) -> Labelled:
        """From the logits of every example, in their order: the same numbers on every layout that has the same
        logits.
        """
        logits, targets = self.logits(model, batches, dp=dp, pp=pp, hidden=hidden)
        if not len(logits):
            raise DataError("the evaluation has no example. Give it a file of some.")
        loss = float(label_losses(logits, targets).mean())
        scores = scores_of(logits.numpy(), targets.numpy(), binary=_is_binary(model))
        if math.isnan(loss):
            scores = dict.fromkeys(scores, math.nan)
        return Labelled(loss, scores, len(logits))

    def logits(
        self, model: LabelBERT, batches: Iterable[LabelBatch], *, dp: Axis, pp: Axis, hidden: Hidden
    ) -> tuple[Tensor, Tensor]:
        """Of n examples, which the batches of all dp ranks have between them and number from 0 on: their logits
        float64 [n, labels] and targets [n] (NaN: none), in order, on the CPU of every rank. All-reduces both over dp
        and pp.
        """
        found = list[tuple[Tensor, Tensor, Tensor | None]]()
        with torch.no_grad():
            for batch in batches:
                carry = hidden(self.inputs(batch.to(next(model.parameters()).device), None, None))
                counted = batch.target_mask > 0
                told = None if carry is None else model.head.predict(model.residual(carry)).double().cpu()[counted]
                found.append((batch.samples[counted], batch.targets[counted], told))
        most = max((int(numbers.max()) + 1 for numbers, _, _ in found if len(numbers)), default=0)
        device = next(model.parameters()).device
        size = int(all_reduce(all_reduce(torch.tensor(most, device=device), dp, "max"), pp, "max"))
        table = torch.zeros(size, model.num_logits + 1, dtype=torch.float64)
        for numbers, targets, told in found:
            if told is not None:
                table[numbers] = torch.cat([told, targets[:, None]], dim=1)
        table = all_reduce(all_reduce(table.to(device), dp), pp).cpu()
        return table[:, :-1], table[:, -1]


def _is_binary(model: LabelBERT) -> bool:
    """Whether the labels are a yes and a no, and not the first and the second of two texts."""
    return model.num_logits == 2 and not model.is_choice
