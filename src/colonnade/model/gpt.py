"""GPT-2 as in the Megatron-LM paper, and its relatives: BLOOM (ALiBi, embedding norm), YaLM (fp32 residual stream).

unit          buckets it multiplies with
embedding     embedding.tokens, embedding (positions, embedding norm)
blocks.i      blocks.i
head          head (norm, untied output layer); embedding.tokens where tied
"""

from torch import Tensor

from colonnade.config.schema import ModelConfig
from colonnade.kernels.dropout import Masks, dropout
from colonnade.model.attention import KeyValueCache
from colonnade.model.inputs import Inputs
from colonnade.model.norm import norm_of
from colonnade.model.position import Positions
from colonnade.model.stack import FirstUnit, LastUnit, Stack
from colonnade.model.transformer import Block, residual_dtype
from colonnade.randomness import Purpose
from colonnade.tensor_parallel.cross_entropy import local_logits, output_loss, token_losses
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding
from colonnade.tensor_parallel.parallel import Parallel


class Embedding(FirstUnit):
    """Tokens, and learned positions where the model has them, into the residual stream."""

    def __init__(self, model: ModelConfig, vocab_size: int, parallel: Parallel) -> None:
        super().__init__()
        self.drop, self.parallel, self.fp32_residual = model.dropout, parallel, model.fp32_residual
        h = model.hidden_size
        self.tokens = VocabParallelEmbedding(vocab_size, h, parallel)
        self.positions = Positions(model.seq_length, h) if model.position == "learned" else None
        self.norm = norm_of(model) if model.embedding_norm else None

    def forward(
        self, tokens: Tensor, masks: Masks | None = None, first_position: int = 0, positions: Tensor | None = None
    ) -> Tensor:
        """int64 [s, b] -> [s, b, h], or [s/tp, b, h] under sequence parallelism. `positions` [s, b] None: those that
        begin with `first_position`.
        """
        x = self.tokens(tokens)
        x = x.to(residual_dtype(x.dtype, self.fp32_residual))
        first = self.parallel.first_position(len(x))
        if self.positions is not None:
            x = self.positions(x, first_position + first if positions is None else positions[first : first + len(x)])
        if self.norm is not None:
            x = self.norm(x, x.dtype)
        return dropout(x, self.drop, masks, Purpose.EMBEDDING_DROPOUT, first=first)


class Head(LastUnit):
    """The final norm (of pre-norm models) and the output layer, whose weight is the token table when tied.

    Post-norm models end with their last block's own norm, and have none here, as GPT-1 and BERT.
    """

    def __init__(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, tied: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__()
        self.parallel, self.vocab_size = parallel, vocab_size
        pre = model.norm_position == "pre"
        self.norm = norm_of(model) if pre else None
        self.output = tied or VocabParallelEmbedding(vocab_size, model.hidden_size, parallel)

    def forward(self, x: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
        """[s, b, h] (sequence parallel: [s/tp, b, h]), labels [s, b] -> Σ loss_weights · token loss, []"""
        return output_loss(
            self.normed(x),
            self.output.weight,
            labels,
            loss_weights,
            tp=self.parallel.tp,
            vocab_size=self.vocab_size,
            sequence_parallel=self.parallel.sequence_parallel,
        )

    def token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Whole stream [s, b, h], labels [s, b] -> each token's loss [s, b]"""
        return token_losses(self.normed(x), self.output.weight, labels, tp=self.parallel.tp, vocab_size=self.vocab_size)

    def logits(self, x: Tensor) -> Tensor:
        """Whole stream [s, b, h] -> this rank's real rows of the logits, [s, b, ≤ v/tp] in fp32 (generation gathers one
        position's).
        """
        return local_logits(self.normed(x), self.output.weight, tp=self.parallel.tp, vocab_size=self.vocab_size)

    def normed(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h] in the output layer's type: what it multiplies with."""
        return x.to(self.output.weight.dtype) if self.norm is None else self.norm(x)


class GPT(Stack):
    """A left-to-right language model."""

    embedding: Embedding
    head: Head

    def make_embedding(self, model: ModelConfig) -> Embedding:
        return Embedding(model, self.vocab_size, self.parallel)

    def make_head(self, model: ModelConfig, tied: VocabParallelEmbedding | None) -> Head:
        return Head(model, self.vocab_size, self.parallel, tied)

    def embed(self, inputs: Inputs) -> Tensor:
        assert inputs.tokens is not None, "the embedding reads tokens"
        x: Tensor = self.embedding(inputs.tokens, inputs.masks, inputs.first_position, inputs.positions)
        return x

    def losses(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        assert inputs.labels is not None and inputs.loss_weights is not None, "the head reads labels and weights"
        return (self.head(x, inputs.labels, inputs.loss_weights),)

    def empty_caches(self, capacity: int) -> dict[str, KeyValueCache]:
        """A cache for each block of this rank, of 2 · capacity · h/tp numbers: for one text of `capacity` tokens."""
        blocks = ((name, unit) for name, unit in self.units().items() if isinstance(unit, Block))
        return {name: block.attention.empty_cache(capacity) for name, block in blocks}
