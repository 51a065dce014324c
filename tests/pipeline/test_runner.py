"""The runner: a pipeline of torch layers is the plain model, does what the schedule lists, and keeps no more than that.

Every schedule runs on one to four stages, for a model that carries one tensor and for one that carries three; the
numbers are compared with one autograd graph of the whole model.
"""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from colonnade.architecture.statement import Unit
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh
from colonnade.pipeline.carry import Carry, Gradients
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.runner import Runner
from colonnade.pipeline.schedule import Action, actions, all_actions
from colonnade.pipeline.simulate import simulate
from tests.distributed import run_on_ranks
from tests.pipeline.toy import Given, Owner, Pair, Toy, Watched, microbatches, units


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
CPU = torch.device("cpu")


class Run(NamedTuple):
    """What a stage did."""

    loss: float
    actions: list[Action]
    gradients: dict[str, Tensor]
    peak: int
    """The most micro-batches' chunks of which something was kept at once."""
    ready: list[tuple[str, str]]
    calls: list[tuple[str, int]]
    acquired_as_expected: bool
    sent: int
    received: int


class Noted(Chunk):
    """A chunk that writes down what it is told to do."""

    def __init__(
        self, number: int, diary: list[Action], units: list[Unit], model: Watched, owner: Owner, every: int
    ) -> None:
        super().__init__(units, model, owner, weight_gradients=model.later, recompute_every=every)
        self.number, self.diary = number, diary

    def forward(self, microbatch: int, carry: Carry, inputs: Given) -> Carry:
        self.diary.append(Action("F", microbatch, self.number))
        return super().forward(microbatch, carry, inputs)

    def backward(
        self, microbatch: int, gradients: Gradients | None, inputs: Given, *, last: bool, split: bool = False
    ) -> Gradients:
        self.diary.append(Action("B", microbatch, self.number))
        return super().backward(microbatch, gradients, inputs, last=last, split=split)

    def weights(self, microbatch: int, *, last: bool) -> None:
        self.diary.append(Action("W", microbatch, self.number))
        super().weights(microbatch, last=last)


def cut(names: list[str], count: int) -> list[list[str]]:
    """So many chunks, as even as units allow."""
    ends = [len(names) * i // count for i in range(count + 1)]
    return [names[start:end] for start, end in pairwise(ends)]


def run(kind: type[Watched], shape: Shape, pp: Axis) -> Run:
    """One stage of one step."""
    model, diary, peaks = kind(NUM_BLOCKS), list[Action](), [0]
    every = cut(model.names, pp.size * shape.virtual_stages)
    held = every[pp.rank :: pp.size]
    owner = Owner(lambda: peaks.append(sum(len(model.kept(each)) for each in held)))
    chunks = [Noted(number, diary, units(each), model, owner, shape.every) for number, each in enumerate(held)]
    starts = [each[0] for each in every]
    runner = Runner(chunks=chunks, starts=starts, model=model, pp=pp, owner=owner, schedule=shape.name, device=CPU)
    before = counts(pp)
    loss = runner.run(microbatches(shape.num_microbatches)).item()
    after = counts(pp)
    return Run(
        loss,
        diary,
        model.gradients(),
        max(peaks),
        list(owner.ready()),
        model.calls,
        owner.acquired() == owner.expected,
        after[0] - before[0],
        after[1] - before[1],
    )


def counts(pp: Axis) -> tuple[int, int]:
    ledger = None if pp.transport is None else pp.transport.ledger
    return (0, 0) if ledger is None else (ledger.counts["send", "pp"], ledger.counts["receive", "pp"])


class Stages(NamedTuple):
    """Every shape on a pipeline of so many stages, by stage."""

    model: Watched
    runs: dict[Shape, list[Run]]


@pytest.fixture(scope="module", params=[(kind, size) for kind in (Toy, Pair) for size in (1, 2, 3, 4)])
def stages(request: pytest.FixtureRequest) -> Stages:
    kind: type[Watched] = request.param[0]
    size: int = request.param[1]

    def on_a_rank(rank: int, num_ranks: int) -> list[Run]:
        pp = build_mesh(Layout(pp=size), rank).pp
        return [run(kind, shape, pp) for shape in SHAPES]

    ranks = run_on_ranks(on_a_rank, size)
    return Stages(kind(NUM_BLOCKS), {shape: [runs[number] for runs in ranks] for number, shape in enumerate(SHAPES)})


@pytest.mark.one_in(3)
def test_loss_and_gradients_are_those_of_one_graph(stages: Stages) -> None:
    for shape, runs in stages.runs.items():
        loss, gradients = stages.model.plain(microbatches(shape.num_microbatches))
        assert [each.loss for each in runs[:-1]] == [0.0] * (len(runs) - 1), "the last stage has the loss"
        assert runs[-1].loss == pytest.approx(loss, rel=1e-13)
        assert set().union(*(each.gradients for each in runs)) == set(gradients)
        assert sum(len(each.gradients) for each in runs) == len(gradients), "each weight's on one stage"
        for each in runs:
            for name, gradient in each.gradients.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-13)


@pytest.mark.one_in(3)
def test_a_stage_does_what_the_schedule_lists(stages: Stages) -> None:
    for (name, count, virtual_stages, _), runs in stages.runs.items():
        for stage, each in enumerate(runs):
            assert each.actions == actions(name, stage, len(runs), count, virtual_stages)


