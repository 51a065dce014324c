"""The MLP against torch's Linear, GELU, Linear."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from colonnade.architecture.huggingface.common import GELUS
from colonnade.architecture.sites import MLP_HIDDEN
from colonnade.config.model import ModelConfig
from colonnade.errors import LayoutError
from colonnade.kernels.probe import summary
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh, paper_mesh
from colonnade.model.mlp import MLP
from colonnade.tensor_parallel.parallel import Parallel
from tests.distributed import run_on_ranks
from tests.tensor_parallel.shards import assert_gradients, drawn, load_shards_

HIDDEN, FFN = 6, 20
APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}


def beside_torch(rank: int, num_ranks: int) -> None:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    for activation, approximation in APPROXIMATIONS.items():
        layers = nn.Sequential(
            nn.Linear(HIDDEN, FFN), nn.GELU(approximate=approximation), nn.Linear(FFN, HIDDEN)
        ).double()
        names = {"0.weight": "up.weight", "0.bias": "up.bias", "2.weight": "down.weight", "2.bias": "down.bias"}
        with torch.no_grad():
            for i, parameter in enumerate(layers.parameters()):
                parameter.copy_(drawn(*parameter.shape, seed=i))
        mlp = MLP(ModelConfig(hidden_size=HIDDEN, ffn_hidden_size=FFN, activation=activation), Parallel(tp)).double()
        load_shards_(mlp, tp, {names[name]: p for name, p in layers.named_parameters()})
        x, twins = (drawn(5, 3, HIDDEN, seed=9).requires_grad_() for _ in range(2))
        y, expected = mlp(x), layers(twins)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        for out in (y, expected):
            out.backward(drawn(5, 3, HIDDEN, seed=10))
        torch.testing.assert_close(x.grad, twins.grad, rtol=1e-11, atol=1e-11)
        assert_gradients(mlp, tp, {names[name]: p.grad for name, p in layers.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_mlp_is_torchs(tp_size: int) -> None:
    run_on_ranks(beside_torch, tp_size)


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("swiglu", nn.functional.silu),
        ("geglu_tanh", partial(nn.functional.gelu, approximate="tanh")),
        ("relu", nn.functional.relu),
    ],
)
def test_other_activations_are_torchs_and_gate_where_they_do(
    activation: str, function: Callable[[Tensor], Tensor]
) -> None:
    """What thermometers read is what the last layer multiplies."""
    model = ModelConfig(hidden_size=HIDDEN, ffn_hidden_size=FFN, activation=activation)
    mlp = MLP(model, Parallel(Axis("tp"))).double()
    with torch.no_grad():
        for number, parameter in enumerate(mlp.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number))
    x, weights = drawn(5, 3, HIDDEN, seed=9), dict(mlp.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    up = linear("up", x)
    inside = function(up) if mlp.gate is None else function(linear("gate", x)) * up
    assert (mlp.gate is None) == (activation == "relu")
    mlp.probe.begin(torch.float64, [MLP_HIDDEN])
    mlp.probe.enter("blocks.0", x)
    torch.testing.assert_close(mlp(x), linear("down", inside), rtol=1e-12, atol=1e-12)
    read = mlp.probe.rows["blocks.0", MLP_HIDDEN]
    torch.testing.assert_close(read, summary(inside.detach(), torch.finfo(torch.float64).max / 2))


def test_a_width_that_tp_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"parallel\.tp = 3 does not divide"):
        MLP(ModelConfig(hidden_size=6, ffn_hidden_size=20), Parallel(paper_mesh(Layout(tp=3), 0).tp))


@pytest.mark.parametrize("name", GELUS)
def test_each_name_of_gelu_is_that_function_of_transformers(name: str) -> None:
    """The exact one and its approximation differ by 4e-4."""
    theirs = pytest.importorskip("transformers.activations").ACT2FN[name]
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    ours = nn.functional.gelu(x, approximate=APPROXIMATIONS[GELUS[name]])
    torch.testing.assert_close(ours, theirs(x), rtol=1e-7, atol=1e-8)
