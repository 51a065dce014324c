"""Blocks of T5: attention without a factor 1/√d, to the block's own stream and, in the decoder, to the memory.

    x ─norm─▶ attention ─┬─▶ + ─norm─▶ cross attention ─▶ + ─norm─▶ MLP ─▶ + ─▶           the second in the decoder
          ranges of distances      memory, no positions

Cut over tp as `attention.py` and `mlp.py` say: whole heads a rank, each with its column of the table of ranges.

Source: Raffel et al., 2020; Vaswani et al., "Attention Is All You Need", 2017.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from colonnade.architecture.sites import CROSS, LOGITS, OUTPUT, STREAM
from colonnade.architecture.statement import Unit
from colonnade.config.model import ModelConfig
from colonnade.kernels.attention import attend_unscaled
from colonnade.kernels.dropout import Masks, dropout, dropout_of_columns
from colonnade.kernels.mask import Mask
from colonnade.kernels.relative import Ranges, RelativeBias
from colonnade.kernels.visible import visible_logits
from colonnade.model.attention import KeyValueCache, heads_of
from colonnade.model.mlp import MLP
from colonnade.model.norm import Norm, RMSNorm, norm_of
from colonnade.randomness import Purpose
from colonnade.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, columns, shard_size
from colonnade.tensor_parallel.parallel import Parallel

EVERYTHING = Mask(causal=False)


class RelativePositions(nn.Module):
    """A number for each range of distances and head: [ranges, n/tp], of all blocks of a stack."""

    sharded = {"weight": 1}

    def __init__(self, model: ModelConfig, parallel: Parallel, *, both_sides: bool) -> None:
        super().__init__()
        count, heads = model.relative_buckets, model.num_heads
        self.full_shapes = {"weight": (count, heads)}
        self.weight = nn.Parameter(torch.empty(count, shard_size(heads, parallel.tp, "model.num_heads")))
        self.ranges = Ranges(count, model.relative_distance, both_sides)

    @property
    def bias(self) -> RelativeBias:
        return RelativeBias(self.weight, self.ranges)


@dataclass
class MemoryCache:
    """Keys and values of the memory, of one layer: [b, n/tp, m, d] each, computed once."""

    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass
class DecoderCache:
    """What one block of the decoder keeps of a text that it goes on with."""

    own: KeyValueCache
    memory: MemoryCache = field(default_factory=MemoryCache)


class UnscaledAttention(nn.Module):
    """Attention with its linear layers: q of one stream, k and v of the same or of another."""

    def __init__(self, model: ModelConfig, parallel: Parallel, *, of_memory: bool = False) -> None:
        super().__init__()
        h, n, d = model.hidden_size, model.num_heads, model.head_width
        tp, self.head_dim, self.drop = parallel.tp, d, model.attention_dropout
        mine = shard_size(n, tp, "model.num_heads")
        self.heads = range(tp.rank * mine, (tp.rank + 1) * mine)
        self.recompute, self.products = parallel.recompute_attention, parallel.products
        self.parallel, self.before = parallel, CROSS if of_memory else ""
        self.query = ColumnParallelLinear(h, n * d, parallel, bias=False)
        self.key_value = ColumnParallelLinear(h, 2 * n * d, parallel, bias=False)
        self.output = RowParallelLinear(n * d, h, parallel, bias=False)

    def to_itself(
        self,
        x: Tensor,
        number: int,
        masks: Masks | None,
        mask: Mask,
        bias: RelativeBias,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; sequence parallel: [s/tp, b, h] -> [s/tp, b, h]. `number`: of this attention, among
        all of the model: dropout's.
        """
        queries, others = columns(x, self.query, self.key_value)
        k, v = heads_of(others, len(self.heads), 2)
        k, v = (k, v) if cache is None else cache.extend(k, v)
        return self._attended(queries, k, v, number, masks, mask, bias)

    def to_memory(
        self,
        x: Tensor,
        memory: Tensor | None,
        number: int,
        masks: Masks | None,
        mask: Mask,
        cache: MemoryCache | None = None,
    ) -> Tensor:
        """[t, b, h] and the memory [s, b, h] -> [t, b, h]; sequence parallel: cut along both. The memory is None where
        the cache has its keys and values.
        """
        if memory is not None:
            k, v = heads_of(self.key_value(memory), len(self.heads), 2)
            if cache is not None:
                cache.keys, cache.values = k, v
        else:
            assert cache is not None and cache.keys is not None and cache.values is not None, "read once, then cached"
            k, v = cache.keys, cache.values
        return self._attended(self.query(x), k, v, number, masks, mask, None)

    def _attended(
        self,
        queries: Tensor,
        k: Tensor,
        v: Tensor,
        number: int,
        masks: Masks | None,
        mask: Mask,
        bias: RelativeBias | None,
    ) -> Tensor:
        s, b, _ = queries.shape
        (q,) = heads_of(queries, len(self.heads), 1)
        if self.parallel.probe.reads(self.before + LOGITS):
            for part in visible_logits(q, k, mask, scaled=False, bias=bias):
                self.parallel.probe.see(self.before + LOGITS, part)
        dropout = None
        if masks is not None and self.drop != 0.0:
            dropout = masks.attention(number, self.heads, self.drop)
        y = attend_unscaled(q, k, v, mask, bias, dropout=dropout, recompute=self.recompute, products=self.products)
        out: Tensor = self.output(y.permute(2, 0, 1, 3).reshape(s, b, -1))
        self.parallel.probe.see(self.before + OUTPUT, out)
        return out

    def empty_cache(self, capacity: int) -> KeyValueCache:
        """For one text of at most `capacity` tokens."""
        return KeyValueCache.empty(self.output.weight, len(self.heads), capacity, self.head_dim)


