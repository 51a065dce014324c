"""T5: an encoder reads a text, a decoder writes another (Raffel et al., 2020; version 1.1 by its gated MLP).

    unit                 takes          hands on       buckets that it multiplies with
    embedding                           x              embedding.tokens
    encoder.blocks.i     x              x              encoder.positions, encoder.blocks.i
    decoder.embedding    x              y, memory      embedding.tokens, encoder.norm
    decoder.blocks.i     y, memory      y, memory      decoder.positions, decoder.blocks.i
    head                 y, memory      loss           head (norm, untied output layer); embedding.tokens where tied

x [s, b, h] is the encoder's stream, y [t, b, h] the decoder's; the memory [s, b, h] is what the encoder has made of its
text, normalised. Each block of the decoder reads it and hands it on as it is: so it gets from stage to stage, and its
gradient back, summed on the way.

While a text is written token by token, the encoder runs with the first token alone: each block of the decoder keeps the
memory's keys and values, and from then on nothing but y is carried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from colonnade.architecture.sites import EMBEDDING, FINAL_NORM
from colonnade.architecture.stack import TABLE
from colonnade.architecture.statement import Unit
from colonnade.architecture.t5 import MEMORY_NORM, POSITIONS
from colonnade.config.model import ModelConfig
from colonnade.kernels.dropout import Masks, dropout
from colonnade.model.inputs import Inputs
from colonnade.model.model import Transformer
from colonnade.model.norm import norm_of
from colonnade.model.stack import Head
from colonnade.model.t5_block import DecoderCache, RelativePositions, T5Block
from colonnade.model.transformer import residual_dtype
from colonnade.randomness import Purpose
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding
from colonnade.tensor_parallel.parallel import Parallel


@dataclass(frozen=True)
class T5Inputs(Inputs):
    """What units read besides the carry. `tokens` are the encoder's, `labels` and `loss_weights` [t, b] the decoder's.

    While a text is written, `tokens` is None from its second token on.
    """

    decoder_tokens: Tensor | None = None
    """int64 [t, b]: the labels, shifted right."""
    real: Tensor | None = None
    """bool [s, b]: False on padding of the encoder's text, which nothing attends to. None: there is none."""
    decoder_caches: Mapping[str, DecoderCache] | None = None
    """Of each block of the decoder: generation's."""

    @property
    def readable(self) -> Tensor | None:
        """bool [b, 1, 1, s]: which of the encoder's positions are no padding."""
        return None if self.real is None else self.real.t()[:, None, None]


