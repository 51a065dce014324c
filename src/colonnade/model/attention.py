"""Multi-head attention, whole heads a rank (Megatron-LM paper, section 3, figure 3b).

    [s, b, h] ─Column─▶ q, k, v of n/tp heads ─▶ softmax(q kᵀ/√d) v ─▶ [s, b, h/tp] ─Row─▶ [s, b, h]

The rows of the q, k, v weight are ordered [head, (q, k, v), d], so that any tp that divides the heads cuts it at one
dim.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from colonnade.architecture.sites import LOGITS
from colonnade.config.model import ModelConfig
from colonnade.kernels.attention import attend, attend_to_cache, attend_with_dropout
from colonnade.kernels.dropout import Masks
from colonnade.kernels.mask import Mask
from colonnade.kernels.norm import rms_norm
from colonnade.kernels.visible import visible_logits
from colonnade.model.position import alibi_slopes
from colonnade.model.rotary import Rotary
from colonnade.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, columns, shard_size
from colonnade.tensor_parallel.parallel import Parallel

LEDGER_PART = "attention"
"""What the ledger calls the part of a block that sends from here."""


@dataclass
class KeyValueCache:
    """Keys and values of the positions seen so far, of one layer: [b, n/tp, capacity, d] each."""

    keys: Tensor
    values: Tensor
    length: int = 0

    @classmethod
    def empty(cls, like: Tensor, heads: int, capacity: int, head_dim: int) -> Self:
        """For one text of at most `capacity` tokens, in the type and where `like` is."""
        shape = (1, heads, capacity, head_dim)
        return cls(like.new_empty(shape), like.new_empty(shape))

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [b, n, s, d] each; returns all keys and values so far."""
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = k, v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Attention(nn.Module):
    """Self-attention with its linear layers.

    With as many heads of keys and values as of queries, one weight makes all three. With fewer (grouped-query
    attention; Ainslie et al., 2023), queries have one of their own. Each rank has whole heads of queries, and those of
    keys and values that they use: a share of them, or, where there are more ranks than such heads, one of which other
    ranks have a copy.
    """

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        h, n, m, d = model.hidden_size, model.num_heads, model.key_value_heads, model.head_width
        bias = model.has_query_key_value_bias
        tp, self.head_dim, self.drop = parallel.tp, d, model.attention_dropout
        mine = shard_size(n, tp, "model.num_heads")
        self.heads = range(tp.rank * mine, (tp.rank + 1) * mine)
        self.key_value_heads = max(1, m // tp.size)
        slopes = alibi_slopes(n)[self.heads.start : self.heads.stop] if model.position == "alibi" else None
        self.mask = Mask(model.is_causal, model.window, slopes)
        self.rotary = Rotary(model.rotary, model.rotary_width) if model.position == "rotary" else None
        self.recompute, self.products = parallel.recompute_attention, parallel.products
        self.probe = parallel.probe
        self.qkv = ColumnParallelLinear(h, 3 * n * d, parallel, bias=bias) if m == n else None
        self.query = ColumnParallelLinear(h, n * d, parallel, bias=bias) if m != n else None
        self.key_value = ColumnParallelLinear(h, 2 * m * d, parallel, bias=bias, groups=m) if m != n else None
        self.query_norm = HeadNorm(model, parallel) if model.query_key_norm else None
        self.key_norm = HeadNorm(model, parallel) if model.query_key_norm else None
        self.output = RowParallelLinear(n * d, h, parallel, bias=model.bias)

    def empty_cache(self, capacity: int) -> KeyValueCache:
        """For one text of at most `capacity` tokens."""
        return KeyValueCache.empty(self.output.weight, self.key_value_heads, capacity, self.head_dim)

    def forward(
        self,
        x: Tensor,
        layer: int,
        masks: Masks | None,
        cache: KeyValueCache | None = None,
        *,
        pairs: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; sequence parallel: [s/tp, b, h] -> [s/tp, b, h].

        `pairs`: which tokens of the whole sequence may see each other, bool [b, 1, s, s]; None: all. `positions`: of
        the whole sequence, int64 [s, b]; None: 0, 1, … or those behind the cache.
        """
        q, k, v = self._projected(x)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        b, _, s, _ = q.shape
        if self.rotary is not None:
            if positions is None:
                first = 0 if cache is None else cache.length
                positions = torch.arange(first, first + s, device=x.device)
            q, k = self.rotary.turn(positions, q, k)
        k, v = (k, v) if cache is None else cache.extend(k, v)
        k, v = (each_for_its_queries(heads, len(self.heads)) for heads in (k, v))
        mask = self.mask.with_pairs(pairs)
        if self.probe.reads(LOGITS):
            for part in visible_logits(q, k, mask):
                self.probe.see(LOGITS, part)
        if cache is not None:
            y = attend_to_cache(q, k, v, mask, products=self.products)
        elif masks is None or self.drop == 0.0:
            y = attend(q, k, v, mask, products=self.products)
        else:
            dropout = masks.attention(layer, self.heads, self.drop)
            y = attend_with_dropout(q, k, v, dropout, mask=mask, recompute=self.recompute, products=self.products)
        out: Tensor = self.output(y.permute(2, 0, 1, 3).reshape(s, b, -1))  # [s, b, h]
        return out

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The stream -> queries [b, n/tp, s, d], keys and values with their own heads, of the whole sequence."""
        if self.qkv is not None:
            q, k, v = heads_of(self.qkv(x), len(self.heads), 3)  # rows are ordered [head, (q, k, v), d]
            return q, k, v
        assert self.query is not None and self.key_value is not None, "one weight, or two"
        queries, others = columns(x, self.query, self.key_value)
        (q,), (k, v) = heads_of(queries, len(self.heads), 1), heads_of(others, self.key_value_heads, 2)
        return q, k, v


class HeadNorm(nn.Module):
    """RMSNorm of each head's features, with one weight for all heads: each rank sees its own heads alone."""

    partial = ("weight",)

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        self.epsilon, self.products = model.norm_epsilon, parallel.products
        self.weight = nn.Parameter(torch.ones(model.head_width))

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, s, d] -> [b, n, s, d]"""
        return rms_norm(x, self.weight, self.epsilon, x.dtype, products=self.products)


def heads_of(rows: Tensor, num_heads: int, parts: int) -> tuple[Tensor, ...]:
    """[s, b, n · parts · d], ordered [head, part, d] -> [b, n, s, d] of each part."""
    s, b, _ = rows.shape
    return tuple(part.permute(1, 2, 0, 3) for part in rows.view(s, b, num_heads, parts, -1).unbind(3))


def each_for_its_queries(heads: Tensor, num_queries: int) -> Tensor:
    """Heads of keys or values, one for every query head: [b, m, s, d] -> [b, n, s, d], each n/m times in a row."""
    times = num_queries // heads.shape[1]
    return heads if times == 1 else heads.repeat_interleave(times, 1)