@pytest.mark.one_in(4)
def test_what_is_kept_peaks_where_the_simulator_says(stages: Stages) -> None:
    for (name, count, virtual_stages, every), runs in stages.runs.items():
        if not every:
            schedules = all_actions(name, len(runs), count, virtual_stages)
            expected = simulate(schedules, count, virtual_stages=virtual_stages).peak
            assert tuple(each.peak for each in runs) == expected, name


def test_units_are_acquired_in_the_order_that_was_announced(stages: Stages) -> None:
    assert all(each.acquired_as_expected for runs in stages.runs.values() for each in runs)


def test_each_units_gradients_are_ready_once_a_microbatch_and_for_good_once(stages: Stages) -> None:
    names = stages.model.names
    for shape, runs in stages.runs.items():
        for each in runs:
            held = [unit for unit in names if ("last ready", unit) in each.ready]
            assert len(each.ready) == len(held) * shape.num_microbatches
            for unit in held:
                mine = [what for what, other in each.ready if other == unit]
                assert mine == ["ready"] * (shape.num_microbatches - 1) + ["last ready"], "the last, and no other"
        everywhere = [unit for each in runs for what, unit in each.ready if what == "last ready"]
        assert sorted(everywhere) == sorted(names), "no unit of any stage is forgotten"


def test_recomputation_runs_blocks_twice(stages: Stages) -> None:
    for shape, runs in stages.runs.items():
        calls = [call for each in runs for call in each.calls]
        for unit in units(stages.model.names):
            times = 2 if shape.every and unit.recomputes else 1
            assert all(calls.count((unit.name, i)) == times for i in range(shape.num_microbatches))


def test_each_tensor_crosses_each_cut_once_and_its_gradient_once(stages: Stages) -> None:
    for shape, runs in stages.runs.items():
        sent = sum(each.sent for each in runs)
        assert sent == sum(each.received for each in runs)
        chunks = cut(stages.model.names, len(runs) * shape.virtual_stages)
        (given,) = microbatches(1)
        carries = [stages.model.carry_buffers(given, into=names[0]) for names in chunks] if len(runs) > 1 else []
        tensors = sum(len(carry) + sum(x.is_floating_point() for x in carry) for carry in carries)
        assert sent == tensors * shape.num_microbatches


def test_who_listens_is_told_of_each_action_before_it_runs_and_of_the_end() -> None:
    toy, owner, told = Toy(2), Owner(), list[Action | None]()
    chunk = Noted(0, told, units(toy.names), toy, owner, 0)  # type: ignore[arg-type]
    begins = told.append
    runner = Runner(
        chunks=[chunk],
        starts=["embedding"],
        model=toy,
        pp=Axis("pp"),
        owner=owner,
        schedule="zero_bubble",
        device=CPU,
        begins=begins,
    )
    runner.run(microbatches(2))
    listed = actions("zero_bubble", 0, 1, 2, 1)
    assert told == [each for action in listed for each in (action, action)] + [None]


class Stretching(Toy):
    """Micro-batches may be of any length."""

    def carry_buffers(self, inputs: Given, into: str) -> Carry:
        return tuple(x.new_empty(len(inputs.tokens), *x.shape[1:]) for x in super().carry_buffers(inputs, into))


def test_micro_batches_may_differ_in_length() -> None:
    given = [
        Given(each.number, each.tokens[: 3 - each.number], each.labels[: 3 - each.number]) for each in microbatches(3)
    ]

    def on_a_rank(rank: int, num_ranks: int) -> tuple[float, dict[str, Tensor]]:
        toy, owner, pp = Stretching(2), Owner(), build_mesh(Layout(pp=2), rank).pp
        every = cut(toy.names, 2)
        chunk, starts = Chunk(units(every[rank]), toy, owner), [each[0] for each in every]
        runner = Runner(chunks=[chunk], starts=starts, model=toy, pp=pp, owner=owner, schedule="1f1b", device=CPU)
        return runner.run(given).item(), toy.gradients()

    loss, gradients = Stretching(2).plain(given)
    (first, lower), (last, upper) = run_on_ranks(on_a_rank, 2)
    assert (first, last) == (0.0, pytest.approx(loss, rel=1e-12))
    assert lower.keys() | upper.keys() == gradients.keys()
    for name, gradient in (lower | upper).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12)


class Stopped(Exception):
    """By somebody at the keyboard."""


class Stopping(Toy):
    """Stops a run before its second loss."""

    def make(self, unit: str, carry: Carry, inputs: Given) -> Carry:
        if (unit, inputs.number) == ("head", 1):
            raise Stopped
        return super().make(unit, carry, inputs)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_run_that_was_broken_off_leaves_nothing_to_the_next(schedule: str) -> None:
    toy, owner = Stopping(2), Owner()
    chunk = Chunk(units(toy.names), toy, owner, weight_gradients=toy.later)
    runner = Runner(
        chunks=[chunk], starts=["embedding"], model=toy, pp=Axis("pp"), owner=owner, schedule=schedule, device=CPU
    )
    with pytest.raises(Stopped):
        runner.run(microbatches(2))
    owner.told.clear()
    runner.run(microbatches(1))
    assert toy.kept(toy.names) == set()
    assert sorted(unit for what, unit in owner.told if what == "last ready") == sorted(toy.names)


def test_a_runner_can_run_again() -> None:
    toy, owner = Toy(2), Owner()
    chunk = Chunk(units(toy.names), toy, owner, weight_gradients=toy.later)
    runner = Runner(
        chunks=[chunk], starts=["embedding"], model=toy, pp=Axis("pp"), owner=owner, schedule="1f1b", device=CPU
    )
    first, second = (runner.run(microbatches(2)).item() for _ in range(2))
    assert first == second
