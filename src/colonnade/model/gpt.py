"""GPT-2 as in the Megatron-LM paper, and its relatives: BLOOM (ALiBi, embedding norm), YaLM (fp32 residual stream).

The model is an ordered list of *units*: an embedding, the blocks, a head. A pipeline cuts between units, and a rank
builds only its own. What ownership (data parallelism) works on are *parts*: a unit is a part, except that the token
table is one of its own, because a tied head needs it too.

    unit          parts it multiplies with
    embedding     embedding.tokens, embedding (positions, embedding norm)
    blocks.i      blocks.i
    head          head (norm, untied output layer); embedding.tokens where tied

A weight's logical name is its part's name and its name in there. It says nothing of ranks: a last stage with tied
embeddings has a token table of its own, under the same name and with the same initial numbers as the first stage's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from colonnade.architecture.families import architecture_of
from colonnade.architecture.gpt import TABLE
from colonnade.config.schema import ModelConfig
from colonnade.model.attention import KeyValueCache
from colonnade.model.dropout import Masks, dropout
from colonnade.model.mask import Pairs
from colonnade.model.norm import norm_of
from colonnade.model.position import Positions
from colonnade.model.transformer import Block, residual_dtype
from colonnade.randomness import Purpose
from colonnade.tensor_parallel.cross_entropy import local_logits, output_loss, token_losses
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding
from colonnade.tensor_parallel.parallel import Parallel


@dataclass(frozen=True)
class Inputs:
    """What units read besides the residual stream, of one micro-batch; None where no unit of this rank reads it."""

    tokens: Tensor | None = None
    """int64 [s, b]: the embedding's."""
    labels: Tensor | None = None
    """int64 [s, b]: the head's."""
    loss_weights: Tensor | None = None
    """[s, b]: the head's. What each token's loss counts in the result."""
    masks: Masks | None = None
    """Dropout of embedding and blocks. None: nothing is dropped."""
    documents: Tensor | None = None
    """int64 [s, b]: the document of each token, any numbers. Tokens of different ones do not see each other. None: a
    sample is one document."""
    positions: Tensor | None = None
    """int64 [s, b]: the place of each token in its document. None: 0 … s - 1, or from `first_position` on."""
    caches: Mapping[str, KeyValueCache] | None = None
    """Each block's keys and values of the positions before these tokens: generation's."""
    first_position: int = 0
    """Of these tokens, in their text."""

    @cached_property
    def pairs(self) -> Pairs:
        """Which tokens may see each other, for all layers."""
        return Pairs(self.documents)


class Embedding(nn.Module):
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


class Head(nn.Module):
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


