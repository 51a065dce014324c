"""Sums over dp: of every gradient, once, after the last micro-batch alone, and while backward still runs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.data_parallel.buckets import named_slots
from colonnade.data_parallel.reduce import GradientReducer
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from tests.data_parallel.test_buckets import flat_model
from tests.distributed import run_on_ranks

MICROBATCHES = 3
UNITS = ["head", "blocks.1", "blocks.0", "embedding"]  # as backward leaves them


def accumulate(mesh: Mesh, start: int, count: int, *, armed: bool = True) -> dict[str, Tensor]:
    """Gradients of micro-batches start … start + count, summed over the dp axis."""
    gpt, units = flat_model(tp=mesh.tp, tied=False)
    reducer = GradientReducer(gpt.units(), units, mesh.dp)
    for i in range(start, start + count):
        tokens = torch.randint(0, 37, (7, 2), generator=torch.Generator().manual_seed(i))
        if armed and i == start + count - 1:
            reducer.arm()
        gpt(tokens[:-1], tokens[1:], torch.ones(6, 2, dtype=torch.float64)).backward()
    reducer.finish()
    return {name: slot.view(unit.gradients).clone() for name, unit, slot in named_slots(units)}


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("armed", [True, False])
def test_every_rank_has_the_sum_of_all_microbatches(dp: int, armed: bool) -> None:
    def on_a_rank(rank: int, num_ranks: int) -> dict[str, Tensor]:
        return accumulate(build_mesh(Layout(dp=num_ranks), rank), MICROBATCHES * rank, MICROBATCHES, armed=armed)

    expected = accumulate(Mesh(), 0, dp * MICROBATCHES)
    ranks = run_on_ranks(on_a_rank, dp)
    for gradients in ranks:
        for name, gradient in gradients.items():
            assert torch.equal(gradient, ranks[0][name]), name
            assert (gradient - expected[name]).abs().max() <= 1e-13 * expected[name].abs().max(), name


def test_one_reduction_a_unit_each_as_backward_leaves_it() -> None:
    mesh = paper_mesh(Layout(dp=4), 1)
    gpt, units = flat_model(tied=False)
    sizes = {unit.name: (len(unit.gradients),) for unit in units}
    reducer = GradientReducer(gpt.units(), units, mesh.dp)
    tokens = torch.randint(0, 37, (7, 2), generator=torch.Generator().manual_seed(0))

    def backward() -> list[Any]:
        gpt(tokens[:-1], tokens[1:], torch.ones(6, 2, dtype=torch.float64)).backward()
        return [entry.shape for entry in mesh.ledger.entries]

    assert backward() == [], "nothing is sent before the last micro-batch"
    reducer.arm()
    assert backward() == [sizes[name] for name in UNITS[:-1]], "all but the embedding are under way when backward ends"
    reducer.finish()
    assert [entry.shape for entry in mesh.ledger.entries] == [sizes[name] for name in UNITS]
    assert {entry.operation for entry in mesh.ledger.entries} == {"all_reduce"}

    mesh.ledger.clear()  # and the next step begins anew
    assert backward() == []
    reducer.arm()
    backward()
    reducer.finish()
    assert len(mesh.ledger.entries) == len(UNITS)


def test_no_unit_is_reduced_before_its_gradients_are_whole() -> None:
    """At the moment a unit's reduction starts, its gradients are already those that backward ends with."""
    mesh = paper_mesh(Layout(dp=2), 0)
    gpt, units = flat_model(tied=False)
    reducer = GradientReducer(gpt.units(), units, mesh.dp)
    started: dict[int, Tensor] = {}
    transport = mesh.dp.transport
    assert transport is not None
    reduce_ = transport.all_reduce_

    def noted(x: Tensor, *args: Any) -> Any:
        started[x.data_ptr()] = x.clone()
        return reduce_(x, *args)

    transport.all_reduce_ = noted  # type: ignore[method-assign, assignment]
    reducer.arm()
    tokens = torch.randint(0, 37, (7, 2), generator=torch.Generator().manual_seed(0))
    gpt(tokens[:-1], tokens[1:], torch.ones(6, 2, dtype=torch.float64)).backward()
    reducer.finish()
    assert len(started) == 4
    for unit in units:
        assert torch.equal(started[unit.gradients.data_ptr()], unit.gradients), unit.name
