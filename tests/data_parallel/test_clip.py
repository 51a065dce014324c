"""The gradient norm counts each weight once, whoever holds it."""

import pytest
import torch
from torch import Tensor

from colonnade.data_parallel.buckets import named_slots
from colonnade.data_parallel.clip import clip_factor, gradient_norm
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import build_mesh, paper_mesh
from tests.data_parallel.test_buckets import flat_model
from tests.distributed import run_on_ranks
from tests.tensor_parallel.shards import drawn, window


def whole_gradients() -> dict[str, Tensor]:
    gpt, _ = flat_model(tied=False)
    return {name: drawn(*w.shape, seed=i) for i, (name, w) in enumerate(gpt.named_parameters())}


def norm_on_a_rank(rank: int, num_ranks: int, layout: Layout) -> float:
    mesh = build_mesh(layout, rank)
    _, units = flat_model(tp=mesh.tp, tied=False)
    whole = whole_gradients()
    for name, unit, slot in named_slots(units):
        slot.placement.real(slot.view(unit.gradients)).copy_(window(slot.placement, whole[name]))
    return gradient_norm(units, mesh).item()


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=4), Layout(dp=2), Layout(tp=2, dp=2)], ids=str)
def test_the_norm_is_torchs_norm_of_the_whole(layout: Layout) -> None:
    expected = torch.nn.utils.get_total_norm(list(whole_gradients().values())).item()
    norms = run_on_ranks(norm_on_a_rank, layout.num_ranks, layout)
    assert len(set(norms)) == 1, "equal to the bit on all ranks, or they would clip differently"
    assert norms[0] == pytest.approx(expected, rel=1e-13)


def test_it_sends_one_number() -> None:
    mesh = paper_mesh(Layout(tp=4, dp=2), 5)
    _, units = flat_model(tp=mesh.tp)
    gradient_norm(units, mesh)
    assert [(e.operation, e.axis, e.bytes) for e in mesh.ledger.entries] == [("all_reduce", "model", 8)]


@pytest.mark.parametrize("exponent", [-30, 30])
def test_norms_far_from_one(exponent: int) -> None:
    """Squares of fp32 gradients would overflow at 2⁶⁴ and vanish at 2⁻⁷⁵; their sum is made in float64."""
    mesh = paper_mesh(Layout(), 0)
    _, units = flat_model(torch.float32)
    for unit in units:
        unit.gradients.fill_(2.0**exponent)
    count = sum(len(unit.gradients) for unit in units)
    assert gradient_norm(units, mesh).item() == pytest.approx(2.0**exponent * count**0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("norm", "limit", "factor"), [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (1e9, 0.0, 1.0)]
)
def test_clip_factor(norm: float, limit: float, factor: float) -> None:
    assert clip_factor(torch.tensor(norm, dtype=torch.float64), limit).item() == factor
