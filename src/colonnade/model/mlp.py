"""The feed-forward half of a block: columns, an element-wise function, rows (Megatron-LM paper, section 3, figure 3a).

swiglu has two column layers, of which one gates the other (Shazeer: "GLU Variants Improve Transformer", 2020).
"""

from torch import Tensor, nn

from colonnade.config.model import ModelConfig
from colonnade.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, columns
from colonnade.tensor_parallel.parallel import Parallel

LEDGER_PART = "mlp"
"""What the ledger calls the part of a block that sends from here."""
GELU = {"gelu": "none", "gelu_tanh": "tanh"}
"""torch's name of each approximation."""


class MLP(nn.Module):
    """[s, b, h] ─Column─▶ [s, b, f/tp] ─GELU, or SiLU · gated─▶ [s, b, f/tp] ─Row─▶ [s, b, h]"""

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        h, f, bias = model.hidden_size, model.ffn, model.bias
        self.approximation = GELU.get(model.activation, "")
        self.gate = ColumnParallelLinear(h, f, parallel, bias=bias) if model.activation == "swiglu" else None
        self.up = ColumnParallelLinear(h, f, parallel, bias=bias)
        self.down = RowParallelLinear(f, h, parallel, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; sequence parallel: [s/tp, b, h] -> [s/tp, b, h]."""
        if self.gate is None:
            inner = nn.functional.gelu(self.up(x), approximate=self.approximation)
        else:
            gate, up = columns(x, self.gate, self.up)
            inner = nn.functional.silu(gate) * up
        y: Tensor = self.down(inner)
        return y