class T5Head(Head):
    """The loss of what the decoder has to write. A tied output layer reads a stream divided by √hidden_size: its
    rows are as wide as the embedding wants them.
    """

    def __init__(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, tied: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__(model, vocab_size, parallel, tied)
        self.drop, self.scale = model.dropout, model.hidden_size**-0.5 if model.tie_embeddings else 1.0

    def normed(self, x: Tensor) -> Tensor:
        y = super().normed(x)
        return y if self.scale == 1.0 else y * self.scale

    def forward(self, x: Tensor, labels: Tensor, loss_weights: Tensor, masks: Masks | None) -> Tensor:
        """[t, b, h] (sequence parallel: [t/tp, b, h]), labels [t, b] -> Σ loss_weights · token loss, []"""
        first = self.parallel.first_position(len(x))
        y = dropout(self.normed(x), self.drop, masks, Purpose.FINAL_DROPOUT, 1, first=first)
        return self.loss_of(y, labels, loss_weights)

    def guesses(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Whole stream [t, b, h], labels [t, b] -> each token's loss, and whether its label is likeliest: [t, b]"""
        return self.guesses_of(self.normed(x), labels)

    def logits(self, x: Tensor) -> Tensor:
        """Whole stream [t, b, h] -> this rank's real rows of the logits, [t, b, ≤ v/tp] in fp32."""
        return self.logits_of(self.normed(x))


class T5(Transformer):
    """A model that reads a text and writes another, or some units of it."""

    def __init__(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, *, units: Sequence[str] | None = None
    ) -> None:
        super().__init__(model, vocab_size, parallel, units=units)
        self.drop = model.dropout
        needed = {bucket for unit in self.held for bucket in unit.buckets}
        self.table = VocabParallelEmbedding(vocab_size, model.hidden_size, parallel) if TABLE in needed else None
        self.positions = nn.ModuleDict(
            {
                str(stack): RelativePositions(model, parallel, both_sides=stack == 0)
                for stack, bucket in enumerate(POSITIONS)
                if bucket in needed
            }
        )
        self.blocks = nn.ModuleDict(
            {
                str(unit.layer): T5Block(model, unit, parallel, self._positions_of(unit))
                for unit in self.held
                if unit.layer is not None
            }
        )
        self.memory_norm = norm_of(model, parallel.products) if MEMORY_NORM in needed else None
        if any(unit.is_loss for unit in self.held):
            self.head = T5Head(model, vocab_size, parallel, self.table if self.tied else None)

    def _positions_of(self, unit: Unit) -> RelativePositions:
        found = self.positions[str(unit.stack)]
        assert isinstance(found, RelativePositions), "a stack's own"
        return found

    def _module_of(self, unit: Unit) -> nn.Module:
        if unit.layer is not None:
            return self.blocks[str(unit.layer)]
        if unit.is_loss:
            return self.head
        found = self.table if unit.is_first else self.memory_norm
        assert found is not None, "a unit has its buckets"
        return found

    def _run(self, unit: str, carry: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """One unit, as the table at the top says."""
        assert isinstance(inputs, T5Inputs), "samples are two texts"
        stated = self.stated[unit]
        if stated.is_loss:
            assert inputs.labels is not None and inputs.loss_weights is not None, "the head reads labels and weights"
            return (self.head(carry[0], inputs.labels, inputs.loss_weights, inputs.masks),)
        if stated.is_first:
            return () if inputs.tokens is None else (self._looked_up(inputs.tokens, inputs.masks, stated.stack),)
        if stated.reads_tokens:
            assert inputs.decoder_tokens is not None, "the decoder reads tokens"
            return (self._looked_up(inputs.decoder_tokens, inputs.masks, stated.stack), *self._memory(carry, inputs))
        block = self.blocks[str(stated.layer)]
        if stated.stack == 0:
            return tuple(block(x, inputs.masks, readable=inputs.readable) for x in carry)
        y, *memory = carry
        cache = None if inputs.decoder_caches is None else inputs.decoder_caches[unit]
        read = memory[0] if memory else None
        return (block(y, inputs.masks, memory=read, readable=inputs.readable, cache=cache), *memory)

    def _looked_up(self, tokens: Tensor, masks: Masks | None, stack: int) -> Tensor:
        """int64 [s, b] -> [s, b, h], or [s/tp, b, h] under sequence parallelism."""
        assert self.table is not None, "who looks tokens up has the table"
        x = self.table(tokens)
        x = x.to(residual_dtype(x.dtype, self.fp32_residual))
        first = self.parallel.first_position(len(x))
        x = dropout(x, self.drop, masks, Purpose.EMBEDDING_DROPOUT, stack, first=first)
        self.parallel.probe.see(EMBEDDING, x)
        return x

    def _memory(self, carry: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """(x,) of the encoder's last block -> (memory,); () where the text was read before."""
        assert self.memory_norm is not None, "the decoder's embedding has it"
        found = []
        for x in carry:
            y = self.memory_norm(x)
            self.parallel.probe.see(FINAL_NORM, y)
            first = self.parallel.first_position(len(x))
            found.append(dropout(y, self.drop, inputs.masks, Purpose.FINAL_DROPOUT, first=first))
        return tuple(found)

    def carry_buffers(self, inputs: Inputs, into: str) -> tuple[Tensor, ...]:
        """Of the encoder's units its stream; of the decoder's theirs, and the memory: a norm's output, in the type of
        the computation.
        """
        assert isinstance(inputs, T5Inputs), "samples are two texts"
        unit = self.stated[into]
        if unit.is_first:
            return ()
        has_memory = len(unit.takes) > 1
        fp32 = self.fp32_residual and not has_memory
        read = () if inputs.tokens is None else (self.stream_buffer(inputs.tokens, fp32=fp32),)
        if not has_memory:
            return read
        assert inputs.decoder_tokens is not None, "every stage is told the tokens"
        return (self.stream_buffer(inputs.decoder_tokens, fp32=self.fp32_residual), *read)

    def residual(self, carry: tuple[Tensor, ...]) -> Tensor:
        return self.parallel.gather(carry[0])

    def bucket_modules(self) -> dict[str, nn.Module]:
        found = self.units() | {POSITIONS[int(stack)]: each for stack, each in self.positions.items()}
        shared = {TABLE: self.table, MEMORY_NORM: self.memory_norm}
        found |= {bucket: module for bucket, module in shared.items() if module is not None}
        return {bucket: found[bucket] for bucket in self.architecture.buckets if bucket in found}

    def empty_caches(self, capacity: int) -> dict[str, DecoderCache]:
        """A cache for each block of the decoder on this rank: for one text of at most `capacity` tokens."""
        return {
            unit.name: DecoderCache(block.attention.empty_cache(capacity))
            for unit in self.held
            if unit.layer is not None and unit.stack > 0 and isinstance(block := self._module_of(unit), T5Block)
        }
