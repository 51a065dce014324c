"""Schedules: small ones by hand, any of them against what they promise, and against PyTorch's own."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from colonnade.errors import LayoutError
from colonnade.pipeline.schedule import NAMES, Action, actions, all_actions
from tests.pipeline.shapes import Shape, shapes


def spelled(name: str, stage: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1) -> str:
    """A stage's actions as 'F0 B0', or 'F0.1' for chunk 1 of several."""
    listed = actions(name, stage, num_stages, num_microbatches, virtual_stages)
    return " ".join(f"{a.kind}{a.microbatch}" + f".{a.chunk}" * (virtual_stages > 1) for a in listed)


@pytest.mark.parametrize(
    ("name", "stage", "expected"),
    [
        ("naive", 0, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("naive", 2, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("gpipe", 1, "F0 F1 F2 F3 B0 B1 B2 B3"),
        ("1f1b", 0, "F0 F1 F2 B0 F3 B1 B2 B3"),
        ("1f1b", 1, "F0 F1 B0 F2 B1 F3 B2 B3"),
        ("1f1b", 2, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("zero_bubble", 0, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"),
        ("zero_bubble", 1, "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"),
        ("zero_bubble", 2, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"),
    ],
)
def test_three_stages_and_four_micro_batches(name: str, stage: int, expected: str) -> None:
    assert spelled(name, stage, 3, 4) == expected


def test_interleaved_runs_its_chunks_in_rounds_of_as_many_micro_batches_as_stages() -> None:
    first = "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    last = "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    assert spelled("interleaved", 0, 2, 4, 2) == first
    assert spelled("interleaved", 1, 2, 4, 2) == last


@pytest.mark.parametrize("name", NAMES)
def test_one_stage_needs_no_pipeline(name: str) -> None:
    kinds = "FBW" if name == "zero_bubble" else "FB"
    assert [action.kind for action in actions(name, 0, 1, 1)] == list(kinds)


def test_interleaved_with_one_virtual_stage_is_1f1b() -> None:
    assert all_actions("interleaved", 4, 7) == all_actions("1f1b", 4, 7)


def test_an_action_says_what_it_is() -> None:
    assert [str(Action("B", 12)), str(Action("F", 3, 1))] == ["B12", "F3 of chunk 1"]


@given(shapes())
@settings(deadline=None)
def test_receivers_use_messages_in_the_order_in_which_they_are_sent(shape: Shape) -> None:
    """So receives may be posted in the sender's order, and nothing that arrived waits behind what is needed first.

    With two stages, both kinds of message go the same way; there each kind is in order.
    """
    num_stages, lists = shape.num_stages, all_actions(*shape)
    num_chunks = num_stages * shape.virtual_stages
    for kind, step in (("F", 1), ("B", -1)):
        for stage, sender in enumerate(lists):
            receiver = (stage + step) % num_stages
            sent = [a._replace(chunk=a.chunk * num_stages + stage + step) for a in sender if a.kind == kind]
            used = [a._replace(chunk=a.chunk * num_stages + receiver) for a in lists[receiver] if a.kind == kind]
            has_sender = [a for a in used if 0 <= a.chunk - step < num_chunks]
            assert [a for a in sent if 0 <= a.chunk < num_chunks] == has_sender, (kind, stage)


# What PyTorch runs


def compared(shape: Shape, stage: int) -> list[tuple[str, int, int]]:
    """Our actions as (kind, number of the chunk in the model, micro-batch)."""
    return [(a.kind, a.chunk * shape.num_stages + stage, a.microbatch) for a in actions(shape.name, stage, *shape[1:])]


def of_torch(shape: Shape, stage: int, schedule: Any) -> list[tuple[str, int, int]]:
    """The actions that a schedule of PyTorch with several chunks a stage computes."""
    numbers = SimpleNamespace(
        n_local_stages=shape.virtual_stages,
        pp_group_size=shape.num_stages,
        microbatches_per_round=shape.num_stages,
        _n_microbatches=shape.num_microbatches,
    )
    kinds = {"F": "F", "B": "B", "I": "B", "W": "W"}
    listed = schedule._calculate_single_rank_operations(numbers, stage)
    return [(kinds[a.computation_type.value], a.stage_index, a.microbatch_index) for a in listed if a is not None]


def executed_by_torch(shape: Shape, stage: int, schedule: Any) -> list[tuple[str, int, int]]:
    """What PyTorch's schedule with one chunk a stage runs, on a stage that only writes down what it is told."""
    done: list[tuple[str, int, int]] = []
    recorder = MagicMock(stage_index=stage)
    recorder.forward_one_chunk.side_effect = lambda i, *_, **__: done.append(("F", stage, i))
    recorder.backward_one_chunk.side_effect = lambda i, *_, **__: done.append(("B", stage, i))
    for transfers in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        getattr(recorder, f"get_{transfers}_ops").return_value = []
    runner = MagicMock(_stage=recorder, _n_microbatches=shape.num_microbatches, _num_stages=shape.num_stages)
    runner._check_inputs.return_value = [()] * shape.num_microbatches, [{}] * shape.num_microbatches
    schedule._step_microbatches(runner)
    return done


@given(shapes(("interleaved",)))
@settings(deadline=None)
def test_interleaved_is_pytorchs(shape: Shape) -> None:
    if shape.virtual_stages == 1:  # PyTorch keeps the longer warm-up that only several chunks need
        shape = shape._replace(virtual_stages=2)
    for stage in range(shape.num_stages):
        assert compared(shape, stage) == of_torch(shape, stage, torch_schedules.ScheduleInterleaved1F1B)


@given(st.integers(1, 16), st.integers(1, 64))
@settings(deadline=None)
def test_zero_bubble_is_pytorchs(num_stages: int, num_microbatches: int) -> None:
    shape = Shape("zero_bubble", num_stages, num_microbatches, 1)
    for stage in range(num_stages):
        assert compared(shape, stage) == of_torch(shape, stage, torch_schedules.ScheduleInterleavedZeroBubble)


@pytest.mark.parametrize(
    ("name", "schedule"), [("gpipe", torch_schedules.ScheduleGPipe), ("1f1b", torch_schedules.Schedule1F1B)]
)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 3), (4, 4), (4, 9), (5, 3), (16, 64)])
def test_what_pytorch_executes_is_our_list(name: str, schedule: Any, num_stages: int, num_microbatches: int) -> None:
    shape = Shape(name, num_stages, num_microbatches, 1)
    for stage in {0, num_stages // 2, num_stages - 1}:
        assert compared(shape, stage) == executed_by_torch(shape, stage, schedule)


# What cannot be


def test_virtual_stages_belong_to_interleaved() -> None:
    with pytest.raises(LayoutError, match=r'virtual_stages = 2 does not go with parallel.schedule = "gpipe".*Use'):
        actions("gpipe", 0, 2, 4, virtual_stages=2)


@pytest.mark.parametrize(("num_microbatches", "use"), [(6, "Use 4 or 8 micro-batches"), (3, "Use 4 micro-batches")])
def test_interleaved_needs_whole_rounds(num_microbatches: int, use: str) -> None:
    with pytest.raises(LayoutError, match=f"parallel.pp = 4 .* a step has {num_microbatches}, .*{use}"):
        actions("interleaved", 0, 4, num_microbatches, virtual_stages=2)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(LayoutError, match="Use naive, gpipe, 1f1b, zero_bubble, interleaved"):
        actions("2f2b", 0, 2, 2)
