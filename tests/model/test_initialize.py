"""Initial weights: their distribution, and that no layout changes one of them."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade import randomness
from colonnade.config.model import ModelConfig
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.model import initialize
from colonnade.model.bert import BERT
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import placements
from tests.tensor_parallel.shards import window

CONFIG = ModelConfig(num_layers=2, hidden_size=64, num_heads=8, seq_length=32, tie_embeddings=False, init_std=0.02)
VOCAB = 509  # a prime


def initial(seed: int = 1, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    gpt = GPT(CONFIG, VOCAB, Parallel(Mesh().tp)).to(dtype)
    initialize_(gpt, Mesh().tp, seed)
    return {name: w.detach() for name, w in gpt.named_parameters()}


def test_matrices_are_normal_and_narrower_before_a_residual() -> None:
    for name, weight in initial().items():
        if weight.ndim == 2:
            before_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = 0.02 / sqrt(4) if before_residual else 0.02
            n = weight.numel()
            assert abs(weight.mean()) < 5 * std / sqrt(n), name
            assert abs(weight.std() - std) < 5 * std / sqrt(2 * n), name
            chances = torch.special.ndtr(weight.flatten() / std).sort().values
            distance = (chances - (torch.arange(n) + 0.5) / n).abs().max()
            assert distance * sqrt(n) < 2.7, f"{name} is no normal distribution"


def test_a_masked_models_weights_begin_as_wide() -> None:
    """Of its head too: only weights before a residual are narrower."""
    shape = {"num_layers": 2, "hidden_size": 64, "num_heads": 8, "seq_length": 32, "init_std": 0.03}
    model = ModelConfig(kind="bert", tie_embeddings=False, **shape)
    bert = BERT(model, VOCAB, Parallel(Mesh().tp)).double()
    for parameter in bert.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    initialize_(bert, Mesh().tp, 1)
    for name, weight in bert.named_parameters():
        if weight.ndim == 1:
            assert (weight == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all(), name
            continue
        std = 0.03 / sqrt(4) if name.endswith(("attention.output.weight", "mlp.down.weight")) else 0.03
        values = weight[:VOCAB] if len(weight) > VOCAB else weight
        assert abs(values.std() - std) < 5 * std / sqrt(2 * values.numel()), name


@pytest.mark.parametrize(("at_once", "rows"), [(1 << 22, VOCAB), (64 * 10, 10)])
def test_numbers_are_drawn_on_the_device_of_the_run(at_once: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them at a time on a GPU, and the same: all of a weight, or some rows of one that is larger."""
    monkeypatch.setattr(initialize, "_ON_A_GPU", at_once)
    drawn: list[tuple[str, int]] = []

    def normal(keys: Any, start: int, count: int, device: torch.device) -> Tensor:
        drawn.append((device.type, len(keys)))
        return randomness.normal(keys, start, count)

    monkeypatch.setattr(initialize, "normal", normal)
    gpt = GPT(CONFIG, VOCAB, Parallel(Mesh().tp)).double()
    initialize_(gpt, Mesh().tp, 1, "cuda")
    assert {device for device, _ in drawn} == {"cuda"} and max(count for _, count in drawn) == rows
    assert all(torch.equal(weight, initial()[name]) for name, weight in gpt.named_parameters())


def test_norms_are_one_and_biases_zero() -> None:
    for name, weight in initial().items():
        if weight.ndim == 1:
            assert (weight == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name


def test_weights_are_strangers_to_each_other() -> None:
    matrices = [weight.flatten()[:1024] for weight in initial().values() if weight.ndim == 2]
    correlation = torch.corrcoef(torch.stack(matrices)).fill_diagonal_(0.0)
    assert correlation.abs().max() < 6 / sqrt(1024)


@pytest.mark.parametrize("elements", [1, 300, 1 << 30])
def test_it_does_not_matter_how_many_rows_are_drawn_at_once(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = initial()
    monkeypatch.setattr(initialize, "_ELEMENTS_AT_ONCE", elements)
    assert all(torch.equal(weight, whole[name]) for name, weight in initial().items())


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_shards_are_boxes_of_the_whole_to_the_bit(tp_size: int) -> None:
    whole = initial()
    for rank in range(tp_size):
        tp = paper_mesh(Layout(tp=tp_size), rank).tp
        gpt = GPT(CONFIG, VOCAB, Parallel(tp)).double()
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.fill_(torch.nan)
        initialize_(gpt, tp, 1)
        for place in placements(gpt, tp):
            assert torch.equal(place.real(place.parameter), window(place, whole[place.name])), place.name
            if place.dim is not None:
                rest = place.parameter.narrow(place.dim, place.extent, place.parameter.shape[place.dim] - place.extent)
                assert not rest.any() and rest.isfinite().all(), "padding is zero"


def test_the_number_format_only_rounds() -> None:
    exact, rounded = initial(), initial(dtype=torch.float32)
    assert all(torch.equal(exact[name].float(), weight) for name, weight in rounded.items())


def test_another_seed_gives_other_weights() -> None:
    one, other = initial(1), initial(2)
    assert all(not torch.equal(weight, other[name]) for name, weight in one.items() if weight.ndim == 2)


def test_a_golden_weight() -> None:
    """Every run starts from these: they never change."""
    weights = initial()
    assert weights["blocks.1.mlp.down.weight"][3, :2].tolist() == [0.0037156395532624625, -0.0077495881161851535]
    assert weights["embedding.tokens.weight"][508, 63].item() == -0.004352739833167591
