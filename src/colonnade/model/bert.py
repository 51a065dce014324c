"""BERT as in the Megatron-LM paper: both orders of LayerNorm and residual (figure 7), by `model.norm_position`.

    unit          buckets it multiplies with
    embedding     embedding.tokens, embedding (positions, token types, embedding norm)
    blocks.i      blocks.i
    head          head (final norm, masked-LM transform and bias, pooler, sentence order); embedding.tokens where tied

    [s, b, h] ──norm of pre-norm models──┬─▶ dense, GELU, norm ─▶ × token tableᵀ + bias ─▶ masked tokens
                                         └─▶ first token ─▶ pooler, tanh ─▶ 2 logits ─▶ which text came first

Source: Devlin et al., "BERT", 2019; the heads' shapes are those of Hugging Face's `BertForPreTraining`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from colonnade.architecture.statement import vocab_rows_per_rank
from colonnade.config.model import ModelConfig
from colonnade.kernels.gelu import gelu
from colonnade.kernels.mask import Pairs
from colonnade.mesh.collectives import reduce_from
from colonnade.model.inputs import Inputs
from colonnade.model.mlp import GELU
from colonnade.model.norm import norm_of
from colonnade.model.stack import Head, Stack
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding
from colonnade.tensor_parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from colonnade.tensor_parallel.parallel import Parallel


@dataclass(frozen=True)
class BertInputs(Inputs):
    """What units read besides the residual stream; None where no unit of this rank reads it."""

    real: Tensor | None = None
    """bool [s, b]: False on padding, which nothing attends to."""
    pair_labels: Tensor | None = None
    """int64 [b], 0 or 1: the head's."""
    pair_weights: Tensor | None = None
    """[b]: the head's. What each sample's second loss counts in the result."""

    @cached_property
    def pairs(self) -> Pairs:
        """Which tokens may see each other, for all layers."""
        return Pairs(self.documents, self.real)


class BertHead(Head):
    """What is made of the last block's stream: the masked tokens, and the order of the two texts."""

    sharded = {"bias": 0}

    def __init__(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, tied: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__(model, vocab_size, parallel, tied)
        h = model.hidden_size
        self.full_shapes = {"bias": (vocab_size,)}
        self.approximation = GELU.get(model.activation, "none")
        self.dense = ReplicatedLinear(h, h, parallel, bias=model.bias)
        self.dense_norm = norm_of(model, parallel.products)
        self.bias = nn.Parameter(torch.zeros(vocab_rows_per_rank(vocab_size, parallel.tp.size)))
        self.pooler = ColumnParallelLinear(h, h, parallel, bias=model.bias)
        self.order = RowParallelLinear(h, 2, parallel, bias=model.bias)

    def forward(self, x: Tensor, inputs: BertInputs) -> tuple[Tensor, Tensor]:
        """[s, b, h] (sequence parallel: [s/tp, b, h]) -> the weighted sums of both losses, [] each."""
        assert inputs.labels is not None and inputs.loss_weights is not None, "the head reads labels and weights"
        assert inputs.pair_labels is not None and inputs.pair_weights is not None, "and those of pairs"
        x = self.normed(x)  # what both losses read
        masked = self.loss_of(self.transformed(x), inputs.labels, inputs.loss_weights, self.bias, soft=inputs.soft)
        losses = _pair_losses(self.pair_logits(x), inputs.pair_labels)
        first_rank = self.parallel.first_position(len(x)) == 0
        weights = inputs.pair_weights if first_rank else torch.zeros_like(inputs.pair_weights)
        order = (losses * weights.to(losses.dtype)).sum()
        return masked, reduce_from(order, self.parallel.tp) if self.parallel.sequence_parallel else order

    def transformed(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]: what the output layer reads."""
        y: Tensor = self.dense_norm(gelu(self.dense(x), self.approximation, self.parallel.products))
        return y

    def read_by_output(self, x: Tensor) -> Tensor:
        return self.transformed(self.normed(x))

    @property
    def output_bias(self) -> Tensor:
        return self.bias

    def pair_logits(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [b, 2] of the first position. Sequence parallel: of the first position that this rank has."""
        pooled = torch.tanh(self.pooler(x[:1]))  # sequence parallel: [tp, b, h/tp], the first position of each rank
        logits: Tensor = self.order(pooled)
        return logits[0]

    @torch.no_grad()
    def guesses(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Whole stream [s, b, h], labels [s, b] -> each token's loss, and whether its label is likeliest: [s, b]"""
        return self.guesses_of(self.transformed(self.normed(x)), labels, self.bias)

    @torch.no_grad()
    def word_logits(self, x: Tensor) -> Tensor:
        """Whole stream at n positions, [n, b, h] of b = 1 -> logits [n, v] on every rank, in fp32 (fp64 for fp64)."""
        local = self.logits_of(self.transformed(self.normed(x)))[:, 0]
        return self.gathered((local + self.bias[: local.shape[1]].to(local.dtype)).t()).t().contiguous()

    @torch.no_grad()
    def tell_order(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Whole stream [s, b, h], labels [b] -> each sample's loss, and whether its label is likelier: [b]"""
        logits = self.pair_logits(self.normed(x))  # every rank has the first position
        return _pair_losses(logits, labels), logits.argmax(-1) == labels


def _pair_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """[b, 2], [b] -> [b], in fp32 (fp64 for fp64)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide, labels, reduction="none")


class BERT(Stack):
    """A model that reads a text from both sides."""

    head: BertHead

    def __init__(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, *, units: Sequence[str] | None = None
    ) -> None:
        super().__init__(model, vocab_size, parallel, units=units, token_types=model.token_types)

    def make_head(self, model: ModelConfig, tied: VocabParallelEmbedding | None) -> BertHead:
        return BertHead(model, self.vocab_size, self.parallel, tied)

    def losses(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        assert isinstance(inputs, BertInputs), "samples are pairs of texts"
        found: tuple[Tensor, ...] = self.head(x, inputs)
        return found
