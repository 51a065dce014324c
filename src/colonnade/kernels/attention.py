"""The core of causal attention, softmax(q kᵀ/√d + bias) v, on the heads of one rank: nothing crosses ranks.

    attend                  a fused kernel: keeps no matrix of queries × keys for backward. Torch's, or a compiled one
    attend_with_dropout     by the compiled kernel, or spelled out, because torch's takes no mask of ours
    attend_unscaled         spelled out: softmax(q kᵀ + bias) v with a trained bias, for which they have no gradient
    attend_to_cache         the newest positions to all

What a query sees is a `Mask`. The bias that it makes is a pure function, so it is computed again in backward and never
kept. What samples say of pairs of tokens, a byte a pair, is made and kept once for all layers: torch makes numbers of a
boolean mask in each layer, and keeps those.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention as _fused

from colonnade.kernels import compiled
from colonnade.kernels.choice import Kernel, Products, usual
from colonnade.kernels.dropout import ProbabilityDropout
from colonnade.kernels.mask import Mask
from colonnade.kernels.products import exact, widen
from colonnade.kernels.relative import RelativeBias
from colonnade.mesh.autograd import apply

CAUSAL = Mask()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, *, products: Products | None = None) -> Tensor:
    """q, k, v [b, n, s, d] -> [b, n, s, d]. `products`: the kernels (None: the usual ones); so below."""
    wide, s = _operands(products, q, k, v), q.shape[2]
    if mask.is_plain(s):
        # a plan is of torch's operators
        if _kernel(q, products) == "compiled" and compiled.attends(q) and not q.is_meta:
            y: Tensor = apply(_CompiledAttention, q, k, v, mask.causal, None)
            return y
        return _fused(*wide, is_causal=mask.causal).to(q.dtype)
    compute = partial(mask.bias, s, s, wide[0].dtype, q.device)
    bias = compute()
    with _computed_again(bias, compute):
        return _fused(*wide, attn_mask=bias).to(q.dtype)


def attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL, *, products: Products | None = None
) -> Tensor:
    """Attention of the newest positions to all: q [b, n, s, d], k and v [b, n, past + s, d] -> [b, n, s, d]."""
    wide = _operands(products, q, k, v)
    bias = mask.bias(q.shape[2], k.shape[2], wide[0].dtype, q.device)
    return _fused(*wide, attn_mask=bias).to(q.dtype)


def attend_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: ProbabilityDropout,
    *,
    mask: Mask = CAUSAL,
    recompute: bool = False,
    products: Products | None = None,
) -> Tensor:
    """Attention with dropped probabilities: q, k, v [b, n, s, d] -> [b, n, s, d].

    Where it is spelled out, two matrices of [b, n, s, s] are kept for backward. `recompute`: q, k and v alone, and in
    backward the probabilities are computed and the mask is drawn again.
    """
    if mask.is_plain(q.shape[2]) and _drops_compiled(q, products):
        if q.is_meta:  # torch's fused operator keeps as much, of operands as they are
            return _fused(q, k, v, is_causal=mask.causal)
        fused: Tensor = apply(_CompiledAttention, q, k, v, mask.causal, dropout)
        return fused
    how = _How(mask, _scale(q), None, dropout, recompute, products or usual())
    y: Tensor = apply(_SpelledOut, q, k, v, how)
    return y


def attend_unscaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: RelativeBias | None = None,
    *,
    dropout: ProbabilityDropout | None = None,
    recompute: bool = False,
    products: Products | None = None,
) -> Tensor:
    """T5's: q [b, n, s, d], k and v [b, n, t, d] -> [b, n, s, d]. Queries are the last of the keys where there is a
    bias, or `mask` is causal. Backward adds to the gradient of the bias's table directly.

    `recompute`: as above; else one matrix of [b, n, s, t] is kept, two with dropout.
    """
    how = _How(mask, 1.0, bias, dropout, recompute, products or usual())
    y: Tensor = apply(_SpelledOut, q, k, v, how)
    return y


@dataclass(frozen=True)
class _How:
    mask: Mask
    scale: float
    bias: RelativeBias | None
    dropout: ProbabilityDropout | None
    recompute: bool
    products: Products

    @property
    def kept_scale(self) -> float:
        return 1.0 if self.dropout is None else self.dropout.kept_scale

    def keep(self, q: Tensor, k: Tensor) -> Tensor | None:
        return None if self.dropout is None else self.dropout.mask(q.shape[2], k.shape[2], q.device)

    def probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """softmax(scale · q kᵀ + bias), computed in fp32 or fp64, in the type of q: -> [b, n, s, t]."""
        scores, positions = raw_scores(q, k), self.mask.with_pairs(None)
        if self.scale != 1.0:
            scores.mul_(self.scale)
        if self.bias is not None:
            self.bias.add_to_(scores)
        if positions.causal or not positions.is_plain(k.shape[2]):
            scores.add_(positions.bias(q.shape[2], k.shape[2], scores.dtype, q.device))
        if self.mask.pairs is not None:
            scores.masked_fill_(~self.mask.pairs, -math.inf)  # in place: a bias of all samples and heads is as large
        return torch.softmax(scores, -1, out=scores).to(q.dtype)


def _operands(products: Products | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the type that their products are computed in."""
    kernel = _kernel(q, products)
    return widen(q, kernel), widen(k, kernel), widen(v, kernel)


