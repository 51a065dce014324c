"""Flat buffers: every weight has its place in them, and layers, gradients and optimizer look at the same memory."""

import pytest
import torch

from colonnade.config.schema import ModelConfig
from colonnade.data_parallel.buckets import FlatUnit, flatten, named_slots
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, paper_mesh
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_

CPU = torch.device("cpu")


def flat_model(
    dtype: torch.dtype = torch.float64, tp: Axis | None = None, *, tied: bool = True
) -> tuple[GPT, list[FlatUnit]]:
    tp = tp or Mesh().tp
    config = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, seq_length=6, tie_embeddings=tied)
    gpt = GPT(config, 37, tp).to(torch.promote_types(dtype, torch.float32))
    initialize_(gpt, tp, 1)
    return gpt, flatten(gpt.units(), tp, dtype=dtype, device=CPU)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_weight_is_a_view_of_its_units_buffers(dtype: torch.dtype, tied: bool) -> None:
    gpt, units = flat_model(dtype, tied=tied)
    slots = {name: (unit, slot) for name, unit, slot in named_slots(units)}
    assert slots.keys() == dict(gpt.named_parameters()).keys()
    for name, parameter in gpt.named_parameters():
        unit, slot = slots[name]
        assert parameter.dtype is dtype and parameter.grad is not None
        assert parameter.data_ptr() == slot.view(unit.parameters).data_ptr()
        assert parameter.grad.data_ptr() == slot.view(unit.gradients).data_ptr()
        assert parameter.grad.dtype is unit.master.dtype is torch.promote_types(dtype, torch.float32)


def test_weights_lie_apart_and_segments_cover_them() -> None:
    _, units = flat_model(tp=paper_mesh(Layout(tp=4), 3).tp)
    for unit in units:
        used = torch.zeros_like(unit.master)
        for slot in unit.slots:
            slot.view(used).add_(1)
        assert used.max() == 1
        assert [segment.start for segment in unit.segments[1:]] == [segment.stop for segment in unit.segments[:-1]]
        assert unit.segments[0].start == 0 and unit.segments[-1].stop == len(unit.master)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_segments_say_what_is_decayed_and_what_is_cut(tp_size: int) -> None:
    _, units = flat_model(tp=paper_mesh(Layout(tp=tp_size), 0).tp, tied=False)
    for unit in units:
        for slot in unit.slots:
            (segment,) = [s for s in unit.segments if s.start <= slot.start and slot.stop <= s.stop]
            matrix = slot.placement.parameter.ndim == 2
            assert segment.decayed == matrix, "matrices decay; biases and norms do not"
            assert segment.cut == (slot.placement.dim is not None)


def test_a_tied_weight_belongs_to_the_first_unit_that_has_it() -> None:
    _, units = flat_model(tied=True)
    names = [name for name, _, _ in named_slots(units)]
    assert "embedding.tokens.weight" in names and "head.output.weight" not in names
    _, units = flat_model(tied=False)
    assert "head.output.weight" in [name for name, _, _ in named_slots(units)]


def test_taking_weights_over_changes_no_number() -> None:
    gpt, _ = flat_model(torch.float32)
    fresh = GPT(ModelConfig(num_layers=2, hidden_size=16, num_heads=4, seq_length=6), 37, Mesh().tp)
    initialize_(fresh, Mesh().tp, 1)
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), fresh.parameters(), strict=True))


def test_bf16_parameters_are_rounded_masters() -> None:
    gpt, units = flat_model(torch.bfloat16)
    for unit in units:
        assert unit.master.dtype is torch.float32 and torch.equal(unit.parameters, unit.master.bfloat16())
        unit.master.mul_(1.0009765625)  # less than half a unit in the last place of bf16: kept by the master alone
        unit.master.add_(0.5)
        unit.publish()
    for name, unit, slot in named_slots(units):
        parameter = dict(gpt.named_parameters())[name]
        assert torch.equal(parameter, slot.view(unit.master).bfloat16())


def test_small_updates_are_not_lost_in_bf16() -> None:
    _, units = flat_model(torch.bfloat16)
    unit = units[1]
    before = unit.master.clone()
    for _ in range(100):
        unit.master.add_(before.abs() * 1e-4)
        unit.publish()
    moved = (unit.parameters.float() / before)[before != 0]
    assert ((moved - 1).abs() > 0.005).all(), "a hundred steps of a ten-thousandth make a hundredth"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_there_is_one_copy_where_none_is_rounded(dtype: torch.dtype) -> None:
    _, units = flat_model(dtype)
    assert all(unit.parameters is unit.master for unit in units)
