"""The runner: a pipeline of torch layers is the plain model, does what the schedule lists, and keeps no more than that.

Every schedule runs on one to four stages; the numbers are compared with one autograd graph of the whole model.
"""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.runner import Runner
from colonnade.pipeline.schedule import Action, actions, all_actions
from colonnade.pipeline.simulate import simulate
from tests.distributed import run_on_ranks
from tests.pipeline.toy import HIDDEN, LENGTH, SAMPLES, Given, Owner, Toy, microbatches, unit_names


class Shape(NamedTuple):
    """A pipeline, and what runs through it."""

    name: str
    num_microbatches: int
    virtual_stages: int = 1
    every: int = 0


SHAPES = [
    *(Shape(name, count) for name in ("naive", "gpipe", "1f1b", "zero_bubble") for count in (1, 3, 6)),
    *(Shape("interleaved", 12, virtual_stages) for virtual_stages in (2, 3)),
    Shape("1f1b", 3, every=1),
    Shape("zero_bubble", 3, every=2),
]
NUM_BLOCKS = 10


class Run(NamedTuple):
    """What a stage did."""

    loss: float
    actions: list[Action]
    gradients: dict[str, Tensor]
    peak: int
    """The most micro-batches' chunks of which something was kept at once."""
    left: list[tuple[str, str]]
    calls: list[tuple[str, int]]
    acquired_as_expected: bool
    sent: int
    received: int


class Noted(Chunk):
    """A chunk that writes down what it is told to do."""

    def __init__(self, number: int, diary: list[Action], units: list[str], toy: Toy, owner: Owner, every: int) -> None:
        super().__init__(units, toy, owner, weight_gradients=toy.later, recompute_every=every)
        self.number, self.diary = number, diary

    def forward(self, microbatch: int, x: Tensor | None, inputs: Given) -> Tensor:
        self.diary.append(Action("F", microbatch, self.number))
        return super().forward(microbatch, x, inputs)

    def backward(
        self, microbatch: int, grad: Tensor | None, inputs: Given, *, last: bool, split: bool = False
    ) -> Tensor | None:
        self.diary.append(Action("B", microbatch, self.number))
        return super().backward(microbatch, grad, inputs, last=last, split=split)

    def weights(self, microbatch: int, *, last: bool) -> None:
        self.diary.append(Action("W", microbatch, self.number))
        super().weights(microbatch, last=last)


def stage_units(pp: Axis, virtual_stages: int) -> list[list[str]]:
    """This stage's chunks: as even as units allow."""
    units, count = unit_names(NUM_BLOCKS), pp.size * virtual_stages
    ends = [len(units) * i // count for i in range(count + 1)]
    chunks = [units[start:end] for start, end in pairwise(ends)]
    return chunks[pp.rank :: pp.size]


def run(shape: Shape, pp: Axis) -> Run:
    """One stage of one step."""
    toy, diary, peaks = Toy(NUM_BLOCKS), list[Action](), [0]
    units = stage_units(pp, shape.virtual_stages)
    owner = Owner(lambda: peaks.append(sum(len(toy.kept(each)) for each in units)))
    chunks = [Noted(number, diary, each, toy, owner, shape.every) for number, each in enumerate(units)]
    runner = Runner(chunks=chunks, pp=pp, owner=owner, schedule=shape.name, stream=stream)
    before = counts(pp)
    loss = runner.run(microbatches(shape.num_microbatches)).item()
    after = counts(pp)
    return Run(
        loss,
        diary,
        toy.gradients(),
        max(peaks),
        list(owner.left_units()),
        toy.calls,
        owner.acquired() == owner.expected,
        after[0] - before[0],
        after[1] - before[1],
    )


def stream(inputs: Given) -> Tensor:
    return torch.empty(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64)


def counts(pp: Axis) -> tuple[int, int]:
    ledger = None if pp.transport is None else pp.transport.ledger
    return (0, 0) if ledger is None else (ledger.counts["send", "pp"], ledger.counts["receive", "pp"])


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def stages(request: pytest.FixtureRequest) -> dict[Shape, list[Run]]:
    """Every shape on a pipeline of so many stages, by stage."""
    size: int = request.param

    def on_a_rank(rank: int, num_ranks: int) -> list[Run]:
        pp = build_mesh(Layout(pp=size), rank).pp
        return [run(shape, pp) for shape in SHAPES]

    ranks = run_on_ranks(on_a_rank, size)
    return {shape: [runs[number] for runs in ranks] for number, shape in enumerate(SHAPES)}


Stages = dict[Shape, list[Run]]


def test_loss_and_gradients_are_those_of_one_graph(stages: Stages) -> None:
    for shape, runs in stages.items():
        loss, gradients = Toy(NUM_BLOCKS).plain(microbatches(shape.num_microbatches))
        assert [each.loss for each in runs[:-1]] == [0.0] * (len(runs) - 1), "the last stage has the loss"
        assert runs[-1].loss == pytest.approx(loss, rel=1e-13)
        assert set().union(*(each.gradients for each in runs)) == set(gradients)
        assert sum(len(each.gradients) for each in runs) == len(gradients), "each weight's on one stage"
        for each in runs:
            for name, gradient in each.gradients.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-13)


