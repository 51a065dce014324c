"""What one transformer block holds and costs: what `model/transformer.py` builds."""

from collections.abc import Iterator
from math import prod

from colonnade.architecture.statement import Weight
from colonnade.config.model import ModelConfig


def block_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """In the order of the module tree. Weights before a residual addition begin narrower: √(2 · layers) times."""
    return (*norm_weights("attention_norm", model), *_attention(model), *norm_weights("mlp_norm", model), *_mlp(model))


def _attention(model: ModelConfig) -> Iterator[Weight]:
    n, m, d, std = model.num_heads, model.key_value_heads, model.head_width, model.init_std
    bias = model.has_query_key_value_bias
    if m == n:
        yield from _columns(model, "attention.qkv", 3 * n * d, std, bias=bias)
    else:
        yield from _columns(model, "attention.query", n * d, std, bias=bias)
        yield from _columns(model, "attention.key_value", 2 * m * d, std, bias=bias, groups=m)
    if model.query_key_norm:
        yield Weight("attention.query_norm.weight", (d,), fill=1.0, is_partial=True)
        yield Weight("attention.key_norm.weight", (d,), fill=1.0, is_partial=True)
    yield from _rows(model, "attention.output", n * d, _before_residual(model))


def _mlp(model: ModelConfig) -> Iterator[Weight]:
    for name in ("mlp.gate", "mlp.up") if model.is_gated else ("mlp.up",):
        yield from _columns(model, name, model.ffn, model.init_std, bias=model.bias)
    yield from _rows(model, "mlp.down", model.ffn, _before_residual(model))


def _columns(
    model: ModelConfig, name: str, out: int, std: float, *, bias: bool, groups: int | None = None
) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (out, model.hidden_size), cut=0, std=std, groups=groups)
    if bias:
        yield Weight(f"{name}.bias", (out,), cut=0, groups=groups)


def _rows(model: ModelConfig, name: str, size: int, std: float) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (model.hidden_size, size), cut=1, std=std)
    if model.bias:
        yield Weight(f"{name}.bias", (model.hidden_size,))


def _before_residual(model: ModelConfig) -> float:
    """[standard deviation] Keeps the residual stream's variance, whatever the number of layers."""
    return float(model.init_std / (2 * model.num_layers) ** 0.5)


def block_multiply_adds(model: ModelConfig) -> int:
    """For each token of a full-length sample: linear layers, and both products of attention (causal: half of them; in
    a sliding window, no more keys than it is long).
    """
    inner = model.num_heads * model.head_width
    linear = sum(prod(weight.shape) for weight in block_weights(model) if len(weight.shape) == 2)
    return linear + 2 * inner * _keys(model) // 2 if model.is_causal else linear + 2 * inner * model.seq_length


def _keys(model: ModelConfig) -> int:
    """Twice the mean number of keys that a query sees, the causal half of a square counted as half of it."""
    s, window = model.seq_length, min(model.window or model.seq_length, model.seq_length)
    return 2 * window - window * window // s


def norm_weights(name: str, model: ModelConfig) -> tuple[Weight, ...]:
    """Of a normalisation of the residual stream."""
    weight = Weight(f"{name}.weight", (model.hidden_size,), fill=1.0)
    has_bias = model.norm == "layernorm" and model.bias
    return (weight, Weight(f"{name}.bias", (model.hidden_size,))) if has_bias else (weight,)
