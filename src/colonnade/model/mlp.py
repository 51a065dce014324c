"""The feed-forward half of a block: columns, GELU, rows (Megatron-LM paper, section 3, figure 3a)."""

from torch import Tensor, nn

from colonnade.config.schema import ModelConfig
from colonnade.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from colonnade.tensor_parallel.parallel import Parallel


class MLP(nn.Module):
    """[s, b, h] ─Column─▶ [s, b, f/tp] ─GELU─▶ [s, b, f/tp] ─Row─▶ [s, b, h]"""

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        self.approximation = {"gelu": "none", "gelu_tanh": "tanh"}[model.activation]
        self.up = ColumnParallelLinear(model.hidden_size, model.ffn, parallel)
        self.down = RowParallelLinear(model.ffn, model.hidden_size, parallel)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; sequence parallel: [s/tp, b, h] -> [s/tp, b, h]."""
        y: Tensor = self.down(nn.functional.gelu(self.up(x), approximate=self.approximation))
        return y