def test_a_stage_does_what_the_schedule_lists(stages: Stages) -> None:
    for (name, count, virtual_stages, _), runs in stages.items():
        for stage, each in enumerate(runs):
            assert each.actions == actions(name, stage, len(runs), count, virtual_stages)


def test_what_is_kept_peaks_where_the_simulator_says(stages: Stages) -> None:
    for (name, count, virtual_stages, every), runs in stages.items():
        if not every:
            schedules = all_actions(name, len(runs), count, virtual_stages)
            expected = simulate(schedules, count, virtual_stages=virtual_stages).peak
            assert tuple(each.peak for each in runs) == expected, name


def test_units_are_acquired_in_the_order_that_was_announced(stages: Stages) -> None:
    assert all(each.acquired_as_expected for runs in stages.values() for each in runs)


def test_each_unit_is_left_once_a_microbatch_and_for_good_once(stages: Stages) -> None:
    for shape, runs in stages.items():
        for each in runs:
            units = [unit for unit in unit_names(NUM_BLOCKS) if ("left for good", unit) in each.left]
            assert len(each.left) == len(units) * shape.num_microbatches
            for unit in units:
                mine = [what for what, other in each.left if other == unit]
                assert mine == ["left"] * (shape.num_microbatches - 1) + ["left for good"], "the last, and no other"
        everywhere = [unit for each in runs for what, unit in each.left if what == "left for good"]
        assert sorted(everywhere) == sorted(unit_names(NUM_BLOCKS)), "no unit of any stage is forgotten"


def test_recomputation_runs_blocks_twice(stages: Stages) -> None:
    for shape, runs in stages.items():
        calls = [call for each in runs for call in each.calls]
        for unit in unit_names(NUM_BLOCKS):
            times = 2 if shape.every and unit.startswith("blocks") else 1
            assert all(calls.count((unit, i)) == times for i in range(shape.num_microbatches))


def test_each_microbatch_crosses_each_cut_once_up_and_once_down(stages: Stages) -> None:
    for shape, runs in stages.items():
        cuts = len(runs) * shape.virtual_stages - 1 if len(runs) > 1 else 0
        assert sum(each.sent for each in runs) == sum(each.received for each in runs)
        assert sum(each.sent for each in runs) == 2 * cuts * shape.num_microbatches


def test_a_runner_can_run_again() -> None:
    toy, owner = Toy(2), Owner()
    chunk = Chunk(unit_names(2), toy, owner, weight_gradients=toy.later)
    runner = Runner(chunks=[chunk], pp=Axis("pp"), owner=owner, schedule="1f1b", stream=stream)
    first, second = (runner.run(microbatches(2)).item() for _ in range(2))
    assert first == second
