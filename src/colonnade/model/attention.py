"""Multi-head causal attention, whole heads a rank (Megatron-LM paper, section 3, figure 3b).

    [s, b, h] ─Column─▶ q, k, v of n/tp heads ─▶ softmax(q kᵀ/√d) v ─▶ [s, b, h/tp] ─Row─▶ [s, b, h]

The rows of the q, k, v weight are ordered [head, (q, k, v), d], so that any tp that divides the heads cuts it at one
dim.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from colonnade.config.schema import ModelConfig
from colonnade.model.attend import attend, attend_to_cache, attend_with_dropout
from colonnade.model.dropout import Masks
from colonnade.model.position import alibi_slopes
from colonnade.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, shard_size
from colonnade.tensor_parallel.parallel import Parallel


@dataclass
class KeyValueCache:
    """Keys and values of the positions seen so far, of one layer: [b, n/tp, capacity, d] each."""

    keys: Tensor
    values: Tensor
    length: int = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [b, n, s, d] each; returns all keys and values so far."""
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = k, v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Attention(nn.Module):
    """Causal self-attention with its two linear layers."""

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        h, tp = model.hidden_size, parallel.tp
        self.head_dim, self.drop = model.head_dim, model.attention_dropout
        mine = shard_size(model.num_heads, tp, "model.num_heads")
        self.heads = range(tp.rank * mine, (tp.rank + 1) * mine)
        alibi = model.position == "alibi"
        self.slopes = alibi_slopes(model.num_heads)[self.heads.start : self.heads.stop] if alibi else None
        self.recompute = parallel.recompute_attention
        self.qkv = ColumnParallelLinear(h, 3 * h, parallel)
        self.output = RowParallelLinear(h, h, parallel)

    def empty_cache(self, capacity: int) -> KeyValueCache:
        """For one text of at most `capacity` tokens."""
        weight, shape = self.output.weight, (1, len(self.heads), capacity, self.head_dim)
        return KeyValueCache(weight.new_empty(shape), weight.new_empty(shape))

    def forward(
        self,
        x: Tensor,
        layer: int,
        masks: Masks | None,
        cache: KeyValueCache | None = None,
        *,
        visible: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; sequence parallel: [s/tp, b, h] -> [s/tp, b, h].

        `visible`: the keys of the whole sequence that each query sees, bool [b, 1, s, s]; None: all up to its own.
        """
        rows = self.qkv(x)  # [s, b, 3h/tp], the whole sequence
        s, b, _ = rows.shape
        qkv = rows.view(s, b, len(self.heads), 3, self.head_dim)
        q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.unbind(3))  # [b, n/tp, s, d] each
        if cache is not None:
            y = attend_to_cache(q, *cache.extend(k, v), self.slopes)
        elif masks is None or self.drop == 0.0:
            y = attend(q, k, v, self.slopes, visible)
        else:
            draw = partial(masks.attention, layer, self.heads, s, s, self.drop, x.device)
            y = attend_with_dropout(
                q, k, v, draw, self.drop, slopes=self.slopes, visible=visible, recompute=self.recompute
            )
        out: Tensor = self.output(y.permute(2, 0, 1, 3).reshape(s, b, -1))  # [s, b, h]
        return out
