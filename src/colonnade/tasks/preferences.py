"""Preference tuning: which of two answers to a prompt is preferred. The loss is the mean over the pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.config.preferences import PreferencesConfig
from colonnade.data.preference_dataset import PreferenceRows
from colonnade.data.rows import Samples
from colonnade.errors import DataError
from colonnade.kernels.dropout import Masks
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Axis
from colonnade.model.preferences import PreferenceGPT, PreferenceInputs, margins, pair_losses, sequence_log_probs
from colonnade.tasks.scores import as_shares
from colonnade.tasks.task import Hidden, own_generator
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.upload import upload


@dataclass(frozen=True)
class PreferenceBatch:
    """The pairs of one micro-batch: b of them, whose sequences are 2b columns, the preferred one first."""

    tokens: Tensor
    """int64 [s, 2b]."""
    labels: Tensor
    """int64 [s, 2b]: the token after each."""
    loss_mask: Tensor
    """float32 [s, 2b]: 1 where the label is a part of the answer."""
    reference: Tensor
    """float64 [b, 2]: log-probabilities of the reference."""
    options: Tensor
    """float64 [b, 3]: beta, label smoothing, 1 for IPO."""
    pair_mask: Tensor
    """float32 [b]: 1 where the pair counts."""
    samples: Tensor
    """int64 [b], on the CPU: each pair's position in the run; dropout depends on it."""

    def to(self, device: torch.device) -> PreferenceBatch:
        """The same batch on a device; `samples`, which only the program reads, stay where they are."""
        moved = [field.name for field in fields(self) if field.name != "samples"]
        return replace(self, **{name: upload(getattr(self, name), device) for name in moved})

    def uncounted(self) -> PreferenceBatch:
        """The same batch, of which no pair counts."""
        return replace(self, pair_mask=torch.zeros_like(self.pair_mask))

    @property
    def columns(self) -> Tensor:
        """int64 [2b]: a number of its own for each sequence of the run."""
        return (self.samples[:, None] * 2 + torch.arange(2)).reshape(-1)


def as_preference_batch(rows: PreferenceRows, samples: Sequence[int]) -> PreferenceBatch:
    """Samples [b, 2, s] as sequences [s, 2b]; `samples` [b] name them."""
    tokens, labels, counted = (
        torch.from_numpy(np.ascontiguousarray(each.reshape(-1, each.shape[-1]).T))
        for each in (rows.tokens, rows.labels, rows.counted.astype(np.float32))
    )
    reference, options = torch.from_numpy(rows.reference), torch.from_numpy(rows.options)
    numbers = torch.tensor(list(samples), dtype=torch.int64)
    return PreferenceBatch(tokens, labels, counted, reference, options, torch.ones(len(numbers)), numbers)


@dataclass(frozen=True)
class Preferred:
    """What an evaluation found, the same on every rank."""

    loss: float
    """[nats a pair]"""
    reward_accuracy: float
    """Share of the pairs whose preferred answer has gained more over the reference."""
    reward_margin: float
    """Mean of beta times what it has gained more."""
    chosen_reward: float
    rejected_reward: float
    """Means of beta times what either has gained."""
    pairs: int

    def numbers(self) -> dict[str, float]:
        """For metrics."""
        names = ("loss", "reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward")
        return {name: getattr(self, name) for name in names}

    def summary(self) -> str:
        """One line for people."""
        return (
            f"loss {self.loss:.4f}: the preferred answer has gained more in {self.reward_accuracy:.2%} of "
            f"{self.pairs:,} pairs, by {self.reward_margin:.4f} on average"
        )


class Preferences:
    """`Task` of a GPT with head preferences."""

    def build(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, units: Sequence[str] | None
    ) -> PreferenceGPT:
        return PreferenceGPT(model, vocab_size, parallel, units=units)

    def batch(self, samples: Samples, positions: Sequence[int]) -> PreferenceBatch:
        assert isinstance(samples, PreferenceRows), "pairs of answers"
        return as_preference_batch(samples, positions)

    def random_batch(
        self, model: ModelConfig, size: int, vocab_size: int, *, separate_documents: bool
    ) -> PreferenceBatch:
        tokens = torch.randint(0, vocab_size, (model.seq_length, 2 * size), generator=own_generator())
        options = torch.tensor([[PreferencesConfig().beta, 0.0, 0.0]], dtype=torch.float64).repeat(size, 1)
        reference = torch.zeros(size, 2, dtype=torch.float64)
        mask = torch.ones(tokens.shape)
        return PreferenceBatch(tokens, tokens, mask, reference, options, torch.ones(size), torch.arange(size))

    def counts(self, batch: PreferenceBatch) -> Tensor:
        return batch.pair_mask.sum(dtype=torch.float64)[None]

    def inputs(self, batch: PreferenceBatch, weights: Tensor | None, seed: int | None) -> PreferenceInputs:
        return PreferenceInputs(
            batch.tokens,
            batch.labels,
            masks=None if seed is None else Masks(seed, batch.columns.numpy()),
            counted=batch.loss_mask,
            reference=batch.reference,
            options=batch.options,
            pair_weights=None if weights is None else batch.pair_mask.double() * weights[0],
        )

    def evaluate(
        self,
        model: PreferenceGPT,
        batches: Iterable[PreferenceBatch],
        *,
        dp: Axis,
        pp: Axis,
        hidden: Hidden,
        byte_lengths: Tensor | None,
        tokenizer_checked: bool,
    ) -> Preferred:
        """Sums are float64; all-reduces 6 numbers over dp and over pp, at the end."""
        device = next(model.parameters()).device
        sums = torch.zeros(6, dtype=torch.float64, device=device)
        with torch.no_grad():
            for batch in batches:
                sums += self._sums(model, batch.to(device), hidden)
        loss, right, margin, chosen, rejected, pairs = all_reduce(all_reduce(sums, dp), pp).tolist()
        if pairs == 0:
            raise DataError("the evaluation has no pair of answers. Give it a file of some.")
        return Preferred(
            loss / pairs, right / pairs, margin / pairs, chosen / pairs, rejected / pairs, pairs=round(pairs)
        )

    def log_probs(self, model: PreferenceGPT, batch: PreferenceBatch, hidden: Hidden) -> tuple[Tensor, Tensor] | None:
        """Log-probability and length of each answer, float64 [b, 2], without dropout; None on stages without the
        head.
        """
        inputs = self.inputs(batch, None, None)
        carry = hidden(inputs)
        return (
            None if carry is None else sequence_log_probs(model.head, model.head.normed(model.residual(carry)), inputs)
        )

    def _sums(self, model: PreferenceGPT, batch: PreferenceBatch, hidden: Hidden) -> Tensor:
        """Over a batch: losses, right pairs, margins, rewards of both and the number of pairs: float64 [6]."""
        found = self.log_probs(model, batch, hidden)
        if found is None:
            return batch.pair_mask.new_zeros(6, dtype=torch.float64)
        gains = margins(*found, batch.reference, batch.options)
        rewards = gains * batch.options[:, :1]
        margin = rewards[:, 0] - rewards[:, 1]
        ones = torch.ones_like(margin)
        columns = (pair_losses(gains, batch.options), as_shares(margin > 0, margin), margin, *rewards.unbind(1), ones)
        return (torch.stack(columns) * batch.pair_mask.double()).sum(1)
