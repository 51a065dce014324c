"""A BERT that answers questions about a text by a run of its tokens: a linear layer on every position.

    [s, b, h] ──norm of pre-norm models──▶ linear ─▶ [s, b, 2]   how well the answer begins, and ends, at each position

The loss of a sample is the mean of two cross entropies over all of its positions, that of the beginning and that of the
end; [CLS], the first position, is both where nothing in the sample answers. Padding is among the positions, as in
Hugging Face's `BertForQuestionAnswering`, whose shapes these are.

Sequence parallel: the logits of all positions are gathered, two numbers a token, so that each softmax is computed as
by one rank. Every rank of tp has the same loss then; it counts on the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from colonnade.architecture.sites import FINAL_NORM
from colonnade.config.model import ModelConfig
from colonnade.kernels.mask import Pairs
from colonnade.mesh.collectives import gather_sequence, reduce_from
from colonnade.model.bert import BertInputs
from colonnade.model.inputs import Inputs
from colonnade.model.norm import norm_of
from colonnade.model.stack import Stack
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding
from colonnade.tensor_parallel.linear import ReplicatedLinear
from colonnade.tensor_parallel.parallel import Parallel


@dataclass(frozen=True)
class SpanInputs(BertInputs):
    """What units read besides the residual stream; the head alone reads what is its own here."""

    answers: Tensor | None = None
    """int64 [2, b]: the positions that each sample's answer begins and ends with."""
    answer_weights: Tensor | None = None
    """[b]: what each sample's loss counts in the result."""

    @cached_property
    def pairs(self) -> Pairs:
        """The logits of padding count here: it sees what is real alone, as theirs does."""
        return Pairs(self.documents, self.real, padding_sees_itself=False)


class SpanHead(nn.Module):
    """What is made of the last block's stream."""

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.norm = norm_of(model, parallel.products) if model.norm_position == "pre" else None
        self.spans = ReplicatedLinear(model.hidden_size, 2, parallel, bias=model.bias)

    def forward(self, x: Tensor, inputs: SpanInputs) -> Tensor:
        """[s, b, h] (sequence parallel: [s/tp, b, h]) -> the weighted sum of the losses, []. Sequence parallel:
        forward all-gathers [s/tp, b, 2] over tp, backward reduce-scatters [s, b, 2].
        """
        assert inputs.answers is not None and inputs.answer_weights is not None, "the head reads answers and weights"
        parallel = self.parallel
        cut = parallel.sequence_parallel
        logits = self.logits(x)
        losses = span_losses(gather_sequence(logits, parallel.tp) if cut else logits, inputs.answers)
        first_rank = parallel.first_position(len(x)) == 0
        weights = inputs.answer_weights if first_rank else torch.zeros_like(inputs.answer_weights)
        loss = (losses * weights.to(losses.dtype)).sum()
        return reduce_from(loss, parallel.tp) if cut else loss

    def logits(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, 2], of the positions that this rank has."""
        if self.norm is None:
            x = x.to(self.spans.weight.dtype)
        else:
            x = self.norm(x)
            self.parallel.probe.see(FINAL_NORM, x)
        found: Tensor = self.spans(x)
        return found

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Whole stream [s, b, h] -> [s, b, 2]"""
        return self.logits(x)


def span_losses(logits: Tensor, answers: Tensor) -> Tensor:
    """[s, b, 2], [2, b] -> [b], in fp32 (fp64 for fp64): the mean of the cross entropies of beginning and end."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).permute(1, 0, 2)  # [b, s, 2]
    return nn.functional.cross_entropy(wide, answers.t(), reduction="none").mean(1)


class SpanBERT(Stack):
    """A model that reads a question and a text, and tells which run of the text answers it."""

    head: SpanHead

    def __init__(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, *, units: Sequence[str] | None = None
    ) -> None:
        super().__init__(model, vocab_size, parallel, units=units, token_types=model.token_types)

    def make_head(self, model: ModelConfig, tied: VocabParallelEmbedding | None) -> SpanHead:
        return SpanHead(model, self.parallel)

    def losses(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        assert isinstance(inputs, SpanInputs), "samples have answers"
        return (self.head(x, inputs),)
