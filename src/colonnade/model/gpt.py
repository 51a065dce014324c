"""GPT-2 as in the Megatron-LM paper: learned positions, pre-LayerNorm blocks, a final LayerNorm, tied embeddings.

The model is an ordered list of *units*: an embedding, the blocks, a head. Whatever decides ownership (data
parallelism, and the cuts of a pipeline) works on units and never looks inside.
"""

import torch
from torch import Tensor, nn

from colonnade.config.schema import ModelConfig
from colonnade.mesh.mesh import Axis
from colonnade.mesh.randomness import Purpose
from colonnade.model.attention import KeyValueCache
from colonnade.model.dropout import Masks, dropout
from colonnade.model.transformer import Block
from colonnade.tensor_parallel.cross_entropy import local_logits, output_loss, token_losses
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding


class Positions(nn.Module):
    """A learned vector for each position: [seq_length, h]."""

    def __init__(self, seq_length: int, hidden_size: int, *, init_std: float) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(seq_length, hidden_size))

    def forward(self, first: int, count: int) -> Tensor:
        """Vectors of `count` positions from `first`: [s, h]."""
        return self.weight[first : first + count]


class Embedding(nn.Module):
    """Tokens and positions into the residual stream."""

    def __init__(self, model: ModelConfig, vocab_size: int, tp: Axis) -> None:
        super().__init__()
        self.drop = model.dropout
        self.tokens = VocabParallelEmbedding(vocab_size, model.hidden_size, tp, init_std=model.init_std)
        self.positions = Positions(model.seq_length, model.hidden_size, init_std=model.init_std)

    def forward(self, tokens: Tensor, masks: Masks | None = None, first_position: int = 0) -> Tensor:
        """int64 [s, b] -> [s, b, h]"""
        x = self.tokens(tokens) + self.positions(first_position, tokens.shape[0])[:, None]
        return dropout(x, self.drop, masks, Purpose.EMBEDDING_DROPOUT)


class Head(nn.Module):
    """The final LayerNorm and the output layer, whose weight is the token embedding's when tied."""

    def __init__(self, model: ModelConfig, vocab_size: int, tp: Axis, tied: VocabParallelEmbedding | None) -> None:
        super().__init__()
        self.tp, self.vocab_size = tp, vocab_size
        self.norm = nn.LayerNorm(model.hidden_size, eps=model.norm_epsilon)
        self.output = tied or VocabParallelEmbedding(vocab_size, model.hidden_size, tp, init_std=model.init_std)

    def forward(self, x: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
        """[s, b, h], labels [s, b] -> Σ loss_weights · token loss, []"""
        return output_loss(
            self.norm(x), self.output.weight, labels, loss_weights, tp=self.tp, vocab_size=self.vocab_size
        )

    def token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """[s, b, h], labels [s, b] -> each token's loss [s, b]"""
        return token_losses(self.norm(x), self.output.weight, labels, tp=self.tp, vocab_size=self.vocab_size)

    def logits(self, x: Tensor) -> Tensor:
        """[s, b, h] -> this rank's real rows of the logits, [s, b, ≤ v/tp] in fp32 (generation gathers one
        position's).
        """
        return local_logits(self.norm(x), self.output.weight, tp=self.tp, vocab_size=self.vocab_size)


class GPT(nn.Module):
    """Embedding, blocks, head. The token table is cut over tp; so is every block."""

    def __init__(self, model: ModelConfig, vocab_size: int, tp: Axis) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding = Embedding(model, vocab_size, tp)
        self.blocks = nn.ModuleList(Block(model, layer, tp) for layer in range(model.num_layers))
        self.head = Head(model, vocab_size, tp, self.embedding.tokens if model.tie_embeddings else None)

    def units(self) -> dict[str, nn.Module]:
        """The model's parts in the order of a forward pass, by the names that their weights start with."""
        blocks = {f"blocks.{layer}": block for layer, block in enumerate(self.blocks)}
        return {"embedding": self.embedding, **blocks, "head": self.head}

    def hidden(
        self,
        tokens: Tensor,
        masks: Masks | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> Tensor:
        """The residual stream after the last block: int64 [s, b] -> [s, b, h].

        With caches: positions after those cached.
        """
        first = caches[0].length if caches else 0
        x: Tensor = self.embedding(tokens, masks, first)
        for layer, block in enumerate(self.blocks):
            x = block(x, masks, caches[layer] if caches else None)
        return x

    def forward(self, tokens: Tensor, labels: Tensor, loss_weights: Tensor, masks: Masks | None = None) -> Tensor:
        """tokens, labels, loss_weights [s, b] -> Σ loss_weights · cross entropy, []"""
        loss: Tensor = self.head(self.hidden(tokens, masks), labels, loss_weights)
        return loss
