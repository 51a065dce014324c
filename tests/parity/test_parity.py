"""Every layout gives the serial run: losses, gradients, norms and weights of five float64 steps, to 1e-10.

All cases of a layout are trained in one set of forked ranks. The covering selection meets every value of every
property of a case on every layout; every micro-batch size with every dropout and every mask is slow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from colonnade.mesh.layout import Layout
from tests.distributed import run_on_ranks
from tests.parity.runs import GLOBAL_BATCH, Case, Mask, Run, differences, relative, train_on_ranks, worst

TOLERANCE = 1e-10
MASKS: tuple[Mask, ...] = ("none", "differ", "second_half")
LAYOUTS = [Layout(tp=tp, dp=dp) for tp, dp in product((1, 2, 4), (1, 2))]

# 37 tokens: no tp divides them. 3 tokens: at tp = 4 the last rank has no token at all.
COVERING = [
    Case(2, drop=0.1, vocab_size=37, tied=True, clipped=True, mask="differ"),
    Case(4, drop=0.0, vocab_size=37, tied=False, clipped=False, mask="second_half"),
    Case(4, drop=0.1, vocab_size=3, tied=False, clipped=True, mask="none"),
    Case(1, drop=0.0, vocab_size=3, tied=True, clipped=False, mask="differ"),
]


def full_matrix(dp: int) -> list[Case]:
    """Every micro-batch size with every dropout and every mask; the other properties change from case to case."""
    sizes = [size for size in (1, 2, 4, 8) if size * dp <= GLOBAL_BATCH]
    return [
        Case(size, drop, (3, 37, 40)[(i + i // 3) % 3], tied=i % 2 == 0, clipped=i // 2 % 2 == 0, mask=mask)
        for i, (size, drop, mask) in enumerate(product(sizes, (0.0, 0.1), MASKS))
    ]


@dataclass
class Comparison:
    """One case on one layout, beside the serial run."""

    layout: Layout
    case: Case
    ranks: list[Run]
    serial: Run

    def tensors(self) -> Iterator[tuple[float, str]]:
        for rank, run in enumerate(self.ranks):
            for step, (mine, reference) in enumerate(zip(run.steps, self.serial.steps, strict=True)):
                yield from differences(f"rank {rank} step {step}", mine.gradients, reference.gradients)

    def numbers(self, name: str) -> Iterator[tuple[float, str]]:
        for rank, run in enumerate(self.ranks):
            for step, (mine, reference) in enumerate(zip(run.steps, self.serial.steps, strict=True)):
                value, expected = getattr(mine, name), getattr(reference, name)
                yield relative(abs(value - expected), abs(expected)), f"rank {rank} step {step} {value} {expected}"


PARAMETERS = [
    *(pytest.param((layout, COVERING, 120.0), id=f"{layout}") for layout in LAYOUTS),
    *(
        pytest.param((layout, full_matrix(layout.dp), 600.0), id=f"{layout} full", marks=pytest.mark.slow)
        for layout in LAYOUTS
    ),
]


@pytest.fixture(scope="module")
def serial_runs() -> dict[Case, Run]:
    """Serial runs made so far."""
    return {}


@pytest.fixture(scope="module", params=PARAMETERS)
def comparisons(request: Any, serial_runs: dict[Case, Run]) -> list[Comparison]:
    layout, cases, time_limit = request.param
    missing = sorted({case.serial() for case in cases} - serial_runs.keys(), key=str)
    if missing:
        (runs,) = run_on_ranks(train_on_ranks, 1, Layout(), missing, time_limit=time_limit)
        serial_runs.update(zip(missing, runs, strict=True))
    ranks = run_on_ranks(train_on_ranks, layout.num_ranks, layout, cases, time_limit=time_limit)
    return [
        Comparison(layout, case, [runs[number] for runs in ranks], serial_runs[case.serial()])
        for number, case in enumerate(cases)
    ]


def test_losses(comparisons: list[Comparison]) -> None:
    for compared in comparisons:
        difference, where = worst(compared.numbers("loss"))
        assert difference <= TOLERANCE, f"{compared.case}: {where}"


def test_gradients(comparisons: list[Comparison]) -> None:
    for compared in comparisons:
        difference, where = worst(compared.tensors())
        assert difference <= TOLERANCE, f"{compared.case}: {where}"


def test_gradient_norms(comparisons: list[Comparison]) -> None:
    for compared in comparisons:
        difference, where = worst(compared.numbers("grad_norm"))
        assert difference <= TOLERANCE, f"{compared.case}: {where}"


def test_final_weights(comparisons: list[Comparison]) -> None:
    for compared in comparisons:
        for rank, run in enumerate(compared.ranks):
            difference, where = worst(differences(f"rank {rank}", run.weights, compared.serial.weights))
            assert difference <= TOLERANCE, f"{compared.case}: {where}"


def test_replicated_weights_are_bit_equal_on_all_ranks(comparisons: list[Comparison]) -> None:
    for compared in comparisons:
        first = compared.ranks[0]
        assert len(first.replicated) >= 13
        for run in compared.ranks[1:]:
            assert run.replicated == first.replicated
            for name in first.replicated:
                assert torch.equal(run.parameters[name], first.parameters[name]), f"{compared.case}: {name}"


def test_copies_of_the_model_are_bit_equal_over_dp(comparisons: list[Comparison]) -> None:
    for compared in comparisons:
        for group in compared.layout.groups("dp"):
            for rank, (name, weight) in product(group, compared.ranks[group[0]].parameters.items()):
                assert torch.equal(weight, compared.ranks[rank].parameters[name]), f"{compared.case}: {name}"


def test_padding_stays_zero(comparisons: list[Comparison]) -> None:
    assert all(run.padding == 0.0 for compared in comparisons for run in compared.ranks)


def test_the_cases_are_what_they_say(comparisons: list[Comparison]) -> None:
    """Clipping bites where it should, every weight has a gradient and moves."""
    for compared in comparisons:
        for step in compared.serial.steps:
            assert (step.grad_norm > 1.5 * compared.case.clip) == compared.case.clipped
            assert all(gradient.abs().max() > 1e-6 for _, gradient in step.gradients.values())