class T5Block(nn.Module):
    """Two sublayers, three in the decoder; one all-reduce forward for each (see `parallel.py` for sequence
    parallelism), and one backward for each stream that a sublayer reads.
    """

    def __init__(self, model: ModelConfig, unit: Unit, parallel: Parallel, positions: RelativePositions) -> None:
        super().__init__()
        assert unit.layer is not None, "a block has a number"
        decodes = unit.stack > 0
        self.drop, self.parallel, self.layer = model.dropout, parallel, unit.layer
        behind = unit.layer - model.num_layers  # in the decoder
        self.first_attention = model.num_layers + 2 * behind if decodes else unit.layer
        self.first_sublayer = 2 * model.num_layers + 3 * behind if decodes else 2 * unit.layer
        self.mask = Mask(causal=decodes)
        self.positions = positions
        self.attention_norm, self.attention = norm_of(model, parallel.products), UnscaledAttention(model, parallel)
        self.cross_norm = norm_of(model, parallel.products) if decodes else None
        self.cross = UnscaledAttention(model, parallel, of_memory=True) if decodes else None
        self.mlp_norm, self.mlp = norm_of(model, parallel.products), MLP(model, parallel)
        each = shard_size(model.ffn, parallel.tp, "model.ffn_hidden_size")
        self.inner = range(parallel.tp.rank * each, (parallel.tp.rank + 1) * each)

    def forward(
        self,
        x: Tensor,
        masks: Masks | None = None,
        *,
        memory: Tensor | None = None,
        readable: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; sequence parallel: [s/tp, b, h] -> [s/tp, b, h].

        `memory`: what the encoder has read, for the decoder. `readable`: which of the encoder's positions are no
        padding, bool [b, 1, 1, m]; None: all.
        """
        cross = self.cross
        own = self.mask.with_pairs(readable if cross is None else None)
        to_itself = partial(
            self.attention.to_itself,
            number=self.first_attention,
            masks=masks,
            mask=own,
            bias=self.positions.bias,
            cache=None if cache is None else cache.own,
        )
        x = self._around(to_itself, self.attention_norm, x, masks, 0)
        if cross is not None and self.cross_norm is not None:
            to_memory = partial(
                cross.to_memory,
                memory=memory,
                number=self.first_attention + 1,
                masks=masks,
                mask=EVERYTHING.with_pairs(readable),
                cache=None if cache is None else cache.memory,
            )
            x = self._around(to_memory, self.cross_norm, x, masks, 1)
        x = self._around(partial(self._mlp, masks=masks), self.mlp_norm, x, masks, 1 if cross is None else 2)
        self.parallel.probe.see(STREAM, x)
        return x

    def _mlp(self, x: Tensor, masks: Masks | None) -> Tensor:
        inner = self.mlp.inner(x)
        inner = dropout_of_columns(inner, self.inner, self.drop, masks, Purpose.INNER_DROPOUT, self.layer)
        y: Tensor = self.mlp.down(inner)
        return y

    def _around(
        self, sublayer: Callable[[Tensor], Tensor], norm: Norm | RMSNorm, x: Tensor, masks: Masks | None, number: int
    ) -> Tensor:
        """The residual around a sublayer, its norm before it."""
        first = self.parallel.first_position(len(x))
        y = sublayer(norm(x))
        return x + dropout(y, self.drop, masks, Purpose.RESIDUAL_DROPOUT, self.first_sublayer + number, first=first)
