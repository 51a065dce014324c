"""One transformer block: attention and MLP, LayerNorm before each, the residual around each.

That is figure 7b of the Megatron-LM paper, the order in which large models train stably.
"""

from torch import Tensor, nn

from colonnade.config.schema import ModelConfig
from colonnade.mesh.mesh import Axis
from colonnade.mesh.randomness import Purpose
from colonnade.model.attention import Attention, KeyValueCache
from colonnade.model.dropout import Masks, dropout
from colonnade.model.mlp import MLP


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); two all-reduces forward and two backward."""

    def __init__(self, model: ModelConfig, layer: int, tp: Axis) -> None:
        super().__init__()
        output_std = model.init_std / (2 * model.num_layers) ** 0.5  # before a residual: keeps the stream's variance
        h = model.hidden_size
        self.layer, self.drop = layer, model.dropout
        self.attention_norm = nn.LayerNorm(h, eps=model.norm_epsilon)
        self.attention = Attention(
            h, model.num_heads, tp, drop=model.attention_dropout, init_std=model.init_std, output_std=output_std
        )
        self.mlp_norm = nn.LayerNorm(h, eps=model.norm_epsilon)
        self.mlp = MLP(h, model.ffn, tp, activation=model.activation, init_std=model.init_std, output_std=output_std)

    def forward(self, x: Tensor, masks: Masks | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]"""
        y = self.attention(self.attention_norm(x), self.layer, masks, cache)
        x = x + dropout(y, self.drop, masks, Purpose.RESIDUAL_DROPOUT, 2 * self.layer)
        y = self.mlp(self.mlp_norm(x))
        return x + dropout(y, self.drop, masks, Purpose.RESIDUAL_DROPOUT, 2 * self.layer + 1)
