"""GPT-2 once more, as plainly as torch allows: batch first, whole weights, autograd, one sample's masks at a time.

What ours is compared with. It shares nothing with it but the names of the weights and the random streams.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, layer_norm

from colonnade.config.model import ModelConfig
from colonnade.randomness import Purpose, drop_probability, keep_mask, stream_keys

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Drops:
    """Where a micro-batch's dropout masks come from."""

    seed: int
    samples: list[int]

    def hidden(self, x: Tensor, drop: float, purpose: Purpose, layer: int) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        keys = [stream_keys(self.seed, purpose, layer, last=[sample]) for sample in self.samples]
        return self._drop(x, [keep_mask(key, 0, x[0].numel(), drop).view(x[0].shape) for key in keys], drop)

    def attention(self, x: Tensor, drop: float, layer: int) -> Tensor:
        """[b, n, s, s] -> [b, n, s, s]"""
        _, n, s, _ = x.shape
        names = [(self.seed, Purpose.ATTENTION_DROPOUT, layer, sample) for sample in self.samples]
        keep = [
            torch.stack([keep_mask(stream_keys(*name, last=[i]), 0, s * s, drop) for i in range(n)]) for name in names
        ]
        return self._drop(x, [mask.view(n, s, s) for mask in keep], drop)

    @staticmethod
    def _drop(x: Tensor, keep: list[Tensor], drop: float) -> Tensor:
        return torch.where(torch.stack(keep), x / (1 - drop_probability(drop)), 0.0)


def plain_logits(model: ModelConfig, weights: Weights, tokens: Tensor, drops: Drops | None = None) -> Tensor:
    """int64 [b, s] -> [b, s, v]"""
    x = weights["embedding.tokens.weight"][tokens]
    if model.position == "learned":
        x = x + weights["embedding.positions.weight"][: tokens.shape[1]]
    if model.embedding_norm:
        x = norm(model, weights, "embedding.norm", x)
    if drops:
        x = drops.hidden(x, model.dropout, Purpose.EMBEDDING_DROPOUT, 0)
    for layer in range(model.num_layers):
        x = plain_block(model, weights, x, layer, drops)
    if model.norm_position == "pre":
        x = norm(model, weights, "head.norm", x)
    output = weights.get("head.output.weight", weights["embedding.tokens.weight"])
    return x @ output.t()


def plain_block(model: ModelConfig, weights: Weights, x: Tensor, layer: int, drops: Drops | None) -> Tensor:
    """[b, s, h] -> [b, s, h]"""
    block = {name.removeprefix(f"blocks.{layer}."): w for name, w in weights.items() if f"blocks.{layer}." in name}
    pre = model.norm_position == "pre"
    y = norm(model, block, "attention_norm", x) if pre else x
    y = plain_attention(model, block, y, layer, drops)
    x = x + (drops.hidden(y, model.dropout, Purpose.RESIDUAL_DROPOUT, 2 * layer) if drops else y)
    if not pre:
        x = norm(model, block, "attention_norm", x)
    y = norm(model, block, "mlp_norm", x) if pre else x
    y = y @ block["mlp.up.weight"].t() + block["mlp.up.bias"]
    y = gelu(y, approximate="tanh" if model.activation == "gelu_tanh" else "none")
    y = y @ block["mlp.down.weight"].t() + block["mlp.down.bias"]
    x = x + (drops.hidden(y, model.dropout, Purpose.RESIDUAL_DROPOUT, 2 * layer + 1) if drops else y)
    return x if pre else norm(model, block, "mlp_norm", x)


def norm(model: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """LayerNorm over the last dim."""
    return layer_norm(x, (model.hidden_size,), weights[f"{name}.weight"], weights[f"{name}.bias"], model.norm_epsilon)


def plain_attention(model: ModelConfig, block: Weights, x: Tensor, layer: int, drops: Drops | None) -> Tensor:
    """[b, s, h] -> [b, s, h], one head after the other."""
    s, d = x.shape[1], model.head_width
    heads = []
    for n in range(model.num_heads):
        first = 3 * d * n
        q, k, v = (
            x @ block["attention.qkv.weight"][at : at + d].t() + block["attention.qkv.bias"][at : at + d]
            for at in (first, first + d, first + 2 * d)
        )
        scores = q @ k.transpose(1, 2) / d**0.5
        if model.position == "alibi":
            scores = scores + plain_slopes(model.num_heads)[n] * (torch.arange(s) - torch.arange(s)[:, None])
        heads.append((torch.where(torch.ones(s, s).tril() > 0, scores, -torch.inf).softmax(-1), v))
    probabilities = torch.stack([p for p, _ in heads], 1)
    if drops:
        probabilities = drops.attention(probabilities, model.attention_dropout, layer)
    y = torch.cat([probabilities[:, n] @ v for n, (_, v) in enumerate(heads)], -1)
    return y @ block["attention.output.weight"].t() + block["attention.output.bias"]


def plain_slopes(num_heads: int) -> list[float]:
    """ALiBi's slopes, as the code that was published with the paper has them."""
    if math.log2(num_heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(num_heads) - 3)))
        return [start * start**i for i in range(num_heads)]
    below = 2 ** math.floor(math.log2(num_heads))
    return plain_slopes(below) + plain_slopes(2 * below)[0::2][: num_heads - below]


def plain_loss(logits: Tensor, labels: Tensor, mask: Tensor, loss_tokens: float) -> Tensor:
    """Σ mask · cross entropy / loss_tokens: logits [b, s, v], labels and mask [b, s] -> []"""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / loss_tokens


def leaves(weights: Weights) -> dict[str, nn.Parameter]:
    """Copies of the weights that collect gradients."""
    return {name: nn.Parameter(w.detach().clone()) for name, w in weights.items()}
