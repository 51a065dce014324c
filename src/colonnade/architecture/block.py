"""What one transformer block holds and costs: what `model/transformer.py` builds."""

from colonnade.architecture.statement import Weight
from colonnade.config.schema import ModelConfig


def block_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """In the order of the module tree. Weights before a residual addition begin narrower: √(2 · layers) times."""
    h, f, std = model.hidden_size, model.ffn, model.init_std
    output_std = std / (2 * model.num_layers) ** 0.5
    return (
        *norm_weights("attention_norm", h),
        Weight("attention.qkv.weight", (3 * h, h), cut=0, std=std),
        Weight("attention.qkv.bias", (3 * h,), cut=0),
        Weight("attention.output.weight", (h, h), cut=1, std=output_std),
        Weight("attention.output.bias", (h,)),
        *norm_weights("mlp_norm", h),
        Weight("mlp.up.weight", (f, h), cut=0, std=std),
        Weight("mlp.up.bias", (f,), cut=0),
        Weight("mlp.down.weight", (h, f), cut=1, std=output_std),
        Weight("mlp.down.bias", (h,)),
    )


def block_multiply_adds(model: ModelConfig) -> int:
    """For each token of a full-length sample: linear layers, and both products of causal attention (half of them)."""
    h = model.hidden_size
    return 4 * h * h + 2 * h * model.ffn + h * model.seq_length


def norm_weights(name: str, hidden_size: int) -> tuple[Weight, ...]:
    """Of a LayerNorm."""
    return Weight(f"{name}.weight", (hidden_size,), fill=1.0), Weight(f"{name}.bias", (hidden_size,))