def _kernel(q: Tensor, products: Products | None) -> Kernel:
    return (products or usual()).of(q).attention


def _drops_compiled(q: Tensor, products: Products | None) -> bool:
    # with weight gradients too, as all that torch has no fused operator for
    kernels = (products or usual()).of(q)
    return "compiled" in (kernels.attention, kernels.weight_gradient) and compiled.attends(q)


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: ProbabilityDropout | None) -> Tensor:
        dropped = (None, 0.0) if dropout is None else (dropout.streams.ravel(), dropout.drop)
        ctx.how = {"causal": causal, "streams": dropped[0], "drop": dropped[1]}
        out, lse = compiled.attend(q, k, v, _scale(q), **ctx.how)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *compiled.attend_backward(grad, q, k, v, out, lse, _scale(q), **ctx.how), None, None


class _SpelledOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: _How) -> Tensor:
        ctx.how = how
        wide = [t.contiguous() for t in _operands(how.products, q, k, v)]
        probabilities, keep = how.probabilities(wide[0], wide[1]), how.keep(q, k)
        if how.recompute:
            ctx.save_for_backward(q, k, v)
        else:
            ctx.save_for_backward(*wide, probabilities, keep)
        return (_kept(probabilities, keep) @ wide[2]).mul_(how.kept_scale).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: _How = ctx.how
        if how.recompute:
            q, k, v = (t.contiguous() for t in _operands(how.products, *ctx.saved_tensors))
            probabilities, keep = how.probabilities(q, k), how.keep(q, k)
        else:
            q, k, v, probabilities, keep = ctx.saved_tensors
        g = widen(grad, how.products.of(grad).attention).contiguous() * how.kept_scale
        dv = _kept(probabilities, keep).transpose(-1, -2) @ g
        dp = g @ v.transpose(-1, -2)
        if keep is not None:
            dp.mul_(keep)
        ds = torch._softmax_backward_data(dp, probabilities, -1, probabilities.dtype)
        if how.bias is not None:
            how.bias.add_gradient_(ds)
        if how.scale != 1.0:
            ds.mul_(how.scale)
        dq, dk = ds @ k, ds.transpose(-1, -2) @ q
        return dq.to(grad.dtype), dk.to(grad.dtype), dv.to(grad.dtype), None


def _kept(probabilities: Tensor, keep: Tensor | None) -> Tensor:
    return probabilities if keep is None else probabilities * keep


def _scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def raw_scores(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ in fp32 (fp64 for fp64): fp16 would overflow at 65,504, bf16 keep two digits."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        flat = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(-1, -2), out_dtype=torch.float32)
        return flat.view(*q.shape[:2], q.shape[2], k.shape[2])
    return exact(q) @ exact(k).transpose(-1, -2)


def _computed_again(bias: Tensor, compute: Callable[[], Tensor]) -> saved_tensors_hooks:
    """Within this, operators that want to keep `bias` for backward keep how to `compute` it."""
    place = bias.untyped_storage()._cdata  # an address of memory would not do: on the meta device all are 0

    def pack(t: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...]]:
        # detached, or an operator that keeps its own result would keep itself alive
        return (t.shape, t.stride()) if t.untyped_storage()._cdata == place else t.detach()

    def unpack(kept: Tensor | tuple[torch.Size, tuple[int, ...]]) -> Tensor:
        return kept if isinstance(kept, Tensor) else compute().as_strided(*kept)

    return saved_tensors_hooks(pack, unpack)
