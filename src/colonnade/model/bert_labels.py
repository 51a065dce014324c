"""A BERT that tells labels: the pooler and a linear layer on the first position of each sequence.

    [s, b, h] ──norm of pre-norm models──▶ first token ─▶ pooler, tanh, dropout ─▶ classifier
        classification   [b, num_labels] logits, or [b, 1] scores     cross entropy, or squared error
        choice           [b·n, 1] logits of n texts each: [b, n]      cross entropy over the n
        none             no classifier: what comes before is of use for itself, and nothing is trained

The shapes are those of Hugging Face's `BertForSequenceClassification` and `BertForMultipleChoice`, dropout of the
pooled vector included (model.dropout).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.architecture.bert import label_outputs
from colonnade.config.model import ModelConfig
from colonnade.kernels.dropout import Masks, dropout_of_columns
from colonnade.mesh.collectives import reduce_from
from colonnade.model.bert import BertInputs
from colonnade.model.inputs import Inputs
from colonnade.model.norm import norm_of
from colonnade.model.stack import Stack
from colonnade.randomness import Purpose
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding
from colonnade.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from colonnade.tensor_parallel.parallel import Parallel


@dataclass(frozen=True)
class SoftLabels:
    """What a teacher says of a micro-batch's labels."""

    weights: Tensor
    """[b]: what each sample's KL counts in the result."""
    temperature: float
    logits: Tensor
    """[b, labels]"""


@dataclass(frozen=True)
class LabelInputs(BertInputs):
    """What units read besides the residual stream, of b samples in c·b columns: those of a sample side by side."""

    targets: Tensor | None = None
    """float64 [b]: each sample's label, or its score."""
    target_weights: Tensor | None = None
    """[b]: what each sample's loss counts in the result."""
    soft_labels: SoftLabels | None = None
    """What a teacher says of every sample."""


class LabelHead(nn.Module):
    """What is made of the last block's stream."""

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        h = model.hidden_size
        self.parallel, self.drop, self.sequences = parallel, model.dropout, model.sequences
        self.norm = norm_of(model, parallel.products) if model.norm_position == "pre" else None
        self.pooler = ColumnParallelLinear(h, h, parallel, bias=model.bias)
        outputs = label_outputs(model)
        self.classifier = RowParallelLinear(h, outputs, parallel, bias=model.bias) if outputs else None

    def forward(self, x: Tensor, inputs: LabelInputs) -> Tensor:
        """[s, c·b, h] (sequence parallel: [s/tp, c·b, h]) -> the weighted sum of the losses, []"""
        assert inputs.targets is not None and inputs.target_weights is not None, "the head reads labels and weights"
        logits = self.logits(x, inputs.masks)
        losses = label_losses(logits, inputs.targets)
        weighed = losses * inputs.target_weights.to(losses.dtype)
        if inputs.soft_labels is not None:
            weights = inputs.soft_labels.weights.to(losses.dtype)
            weighed = weighed + label_divergences(logits, inputs.soft_labels) * weights
        first_rank = self.parallel.first_position(len(x)) == 0
        loss = (weighed if first_rank else weighed * 0.0).sum()
        return reduce_from(loss, self.parallel.tp) if self.parallel.sequence_parallel else loss

    def logits(self, x: Tensor, masks: Masks | None) -> Tensor:
        """[s, c·b, h] -> [b, labels] of the first position. Sequence parallel: of the first that this rank has."""
        assert self.classifier is not None, "no command asks an encoder without a head for labels"
        x = x[:1]
        x = x.to(self.pooler.weight.dtype) if self.norm is None else self.norm(x)
        pooled = torch.tanh(self.pooler(x))  # sequence parallel: [tp, c·b, h/tp], the first position of each rank
        width, rank = pooled.shape[-1], self.parallel.tp.rank
        columns = range(rank * width, (rank + 1) * width)
        pooled = dropout_of_columns(pooled, columns, self.drop, masks, Purpose.POOLED_DROPOUT, 0)
        logits: Tensor = self.classifier(pooled)[0]  # [c·b, outputs]
        return logits.view(-1, self.sequences) if self.sequences > 1 else logits

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Whole stream [s, c·b, h] -> [b, labels] on every rank."""
        return self.logits(x, None)  # every rank has the first position


def label_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """[b, labels], [b] -> [b], in fp32 (fp64 for fp64): cross entropy, or of one output the squared error."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if wide.shape[1] == 1:
        return (wide[:, 0] - targets.to(wide.dtype)) ** 2
    return nn.functional.cross_entropy(wide, targets.long(), reduction="none")


def label_divergences(logits: Tensor, said: SoftLabels) -> Tensor:
    """KL(teacher ‖ student) of each sample's labels, both softened by the temperature: [b, labels] -> [b], in fp32
    (fp64 for fp64).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    mine, theirs = ((each.to(wide) / said.temperature).log_softmax(-1) for each in (logits, said.logits))
    return (theirs.exp() * (theirs - mine)).sum(-1)


class LabelBERT(Stack):
    """A model that reads a text from both sides, and tells its label."""

    head: LabelHead

    def __init__(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, *, units: Sequence[str] | None = None
    ) -> None:
        super().__init__(model, vocab_size, parallel, units=units, token_types=model.token_types)
        self.num_logits, self.is_choice = model.num_labels or 1, model.sequences > 1

    def make_head(self, model: ModelConfig, tied: VocabParallelEmbedding | None) -> LabelHead:
        return LabelHead(model, self.parallel)

    def losses(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        assert isinstance(inputs, LabelInputs), "samples have labels"
        return (self.head(x, inputs),)
