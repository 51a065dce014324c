"""One transformer block: attention and MLP, a norm with each, the residual around each.

pre        x + sublayer(norm(x))                        figure 7b of the Megatron-LM paper: large models train stably
post       norm(x + sublayer(x))                        figure 7a: the first transformer, GPT-1 and BERT
parallel   x + attention(norm(x)) + mlp(other_norm(x))  GPT-J and GPT-NeoX (Black et al., 2022)
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from colonnade.architecture.sites import OUTPUT, STREAM
from colonnade.config.model import ModelConfig
from colonnade.kernels.dropout import Masks, dropout
from colonnade.model.attention import Attention, KeyValueCache
from colonnade.model.mlp import MLP
from colonnade.model.norm import Norm, RMSNorm, norm_of
from colonnade.randomness import Purpose
from colonnade.tensor_parallel.parallel import Parallel


def residual_dtype(compute_dtype: torch.dtype, fp32_residual: bool) -> torch.dtype:
    """The type of the residual stream: fp32 for 16-bit computation where asked for."""
    return torch.promote_types(compute_dtype, torch.float32) if fp32_residual else compute_dtype


class Block(nn.Module):
    """Attention, then MLP; two all-reduces forward and two backward (see `parallel.py` for sequence parallelism)."""

    def __init__(self, model: ModelConfig, layer: int, parallel: Parallel) -> None:
        super().__init__()
        self.layer, self.drop, self.pre = layer, model.dropout, model.norm_position == "pre"
        self.side_by_side = model.parallel_residual
        self.parallel = parallel
        self.attention_norm = norm_of(model, parallel.products)
        self.attention = Attention(model, parallel)
        self.mlp_norm = norm_of(model, parallel.products)
        self.mlp = MLP(model, parallel)

    def forward(
        self,
        x: Tensor,
        masks: Masks | None = None,
        cache: KeyValueCache | None = None,
        *,
        pairs: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; sequence parallel: [s/tp, b, h] -> [s/tp, b, h]. `pairs`, `positions`: see
        `Attention`.
        """

        def attention(x: Tensor) -> Tensor:
            y: Tensor = self.attention(x, self.layer, masks, cache, pairs=pairs, positions=positions)
            self.parallel.probe.see(OUTPUT, y)
            return y

        y = self._around(attention, self.attention_norm, x, x, masks, 2 * self.layer)
        y = self._around(self.mlp, self.mlp_norm, x if self.side_by_side else y, y, masks, 2 * self.layer + 1)
        self.parallel.probe.see(STREAM, y)
        return y

    def _around(
        self,
        sublayer: Callable[[Tensor], Tensor],
        norm: Norm | RMSNorm,
        read: Tensor,
        x: Tensor,
        masks: Masks | None,
        mask: int,
    ) -> Tensor:
        """The residual x around a sublayer that reads `read`, and its norm. The sum has the stream's type, the sublayer
        its weights'.
        """
        y = sublayer(norm(read) if self.pre else read.to(norm.weight.dtype))
        y = dropout(y, self.drop, masks, Purpose.RESIDUAL_DROPOUT, mask, first=self.parallel.first_position(len(x)))
        return x + y if self.pre else norm(x + y, x.dtype)
