"""Multi-head causal attention, whole heads a rank (Megatron-LM paper, section 3, figure 3b).

    [s, b, h] ─Column─▶ q, k, v of n/tp heads ─▶ softmax(q kᵀ/√d) v ─▶ [s, b, h/tp] ─Row─▶ [s, b, h]

The rows of the q, k, v weight are ordered [head, (q, k, v), d], so that any tp that divides the heads cuts it at one
dim.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.mesh.autograd import apply
from colonnade.mesh.mesh import Axis
from colonnade.mesh.randomness import drop_probability
from colonnade.model.dropout import Masks
from colonnade.tensor_parallel.gemm import widen
from colonnade.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, shard_size


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

    def __init__(
        self, hidden_size: int, num_heads: int, tp: Axis, *, drop: float, init_std: float, output_std: float
    ) -> None:
        super().__init__()
        self.head_dim, self.drop = hidden_size // num_heads, drop
        mine = shard_size(num_heads, tp, "model.num_heads")
        self.heads = range(tp.rank * mine, (tp.rank + 1) * mine)
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, tp, init_std=init_std)
        self.output = RowParallelLinear(hidden_size, hidden_size, tp, init_std=output_std)

    def forward(self, x: Tensor, layer: int, masks: Masks | None, cache: KeyValueCache | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]"""
        s, b, _ = x.shape
        qkv = self.qkv(x).view(s, b, len(self.heads), 3, self.head_dim)
        q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.unbind(3))  # [b, n/tp, s, d] each
        if cache is not None:
            y = attend_to_cache(q, *cache.extend(k, v))
        elif masks is None or self.drop == 0.0:
            y = nn.functional.scaled_dot_product_attention(widen(q), widen(k), widen(v), is_causal=True).to(x.dtype)
        else:
            keep = masks.attention(layer, self.heads, s, s, self.drop, x.device)
            y = attend_with_dropout(q, k, v, keep, self.drop)
        out: Tensor = self.output(y.permute(2, 0, 1, 3).reshape(s, b, -1))  # [s, b, h]
        return out


def attend_to_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the newest positions to all: q [b, n, s, d], k and v [b, n, past + s, d] -> [b, n, s, d]."""
    s, total = q.shape[2], k.shape[2]
    visible = torch.ones(s, total, dtype=torch.bool, device=q.device).tril(total - s)
    y = nn.functional.scaled_dot_product_attention(widen(q), widen(k), widen(v), attn_mask=visible)
    return y.to(q.dtype)


class _AttentionWithDropout(torch.autograd.Function):
    """softmax(q kᵀ/√d), masked by `keep`, times v: the fused kernels take no mask of ours, so this one is spelled out.

    Only the probabilities and the mask are kept for backward, and every step works in place.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, drop: float) -> Tensor:
        ctx.kept_scale, ctx.qk_scale = 1.0 / (1.0 - drop_probability(drop)), 1.0 / math.sqrt(q.shape[-1])
        wide = [widen(t).contiguous() for t in (q, k, v)]
        probabilities = _causal_softmax_(wide[0] @ wide[1].transpose(-1, -2), ctx.qk_scale)
        dropped = probabilities * keep
        ctx.save_for_backward(*wide, probabilities, keep)
        return (dropped @ wide[2]).mul_(ctx.kept_scale).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities, keep = ctx.saved_tensors
        g = widen(grad).contiguous() * ctx.kept_scale
        dv = (probabilities * keep).transpose(-1, -2) @ g
        dp = (g @ v.transpose(-1, -2)).mul_(keep)
        ds = torch._softmax_backward_data(dp, probabilities, -1, probabilities.dtype).mul_(ctx.qk_scale)
        dq, dk = ds @ k, ds.transpose(-1, -2) @ q
        return dq.to(grad.dtype), dk.to(grad.dtype), dv.to(grad.dtype), None, None


def attend_with_dropout(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, drop: float) -> Tensor:
    """Causal attention with dropped probabilities: q, k, v [b, n, s, d], keep bool [b, n, s, s] -> [b, n, s, d]."""
    y: Tensor = apply(_AttentionWithDropout, q, k, v, keep, drop)
    return y


def _causal_softmax_(scores: Tensor, scale: float) -> Tensor:
    """softmax over the keys not after the query, of scale · scores [b, n, s, s]; in place."""
    s = scores.shape[-1]
    future = scores.new_full((s, s), float("-inf")).triu_(1)
    return torch.softmax(scores.mul_(scale).add_(future), -1, out=scores)
