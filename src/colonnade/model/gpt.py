"""GPT-2 as in the Megatron-LM paper, and its relatives: BLOOM (ALiBi, embedding norm), YaLM (fp32 residual stream).

unit          buckets it multiplies with
embedding     embedding.tokens, embedding (positions, embedding norm)
blocks.i      blocks.i
head          head (norm, untied output layer); embedding.tokens where tied
"""

from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.model.attention import KeyValueCache
from colonnade.model.inputs import Inputs
from colonnade.model.stack import Head, Stack
from colonnade.model.transformer import Block
from colonnade.tensor_parallel.cross_entropy import token_losses
from colonnade.tensor_parallel.distillation import SoftTargets
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding


class GPTHead(Head):
    """The loss of the next token."""

    def forward(self, x: Tensor, labels: Tensor, loss_weights: Tensor, soft: SoftTargets | None = None) -> Tensor:
        """[s, b, h] (sequence parallel: [s/tp, b, h]), labels [s, b] -> Σ loss_weights · token loss, []. `soft`: what a
        teacher says, whose divergence is added.
        """
        return self.loss_of(self.normed(x), labels, loss_weights, soft=soft)

    def token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Whole stream [s, b, h], labels [s, b] -> each token's loss [s, b]"""
        parallel = self.parallel
        return token_losses(
            self.normed(x),
            self.output.weight,
            labels,
            tp=parallel.tp,
            vocab_size=self.vocab_size,
            products=parallel.products,
        )

    def logits(self, x: Tensor) -> Tensor:
        """Whole stream [s, b, h] -> this rank's real rows of the logits, [s, b, ≤ v/tp] in fp32 (generation gathers one
        position's).
        """
        return self.logits_of(self.normed(x))


class GPT(Stack):
    """A left-to-right language model."""

    head: GPTHead

    def make_head(self, model: ModelConfig, tied: VocabParallelEmbedding | None) -> GPTHead:
        return GPTHead(model, self.vocab_size, self.parallel, tied)

    def losses(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        assert inputs.labels is not None and inputs.loss_weights is not None, "the head reads labels and weights"
        return (self.head(x, inputs.labels, inputs.loss_weights, inputs.soft),)

    def empty_caches(self, capacity: int) -> dict[str, KeyValueCache]:
        """A cache for each block of this rank, of 2 · capacity · h/tp numbers: for one text of `capacity` tokens."""
        blocks = ((name, unit) for name, unit in self.units().items() if isinstance(unit, Block))
        return {name: block.attention.empty_cache(capacity) for name, block in blocks}
