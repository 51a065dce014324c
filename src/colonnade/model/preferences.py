"""The loss of pairs of answers: DPO, and IPO.

    z = beta · ((log p(chosen) − log q(chosen)) − (log p(rejected) − log q(rejected)))          q: the reference
    DPO   −(1 − e) log sigmoid(z) − e log sigmoid(−z)          Rafailov et al., 2023; e: label smoothing
    IPO   (z / beta − 1 / (2 beta))², log-probabilities a token       Azar et al., 2023; as in TRL

What a token's loss weighs follows from the sums over its whole sequence. So the output layer runs twice: once for the
log-probabilities, without gradients; then, with the weights that follow from them, as in every other loss, with its
gradients computed in forward. The logits are never whole, and nothing but two numbers a token crosses tp ranks more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.config.model import ModelConfig
from colonnade.model.gpt import GPT, GPTHead
from colonnade.model.inputs import Inputs
from colonnade.model.stack import Head
from colonnade.tensor_parallel.cross_entropy import token_losses
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding


@dataclass(frozen=True)
class PreferenceInputs(Inputs):
    """Of b pairs, whose sequences are 2b columns side by side, the preferred one first."""

    counted: Tensor | None = None
    """[s, 2b]: 1 where the label is a part of the answer."""
    reference: Tensor | None = None
    """float64 [b, 2]: log-probabilities of the reference."""
    options: Tensor | None = None
    """float64 [b, 3]: beta, label smoothing, 1 for IPO."""
    pair_weights: Tensor | None = None
    """float64 [b]: what each pair's loss counts in the result."""


def margins(log_probs: Tensor, lengths: Tensor, reference: Tensor, options: Tensor) -> Tensor:
    """log p − log q of both answers, float64 [b, 2]; of IPO a token. All [b, 2], options [b, 3]."""
    gains = log_probs - reference
    return torch.where(options[:, 2:] > 0, gains / lengths.clamp(min=1.0), gains)


def pair_losses(gains: Tensor, options: Tensor) -> Tensor:
    """Each pair's loss [b], given what `margins` says [b, 2]."""
    beta, smoothing, ipo = options.unbind(1)
    margin = gains[:, 0] - gains[:, 1]
    z = beta * margin
    sigmoid = -(1 - smoothing) * nn.functional.logsigmoid(z) - smoothing * nn.functional.logsigmoid(-z)
    return torch.where(ipo > 0, (margin - 0.5 / beta) ** 2, sigmoid)


def sequence_log_probs(head: Head, whole: Tensor, inputs: PreferenceInputs) -> tuple[Tensor, Tensor]:
    """Log-probability and length of each answer, float64 [b, 2], given what the output layer reads, whole [s, 2b, h];
    no gradient. Sends 2 numbers a token.
    """
    assert inputs.labels is not None and inputs.counted is not None, "the head reads labels"
    parallel = head.parallel
    losses = token_losses(
        whole, head.output.weight, inputs.labels, tp=parallel.tp, vocab_size=head.vocab_size, products=parallel.products
    )
    counted = inputs.counted.double()
    return -(losses.double() * counted).sum(0).view(-1, 2), counted.sum(0).view(-1, 2)


class PreferenceHead(GPTHead):
    """The loss of pairs, of the same weights as a language model's."""

    def preference_loss(self, x: Tensor, inputs: PreferenceInputs) -> Tensor:
        """[s, 2b, h] (sequence parallel: [s/tp, 2b, h]) -> Σ pair_weights · pair loss, []"""
        assert inputs.labels is not None and inputs.reference is not None, "the head reads labels and the reference"
        assert inputs.options is not None and inputs.pair_weights is not None, "and options and weights"
        assert inputs.counted is not None, "and what is answered"
        y = self.normed(x)
        log_probs, lengths = sequence_log_probs(self, self.parallel.gather(y.detach()), inputs)
        with torch.enable_grad():
            start = log_probs.requires_grad_()
            losses = pair_losses(margins(start, lengths, inputs.reference, inputs.options), inputs.options)
            value = (losses * inputs.pair_weights).sum()
            (slopes,) = torch.autograd.grad(value, start)
        weights = -slopes.reshape(1, -1) * inputs.counted
        linear = self.loss_of(y, inputs.labels, weights)  # its gradients are those of the loss, its value is not
        return linear + (value.detach() - linear.detach().double()).to(linear.dtype)


class PreferenceGPT(GPT):
    """A language model that learns from pairs of answers."""

    head: PreferenceHead

    def make_head(self, model: ModelConfig, tied: VocabParallelEmbedding | None) -> PreferenceHead:
        return PreferenceHead(model, self.vocab_size, self.parallel, tied)

    def losses(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        assert isinstance(inputs, PreferenceInputs), "pairs of answers"
        return (self.head.preference_loss(x, inputs),)
