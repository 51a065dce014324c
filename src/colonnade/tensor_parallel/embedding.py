"""The token embedding, cut along the vocabulary (Megatron-LM paper, section 3).

Each rank looks up the tokens it has and contributes zeros for the others; g adds them up. The last rank's rows may be
padding so that all shards are equal: no token ever names them, so they get neither gradient nor probability.
"""

from typing import Any

import torch
from torch import Tensor, nn

from colonnade.architecture.statement import vocab_rows_per_rank
from colonnade.kernels.products import gradient_of
from colonnade.mesh.autograd import apply
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.rows import add_rows_


def are_tokens(ids: Tensor, vocab_size: int, weights: Tensor | None = None) -> bool:
    """Whether all ids lie in the vocabulary, but for those of weight 0. On CUDA, where the host would wait for the
    answer, nobody asks.
    """
    if ids.is_cuda or ids.is_meta or not ids.numel():
        return True
    lowest, highest = (ids if weights is None else ids.where(weights != 0, 0)).aminmax()
    return int(lowest) >= 0 and int(highest) < vocab_size


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, mine: Tensor) -> Tensor:
        ctx.save_for_backward(weight, rows, mine)
        return nn.functional.embedding(rows, weight).mul_(mine[..., None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        weight, rows, mine = ctx.saved_tensors
        add_rows_(gradient_of(weight), rows, grad, mine)
        return None, None, None


class VocabParallelEmbedding(nn.Module):
    """Rows of the [v, h] table split over tp; logical shape [v, h], whatever the padding."""

    sharded = {"weight": 0}

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self.parallel, self.vocab_size = parallel, vocab_size
        self.full_shapes = {"weight": (vocab_size, hidden_size)}
        self.weight = nn.Parameter(torch.empty(vocab_rows_per_rank(vocab_size, parallel.tp.size), hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [s, b] -> [s, b, h]. Forward all-reduces [s, b, h] over tp; backward adds to `weight.grad`, sending
        nothing.

        Sequence parallel: [s, b] -> [s/tp, b, h]. Forward reduce-scatters [s, b, h]; backward all-gathers [s/tp, b, h].
        """
        assert are_tokens(tokens, self.vocab_size), (
            f"a token is outside of the vocabulary, 0 … {self.vocab_size - 1}: it would be read as none"
        )
        local = tokens - self.parallel.tp.rank * self.weight.shape[0]
        mine = (local >= 0) & (local < self.weight.shape[0])
        return self.parallel.leave(apply(_Lookup, self.weight, local * mine, mine))
