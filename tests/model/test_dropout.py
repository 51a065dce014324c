"""Where a model drops: each place with a mask of its own, in every family."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from colonnade.kernels.dropout import Masks
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.randomness import Purpose
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from tests.model.whole import hidden
from tests.parity.runs import CPU, SERIAL, Case, Way, configured, microbatches

BLOCKS = ("gpt", "llama", "neox", "bert", "t5")
RANKS = 2


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Purpose, int]]:
    """How often the masks of each place are asked for: what for, and its number."""
    found = Counter[tuple[Purpose, int]]()

    def recording(name: str) -> None:
        original = getattr(Masks, name)

        def draw(self: Masks, *given: Any, **more: Any) -> Tensor:
            found[(Purpose.ATTENTION_DROPOUT, given[0]) if name == "attention" else given[:2]] += 1
            mask: Tensor = original(self, *given, **more)
            return mask

        monkeypatch.setattr(Masks, name, draw)

    for name in ("hidden", "features", "attention"):
        recording(name)
    return found


@pytest.mark.parametrize("block", BLOCKS)
def test_no_two_places_drop_alike(block: Any, drawn: Counter[tuple[Purpose, int]]) -> None:
    """Attentions and sums into the stream are numbered through the model, as its sublayers are."""
    case = Case(block=block, num_layers=4)
    state = build_state(configured(case, SERIAL), Mesh(), case.vocab_size, CPU)
    train_step(state, microbatches(case, SERIAL, 0, Mesh()), Mesh(), configured(case, SERIAL).train)
    assert set(drawn.values()) == {1}
    sublayers = [each.name for unit in state.model.architecture.units for each in unit.sublayers]
    numbers = {purpose: sorted(number for found, number in drawn if found == purpose) for purpose, _ in drawn}
    assert numbers[Purpose.RESIDUAL_DROPOUT] == list(range(len(sublayers)))
    assert numbers[Purpose.ATTENTION_DROPOUT] == list(range(sum(name != "mlp" for name in sublayers)))


@pytest.mark.parametrize("block", BLOCKS)
def test_without_dropout_no_mask_is_drawn(block: Any, drawn: Counter[tuple[Purpose, int]]) -> None:
    case = Case(block=block, drop=0.0)
    state = build_state(configured(case, SERIAL), Mesh(), case.vocab_size, CPU)
    train_step(state, microbatches(case, SERIAL, 0, Mesh()), Mesh(), configured(case, SERIAL).train)
    assert not drawn


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("block", [*BLOCKS, "labels"])
def test_each_rank_drops_its_own_part(block: Any, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heads and its inner columns; of the stream its positions where that is cut, else all of them."""
    begins: list[tuple[str, int, int]] = []

    def noted(name: str, begin: Any) -> None:
        original = getattr(Masks, name)

        def draw(self: Masks, *given: Any) -> Tensor:
            begins.append((name, *begin(*given)))
            mask: Tensor = original(self, *given)
            return mask

        monkeypatch.setattr(Masks, name, draw)

    noted("hidden", lambda purpose, layer, shape, drop, device, first=0: (first, len(range(shape[0]))))
    noted("features", lambda purpose, layer, shape, columns, drop, device: (columns.start, len(columns)))
    noted("attention", lambda layer, heads, *sizes: (heads.start, len(heads)))
    case, way = Case(block=block), Way(tp=RANKS, sequence_parallel=sequence_parallel)
    for rank in range(RANKS):
        mesh, config = paper_mesh(Layout(tp=RANKS), rank), configured(case, way)
        state = build_state(config, mesh, case.vocab_size, CPU)
        begins.clear()
        train_step(state, microbatches(case, way, 0, mesh), mesh, config.train)
        assert {name for name, *_ in begins} >= {"hidden", "attention"}
        for name, first, count in begins:
            assert first == (rank * count if sequence_parallel or name != "hidden" else 0), name


def test_adapters_drop_for_samples_that_have_masks_alone() -> None:
    """An evaluation between two steps of training drops nothing."""
    case = Case(parts="lora")
    model: Any = build_state(configured(case, SERIAL), Mesh(), case.vocab_size, CPU).model
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter)
    tokens = torch.arange(16).view(8, 2) % case.vocab_size
    with torch.no_grad():
        before, dropped, after = (hidden(model, tokens, masks) for masks in (None, Masks(1, np.arange(2)), None))
    assert torch.equal(before, after) and not torch.equal(before, dropped)