class GPT(nn.Module):
    """Embedding, blocks, head, or those of them that a rank has. The token table is cut over tp; so is every block.

    Under sequence parallelism the gradients of weights whose `Placement.dim` is None are partial sums over tp. `units`:
    None, or the names of those to build, in the order of the model.
    """

    embedding: Embedding
    head: Head

    def __init__(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, *, units: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.vocab_size, self.parallel = vocab_size, parallel
        self.tied, self.fp32_residual = model.tie_embeddings, model.fp32_residual
        self.hidden_size, self.seq_length = model.hidden_size, model.seq_length
        self.longest = model.seq_length if model.position == "learned" else None
        self.architecture = architecture_of(model, vocab_size)
        chosen = self.architecture.unit_names if units is None else units
        if "embedding" in chosen:
            self.embedding = Embedding(model, vocab_size, parallel)
        self.blocks = nn.ModuleDict()
        for layer in [int(name.removeprefix("blocks.")) for name in chosen if name.startswith("blocks.")]:
            self.blocks[str(layer)] = Block(model, layer, parallel)
        if "head" in chosen:
            tied = self.embedding.tokens if self.tied and "embedding" in chosen else None
            self.head = Head(model, vocab_size, parallel, tied)

    def units(self) -> dict[str, nn.Module]:
        """This rank's units in the order of a forward pass."""
        blocks = {f"blocks.{layer}": block for layer, block in self.blocks.items()}
        every = {"embedding": getattr(self, "embedding", None), **blocks, "head": getattr(self, "head", None)}
        return {name: unit for name, unit in every.items() if unit is not None}

    def run(self, unit: str, carry: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """One unit: the residual stream, (x,), into the next one's; the embedding reads none, (); the head -> the loss,
        ([],).
        """
        if unit == "embedding":
            assert inputs.tokens is not None, "the embedding reads tokens"
            return (self.embedding(inputs.tokens, inputs.masks, inputs.first_position, inputs.positions),)
        (x,) = carry
        if unit == "head":
            assert inputs.labels is not None and inputs.loss_weights is not None, "the head reads labels and weights"
            return (self.head(x, inputs.labels, inputs.loss_weights),)
        assert inputs.caches is None or inputs.documents is None, "a text that goes on from a cache is one document"
        cache = None if inputs.caches is None else inputs.caches[unit]
        block = self.blocks[unit.removeprefix("blocks.")]
        return (block(x, inputs.masks, cache, pairs=inputs.pairs.tensor(), positions=inputs.positions),)

    def carry_buffers(self, inputs: Inputs, into: str) -> tuple[Tensor, ...]:
        """Memory for what a unit takes: the residual stream of a micro-batch, [s, b, h] or [s/tp, b, h]; the first unit
        takes nothing.
        """
        if into == self.architecture.units[0].name:
            return ()
        assert inputs.tokens is not None, "every stage is told the tokens"
        s, b = inputs.tokens.shape
        rows = s // self.parallel.tp.size if self.parallel.sequence_parallel else s
        weight = next(self.parameters())
        dtype = residual_dtype(weight.dtype, self.fp32_residual)
        return (torch.empty(rows, b, self.hidden_size, dtype=dtype, device=weight.device),)

    def residual(self, carry: tuple[Tensor, ...]) -> Tensor:
        """The whole residual stream on every tp rank, without gradient: (x,) between two units -> [s, b, h]."""
        (x,) = carry
        return self.parallel.gather(x)

    def empty_caches(self, capacity: int) -> dict[str, KeyValueCache]:
        """A cache for each block of this rank, of 2 · capacity · h/tp numbers: for one text of `capacity` tokens."""
        blocks = ((name, unit) for name, unit in self.units().items() if isinstance(unit, Block))
        return {name: block.attention.empty_cache(capacity) for name, block in blocks}

    def parts(self) -> dict[str, nn.Module]:
        """What this rank's weights belong to, in the order of a forward pass, by the names that weights start with.

        A weight belongs to the first part that has it. Parts without weights of their own are left out.
        """
        units = self.units()
        table = self._table_module()
        found = ({} if table is None else {TABLE: table}) | units
        return {name: module for name, module in found.items() if name == TABLE or _has_own(module, table)}

    def needs(self, unit: str) -> list[str]:
        """The parts whose weights `unit` multiplies with."""
        return list(self.architecture.named([unit])[0].buckets)

    def hidden(
        self,
        tokens: Tensor,
        masks: Masks | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> Tensor:
        """The whole residual stream after the last block: int64 [s, b] -> [s, b, h]. Needs all units.

        With caches: positions after those cached. Under sequence parallelism: any s, no gradients, no caches (a model
        that writes text is built without).
        """
        assert not (caches and self.parallel.sequence_parallel), (
            "a stream that is cut along the sequence cannot go on from a cache"
        )
        first = caches[0].length if caches else 0
        x: Tensor = self.embedding(self.parallel.pad(tokens), masks, first)
        for i, block in enumerate(self.blocks.values()):
            x = block(x, masks, caches[i] if caches else None)
        return self.parallel.gather(x)[: len(tokens)]

    def forward(self, tokens: Tensor, labels: Tensor, loss_weights: Tensor, masks: Masks | None = None) -> Tensor:
        """tokens, labels, loss_weights [s, b] -> Σ loss_weights · cross entropy, []. Needs all units."""
        inputs = Inputs(tokens, labels, loss_weights, masks)
        carry: tuple[Tensor, ...] = ()
        for unit in self.units():
            carry = self.run(unit, carry, inputs)
        (loss,) = carry
        return loss

    def _table_module(self) -> VocabParallelEmbedding | None:
        """The token table of this rank, where it has one."""
        if hasattr(self, "embedding"):
            return self.embedding.tokens
        return self.head.output if self.tied and hasattr(self, "head") else None


def _has_own(module: nn.Module, table: nn.Module | None) -> bool:
    """Whether `module` has weights besides the table's."""
    shared = set() if table is None else {id(weight) for weight in table.parameters()}
    return any(id(weight) not in shared for weight in module.parameters())
