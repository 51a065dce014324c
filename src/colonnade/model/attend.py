"""The core of causal attention, softmax(q kᵀ/√d + bias) v, on the heads of one rank: nothing crosses ranks.

    attend                  torch's fused kernel: keeps no matrix of queries × keys for backward
    attend_with_dropout     spelled out, because the fused kernels take no mask of ours
    attend_to_cache         the newest positions to all

The bias is −∞ for keys that the query does not see (those after it; of other documents) and, with ALiBi's slopes,
−slope · distance for the others. It is a pure function of positions and documents, so it is computed again in backward
and never kept. What tokens see, a byte a pair, is made and kept once for all layers: torch makes numbers of a boolean
mask in each layer, and keeps those.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention as _fused

from colonnade.mesh.autograd import apply
from colonnade.mesh.randomness import drop_probability
from colonnade.mesh.upload import upload
from colonnade.tensor_parallel.gemm import widen

Slopes = Sequence[float] | None
"""ALiBi's slope of each head of this rank; None without ALiBi."""


def visible_keys(documents: Tensor) -> Tensor:
    """What each token sees of its row: int64 [s, b] -> bool [b, 1, queries, keys], true for keys of the query's own
    document that are not after it.
    """
    rows = documents.t()
    return (rows[:, :, None] == rows[:, None, :]).tril_()[:, None]


def score_bias(
    slopes: Slopes, queries: int, keys: int, dtype: torch.dtype, device: torch.device, visible: Tensor | None = None
) -> Tensor:
    """What is added to the scores of the last `queries` of `keys` positions: [1 or b, 1 or n, queries, keys].

    `visible`: the keys that each query sees (None: all up to its own).
    """
    exact = torch.promote_types(dtype, torch.float32)
    position = torch.arange(keys, device=device)
    distance = position[None, :] - position[keys - queries :, None]  # ≤ 0 up to the query
    if visible is None:
        visible = (distance <= 0)[None, None]
    if slopes is None:
        return torch.where(visible, torch.zeros((), dtype=dtype, device=device), -math.inf)
    lowered = upload(torch.tensor(slopes, dtype=exact), device)[:, None, None] * distance
    return torch.where(visible, lowered.to(dtype), -math.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Slopes = None, visible: Tensor | None = None) -> Tensor:
    """q, k, v [b, n, s, d] -> [b, n, s, d]; `visible` as `visible_keys` makes it, None: all up to the query."""
    wide, s = (widen(q), widen(k), widen(v)), q.shape[2]
    if slopes is None and visible is None:
        return _fused(*wide, is_causal=True).to(q.dtype)
    compute = partial(score_bias, slopes, s, s, wide[0].dtype, q.device, visible)
    bias = compute()
    with _computed_again(bias, compute):
        return _fused(*wide, attn_mask=bias).to(q.dtype)


def attend_to_cache(q: Tensor, k: Tensor, v: Tensor, slopes: Slopes = None) -> Tensor:
    """Attention of the newest positions to all: q [b, n, s, d], k and v [b, n, past + s, d] -> [b, n, s, d]."""
    wide = widen(q), widen(k), widen(v)
    bias = score_bias(slopes, q.shape[2], k.shape[2], wide[0].dtype, q.device)
    return _fused(*wide, attn_mask=bias).to(q.dtype)


def attend_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    draw: Callable[[], Tensor],
    drop: float,
    *,
    slopes: Slopes = None,
    visible: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """Attention with dropped probabilities: q, k, v [b, n, s, d] -> [b, n, s, d].

    `draw` gives the mask, bool [b, n, s, s], true where a probability is kept. `visible`: see `attend`.
    `recompute`: keep q, k and v alone, and in backward compute the probabilities and draw the mask again; else 2
    matrices of [b, n, s, s] are kept.
    """
    y: Tensor = apply(_AttentionWithDropout, q, k, v, draw, drop, slopes, visible, recompute)
    return y


class _AttentionWithDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        draw: Callable[[], Tensor],
        drop: float,
        slopes: Slopes,
        visible: Tensor | None,
        again: bool,
    ) -> Tensor:
        ctx.draw, ctx.slopes, ctx.visible, ctx.again = draw, slopes, visible, again
        ctx.kept_scale = 1.0 / (1.0 - drop_probability(drop))
        wide = [widen(t).contiguous() for t in (q, k, v)]
        probabilities, keep = _probabilities(wide[0], wide[1], slopes, visible), draw()
        if again:
            ctx.save_for_backward(q, k, v)
        else:
            ctx.save_for_backward(*wide, probabilities, keep)
        return ((probabilities * keep) @ wide[2]).mul_(ctx.kept_scale).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.again:
            q, k, v = (widen(t).contiguous() for t in ctx.saved_tensors)
            probabilities, keep = _probabilities(q, k, ctx.slopes, ctx.visible), ctx.draw()
        else:
            q, k, v, probabilities, keep = ctx.saved_tensors
        g = widen(grad).contiguous() * ctx.kept_scale
        dv = (probabilities * keep).transpose(-1, -2) @ g
        dp = (g @ v.transpose(-1, -2)).mul_(keep)
        ds = torch._softmax_backward_data(dp, probabilities, -1, probabilities.dtype).mul_(_scale(q))
        dq, dk = ds @ k, ds.transpose(-1, -2) @ q
        return dq.to(grad.dtype), dk.to(grad.dtype), dv.to(grad.dtype), None, None, None, None, None


def _scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _probabilities(q: Tensor, k: Tensor, slopes: Slopes, visible: Tensor | None) -> Tensor:
    """softmax(q kᵀ/√d + bias), computed in fp32 or fp64, in the type of q: [b, n, s, d] each -> [b, n, s, s]."""
    scores = _scores(q, k)
    scores.mul_(_scale(q)).add_(score_bias(slopes, q.shape[2], k.shape[2], scores.dtype, q.device))
    if visible is not None:
        scores.masked_fill_(~visible, -math.inf)  # in place: a bias of all samples and heads would be as large
    return torch.softmax(scores, -1, out=scores).to(q.dtype)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ in fp32 (fp64 for fp64): fp16 would overflow at 65,504, bf16 keep two digits."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        flat = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(-1, -2), out_dtype=torch.float32)
        return flat.view(*q.shape[:2], q.shape[2], k.shape[2])
    return q @ k.transpose(-1, -2)


def _computed_again(bias: Tensor, compute: Callable[[], Tensor]) -> saved_tensors_hooks:
    """Within this, operators that want to keep `bias` for backward keep how to `compute` it."""
    place = bias.untyped_storage().data_ptr()

    def pack(t: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...]]:
        # detached, or an operator that keeps its own result would keep itself alive
        return (t.shape, t.stride()) if t.untyped_storage().data_ptr() == place else t.detach()

    def unpack(kept: Tensor | tuple[torch.Size, tuple[int, ...]]) -> Tensor:
        return kept if isinstance(kept, Tensor) else compute().as_strided(*kept)

    return saved_tensors_hooks(pack, unpack)
