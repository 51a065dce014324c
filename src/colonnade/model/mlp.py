"""The feed-forward half of a block: columns, an element-wise function, rows (Megatron-LM paper, section 3, figure 3a).

swiglu and geglu_tanh have two column layers, of which one gates the other (Shazeer: "GLU Variants Improve
Transformer", 2020).
"""

from torch import Tensor, nn

from colonnade.architecture.sites import MLP_HIDDEN
from colonnade.config.model import ModelConfig
from colonnade.kernels.gelu import gelu
from colonnade.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, columns
from colonnade.tensor_parallel.parallel import Parallel

LEDGER_PART = "mlp"
"""What the ledger calls the part of a block that sends from here."""
GELU = {"gelu": "none", "gelu_tanh": "tanh", "geglu_tanh": "tanh"}
"""torch's name of each approximation; what gates by GELU has that of its gate."""


class MLP(nn.Module):
    """[s, b, h] ─Column─▶ [s, b, f/tp] ─GELU or ReLU, or SiLU or GELU · gated─▶ [s, b, f/tp] ─Row─▶ [s, b, h]"""

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        h, f, bias = model.hidden_size, model.ffn, model.bias
        self.probe, self.products = parallel.probe, parallel.products
        self.activation, self.approximation = model.activation, GELU.get(model.activation, "none")
        self.gate = ColumnParallelLinear(h, f, parallel, bias=bias) if model.is_gated else None
        self.up = ColumnParallelLinear(h, f, parallel, bias=bias)
        self.down = RowParallelLinear(f, h, parallel, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; sequence parallel: [s/tp, b, h] -> [s/tp, b, h]."""
        y: Tensor = self.down(self.inner(x))
        return y

    def inner(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, f/tp]; sequence parallel: [s/tp, b, h] -> [s, b, f/tp]."""
        if self.gate is None:
            y = self._activated(self.up(x))
        else:
            gate, up = columns(x, self.gate, self.up)
            y = self._activated(gate) * up
        self.probe.see(MLP_HIDDEN, y)
        return y

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "relu":
            return nn.functional.relu(x)
        if self.activation == "swiglu":
            return nn.functional.silu(x)
        return gelu(x, self.approximation, self.products)
