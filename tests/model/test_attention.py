"""Attention against torch's own, whole and cut by heads."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.config.model import ModelConfig
from colonnade.errors import LayoutError
from colonnade.kernels.dropout import Masks, ProbabilityDropout
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.model.attention import Attention
from colonnade.tensor_parallel.parallel import Parallel
from tests.blocks import LLAMA_BLOCK
from tests.distributed import run_on_ranks
from tests.tensor_parallel.shards import assert_gradients, drawn, load_shards_

B, N, S, D = 3, 4, 6, 8
HIDDEN = N * D


def torchs() -> tuple[nn.MultiheadAttention, dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    """(torch's module, our names' weights, their gradients, x with gradient, y)"""
    twin = nn.MultiheadAttention(HIDDEN, N, bias=True).double()
    with torch.no_grad():
        for i, (_, parameter) in enumerate(sorted(twin.named_parameters())):
            parameter.copy_(drawn(*parameter.shape, seed=20 + i) * 0.3)
    x = drawn(S, B, HIDDEN, seed=7).requires_grad_()
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    y, _ = twin(x, x, x, attn_mask=future, need_weights=False)
    y.backward(drawn(S, B, HIDDEN, seed=8))
    return twin, renamed(twin, False), renamed(twin, True), x, y.detach()


def renamed(twin: nn.MultiheadAttention, gradients: bool) -> dict[str, Tensor]:
    """torch's rows are [(q, k, v), head, d], ours [head, (q, k, v), d]."""

    def of(parameter: Any) -> Tensor:
        t: Tensor = parameter.grad if gradients else parameter.detach()
        return t

    def by_head(t: Tensor) -> Tensor:
        return t.view(3, N, D, *t.shape[1:]).transpose(0, 1).flatten(0, 2)

    return {
        "qkv.weight": by_head(of(twin.in_proj_weight)),
        "qkv.bias": by_head(of(twin.in_proj_bias)),
        "output.weight": of(twin.out_proj.weight),
        "output.bias": of(twin.out_proj.bias),
    }


def shape(num_heads: int, drop: float) -> ModelConfig:
    return ModelConfig(hidden_size=HIDDEN, num_heads=num_heads, attention_dropout=drop)


def beside_torch(rank: int, num_ranks: int) -> None:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    _, weights, gradients, x, expected = torchs()
    attention = Attention(shape(N, 0.5), Parallel(tp)).double()
    load_shards_(attention, tp, weights)
    mine = x.detach().clone().requires_grad_()
    y = attention(mine, 0, None)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    y.backward(drawn(S, B, HIDDEN, seed=8))
    torch.testing.assert_close(mine.grad, x.grad, rtol=1e-11, atol=1e-11)
    assert_gradients(attention, tp, gradients)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_attention_is_torchs(tp_size: int) -> None:
    run_on_ranks(beside_torch, tp_size)


@pytest.mark.parametrize(
    ("of_all", "of_these", "biases"),
    [
        (True, None, {"qkv.bias", "output.bias"}),
        (True, False, {"output.bias"}),
        (False, None, set()),
        (False, True, {"qkv.bias"}),
    ],
)
def test_queries_keys_and_values_have_biases_as_they_are_told(
    of_all: bool, of_these: bool | None, biases: set[str]
) -> None:
    model = ModelConfig(hidden_size=HIDDEN, num_heads=N, bias=of_all, query_key_value_bias=of_these)
    names = [name for name, _ in Attention(model, Parallel(Mesh().tp)).named_parameters()]
    assert {name for name in names if name.endswith("bias")} == biases


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_drops_with_the_masks_of_its_own_heads(rank: int) -> None:
    asked: list[range] = []

    class Recorded(Masks):
        def attention(self, layer: int, heads: range, drop: float) -> ProbabilityDropout:
            asked.append(heads)
            return super().attention(layer, heads, drop)

    tp = paper_mesh(Layout(tp=4), rank).tp
    attention = Attention(shape(8, 0.5), Parallel(tp))
    attention(torch.ones(S, B, HIDDEN), 3, Recorded(1, torch.arange(B).numpy()))
    assert asked == [range(2 * rank, 2 * rank + 2)]


def test_heads_that_tp_does_not_divide_are_refused() -> None:
    tp = paper_mesh(Layout(tp=4), 0).tp
    with pytest.raises(LayoutError, match=r"parallel\.tp = 4 does not divide model\.num_heads = 6"):
        Attention(shape(6, 0.0), Parallel(tp))


def test_no_dropout_without_masks() -> None:
    attention = Attention(shape(N, 0.5), Parallel(Mesh().tp)).double()
    load_shards_(attention, Mesh().tp, torchs()[1])
    x = drawn(S, B, HIDDEN, seed=7)
    masks = Masks(1, torch.arange(B).numpy())
    assert not torch.allclose(attention(x, 0, masks), attention(x, 0, None))
    attention.drop = 0.0
    assert torch.equal(attention(x, 0, masks), attention(x, 0, None))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_rank_caches_the_heads_of_keys_that_its_queries_use(tp_size: int) -> None:
    """A share of them, or the one of which other ranks have a copy; what it attends to is the same as without."""
    model = ModelConfig(**LLAMA_BLOCK, hidden_size=HIDDEN, num_heads=N, num_key_value_heads=2)
    for rank in range(tp_size):
        attention = Attention(model, Parallel(paper_mesh(Layout(tp=tp_size), rank).tp)).double()
        with torch.no_grad():
            for place, weight in enumerate(attention.parameters()):
                weight.copy_(drawn(*weight.shape, seed=place))
            x, cache = drawn(S, 1, HIDDEN, seed=7), attention.empty_cache(S)
            assert cache.keys.shape == cache.values.shape == (1, max(1, 2 // tp_size), S, D)
            pieces = [attention(part, 0, None, cache) for part in (x[:4], x[4:5], x[5:])]
            torch.testing.assert_close(torch.cat(pieces), attention(x, 0, None), rtol=1e-12, atol=1e-12)
