"""A step on paper: what is alive when, on numbers small enough to follow."""

from collections.abc import Sequence

import pytest

from colonnade.pipeline import mailbox
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.schedule import all_actions
from colonnade.planner import mail
from colonnade.planner.activations import Kept
from colonnade.planner.ownership import Ownership, PartBuffers
from colonnade.planner.timeline import Live, Stage, groups, timeline
from tests.pipeline.toy import units

STREAM, INSIDE = 1, 100


def stage(
    number: int, chunks: Sequence[Sequence[str]], *, zero: int = 0, every: int = 0, splits: bool = False
) -> Stage:
    """Each unit keeps 100 besides the stream, 1; each part has 10 of parameters and 1000 of gradients."""
    units = [unit for chunk in chunks for unit in chunk]
    whole = PartBuffers(10 if zero >= 3 else 0, 1000 if zero >= 2 else 0, 0)
    return Stage(
        number=number,
        chunks=chunks,
        needs={unit: [unit] for unit in units},
        buffers=dict.fromkeys(units, whole),
        kept={unit: Kept(INSIDE, 0 if unit == "head" else STREAM, 30) for unit in units},
        stream=STREAM,
        zero=zero,
        recompute_every=every,
        splits=splits,
    )


def peak(stage: Stage, schedule: str, num_stages: int, num_microbatches: int) -> Live:
    moments = list(timeline(stage, all_actions(schedule, num_stages, num_microbatches)))
    return Live(max(m.activations for m in moments), max(m.buffers for m in moments))


WHOLE = [["embedding", "blocks.0", "blocks.1", "head"]]


def test_one_stage_keeps_one_micro_batch() -> None:
    assert peak(stage(0, WHOLE), "1f1b", 1, 5) == Live(4 * INSIDE + 3 * STREAM, 0)


def test_gpipe_keeps_all_micro_batches() -> None:
    assert peak(stage(0, WHOLE), "gpipe", 1, 5).activations == 5 * (4 * INSIDE + 3 * STREAM)


@pytest.mark.parametrize("number", range(4))
def test_1f1b_keeps_as_many_as_there_are_stages_from_here(number: int) -> None:
    live = peak(stage(number, [[f"blocks.{number}"]]), "1f1b", 4, 9).activations
    assert live // INSIDE == 4 - number


def test_recomputed_blocks_keep_their_input_and_one_group_at_a_time() -> None:
    one, two = (peak(stage(0, WHOLE, every=every), "1f1b", 1, 3).activations // INSIDE for every in (1, 2))
    assert (one, two) == (2, 3)  # the embedding and a block, or both; the head is done by then
    blocks = [[f"blocks.{i}" for i in range(9)]]
    assert [peak(stage(0, blocks, every=k), "1f1b", 1, 3).activations // INSIDE for k in (1, 3, 9)] == [1, 3, 9]


def test_put_off_weight_gradients_live_until_they_are_computed() -> None:
    last = stage(3, [["blocks.3"]], splits=True)
    moments = list(timeline(last, all_actions("zero_bubble", 4, 9)))
    assert max(m.activations for m in moments) >= INSIDE + 3 * 30
    assert moments[-1].activations <= 9 * STREAM  # gradients that were sent


def test_zero_3_has_the_unit_that_runs_and_the_next_whole() -> None:
    live = peak(stage(0, [[f"blocks.{i}" for i in range(9)]], zero=3), "1f1b", 1, 3).buffers
    assert live == 2 * 10 + 3 * 1000  # gradients: of the unit that runs, and of two that are being summed


def test_zero_2_has_parameters_whole_anyway() -> None:
    assert peak(stage(0, [[f"blocks.{i}" for i in range(9)]], zero=2), "1f1b", 1, 3).buffers == 3 * 1000


def test_gradients_of_a_tied_table_stay_from_the_head_to_the_embedding() -> None:
    needs = {"embedding": ["table"], "blocks.0": ["blocks.0"], "head": ["table"]}
    buffers = {"table": PartBuffers(0, 1000, 0), "blocks.0": PartBuffers(0, 10, 1)}
    owner = Ownership(needs, buffers, ["head", "head", "blocks.0", "embedding"], zero=2)
    seen = []
    for unit in ("head", "head", "blocks.0", "embedding"):
        owner.acquire(unit, gradients=True)
        seen.append(owner.bytes)
        owner.release(unit)
        owner.left(unit, last=False)
    assert seen == [1000, 1000, 1010, 1011]


@pytest.mark.parametrize("every", [0, 1, 2, 3])
@pytest.mark.parametrize("names", [*WHOLE, ["blocks.4", "blocks.5", "blocks.6", "blocks.7"], ["embedding"]])
def test_groups_are_those_of_chunks(names: list[str], every: int) -> None:
    chunk = Chunk(units(names), model=None, owner=None, recompute_every=every)  # type: ignore[arg-type]
    assert groups(names, every) == [([unit.name for unit in group], again) for group, again in chunk.groups]


def test_receives_are_posted_as_far_ahead() -> None:
    assert mail.AHEAD == mailbox._AHEAD


def test_a_message_that_must_have_arrived_is_forgotten() -> None:
    """1F1B, stage 0 of 2: it has sent two streams when the first gradient comes, which says that the first is there."""
    schedules = all_actions("1f1b", 2, 4)
    post = mail.Mail(schedules, 0, 2)
    assert post.bytes(STREAM) == STREAM  # the first gradient may come
    post.put(mail.Message("F", 0, 0), 7)
    post.put(mail.Message("F", 1, 0), 7)
    assert post.bytes(STREAM) == STREAM + 14
    post.take(mail.Message("B", 0, 1))
    assert post.bytes(STREAM) == STREAM + 7
