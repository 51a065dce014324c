"""The feed-forward half of a block: columns, GELU, rows (Megatron-LM paper, section 3, figure 3a)."""

from typing import Literal

from torch import Tensor, nn

from colonnade.mesh.mesh import Axis
from colonnade.tensor_parallel.gemm import WeightGradients
from colonnade.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

Activation = Literal["gelu", "gelu_tanh"]


class MLP(nn.Module):
    """[s, b, h] ─Column─▶ [s, b, f/tp] ─GELU─▶ [s, b, f/tp] ─Row─▶ [s, b, h]"""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        tp: Axis,
        *,
        activation: Activation,
        sequence_parallel: bool = False,
        weight_gradients: WeightGradients | None = None,
    ) -> None:
        super().__init__()
        self.approximation = {"gelu": "none", "gelu_tanh": "tanh"}[activation]
        self.up = ColumnParallelLinear(
            hidden_size,
            ffn_hidden_size,
            tp,
            sequence_parallel=sequence_parallel,
            weight_gradients=weight_gradients,
        )
        self.down = RowParallelLinear(
            ffn_hidden_size,
            hidden_size,
            tp,
            sequence_parallel=sequence_parallel,
            weight_gradients=weight_gradients,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; sequence parallel: [s/tp, b, h] -> [s/tp, b, h]."""
        y: Tensor = self.down(nn.functional.gelu(self.up(x), approximate=self.approximation))
        return y
