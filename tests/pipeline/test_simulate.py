"""The simulator: small pipelines by hand, and what it refuses."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings

from colonnade.pipeline.messages import sends
from colonnade.pipeline.schedule import Action, Kind, all_actions, each, in_turn
from colonnade.pipeline.simulate import Durations, IllegalSchedule, peak_activations, simulate
from tests.pipeline.shapes import Shape, shapes

PACES = pytest.mark.parametrize("pace", [None, lambda busy: 1.0], ids=["apart", "at a pace"])


def links(num_chunks: int, transfer: float, latency: float = 0.0) -> dict[tuple[int, int], tuple[float, float]]:
    """Of messages that all take as long."""
    return {(chunk, chunk + way): (transfer, latency) for chunk in range(num_chunks) for way in (1, -1)}


def listed(text: str) -> list[Action]:
    """'F0 B0' -> the actions."""
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "W": "W"}
    return [Action(kinds[word[0]], int(word[1:])) for word in text.split()]


@pytest.mark.slow
@given(shapes())
@settings(deadline=None, max_examples=60)
def test_every_schedule_is_legal_and_ends_whatever_things_last(shape: Shape) -> None:
    *_, num_microbatches, virtual_stages = shape
    sizes = [1 + chunk % 3 for chunk in range(shape.num_stages * virtual_stages)]
    slow = Durations(forward=0.5, input_gradients=3, weight_gradients=0.25)
    found = simulate(
        all_actions(*shape),
        num_microbatches,
        virtual_stages=virtual_stages,
        durations=slow,
        sizes=sizes,
        links=links(len(sizes), 1.5),
    )
    assert [[event.action for event in events] for events in found.events] == all_actions(*shape)
    assert sum(found.busy) == pytest.approx(slow.microbatch * num_microbatches * sum(sizes))
    for events in found.events:
        assert all(before.end <= after.start for before, after in pairwise(events))


def test_a_stage_waits_for_no_transfer_from_itself() -> None:
    """Of backward behind its own forward, and of weight gradients behind that; nor where cores are shared."""
    lists = all_actions("1f1b", 2, 3, 1)
    fixed = simulate(lists, 3, links=links(2, 1.5))
    assert simulate(lists, 3, links=links(2, 1.5), pace=lambda busy: 1.0) == fixed
    (last,) = (event for event in fixed.events[1] if (event.action.kind, event.action.microbatch) == ("B", 0))
    assert last.start == 1 + 1.5 + 1
    split = simulate(all_actions("zero_bubble", 2, 1), 1, links=links(2, 1.5)).events[1]
    assert [(event.action.kind, event.start) for event in split] == [("F", 2.5), ("B", 3.5), ("W", 4.5)]


@pytest.mark.slow
@given(shapes())
@settings(deadline=None, max_examples=60)
def test_stages_that_share_nothing_take_as_long_as_alone(shape: Shape) -> None:
    *_, num_microbatches, virtual_stages = shape
    sizes = [1 + chunk % 3 for chunk in range(shape.num_stages * virtual_stages)]
    slow = Durations(forward=0.5, input_gradients=3, weight_gradients=0.25)
    lists, paces = all_actions(*shape), (None, lambda busy: 1.0, lambda busy: 0.25)
    fixed, same, slower = (
        simulate(
            lists,
            num_microbatches,
            virtual_stages=virtual_stages,
            durations=each,
            sizes=sizes,
            links=links(len(sizes), 1.5),
            pace=pace,
        )
        for each, pace in zip((slow, slow, Durations(0.125, 0.75, 0.0625)), paces, strict=True)
    )
    assert same == fixed, "to the bit: all of these are sums of quarters"
    assert slower == fixed, "a quarter of the work, at a quarter of the pace"


@pytest.mark.slow
@given(shapes())
@settings(deadline=None, max_examples=60)
def test_stages_that_share_one_core_take_as_long_as_all_work(shape: Shape) -> None:
    """Whatever they wait for, the core is never idle where transfers take no time."""
    *_, num_microbatches, virtual_stages = shape
    sizes = [1 + chunk % 3 for chunk in range(shape.num_stages * virtual_stages)]
    one = Durations(forward=0.5, input_gradients=3, weight_gradients=0.25)
    lists = all_actions(*shape)
    found = simulate(
        lists, num_microbatches, virtual_stages=virtual_stages, durations=one, sizes=sizes, pace=lambda busy: 1 / busy
    )
    assert found.makespan == pytest.approx(one.microbatch * num_microbatches * sum(sizes))
    assert [[event.action for event in events] for events in found.events] == lists


def test_two_stages_on_one_core_by_hand() -> None:
    found = simulate(all_actions("1f1b", 2, 2), 2, pace=lambda busy: 1 / busy)
    first, second = ([(str(e.action), e.start, e.end) for e in events] for events in found.events)
    assert first == [("F0", 0, 1), ("F1", 1, 3), ("B0", 5, 9), ("B1", 10, 12)]
    assert second == [("F0", 1, 3), ("B0", 3, 5), ("F1", 5, 7), ("B1", 7, 10)]


def test_who_waits_for_a_transfer_leaves_the_core_to_the_others() -> None:
    found = simulate(
        all_actions("gpipe", 2, 2), 2, sizes=[1, 2], links=links(2, 0.5), pace=lambda busy: {1: 1.0, 2: 0.5}[busy]
    )
    first, second = ([(e.start, e.end) for e in events] for events in found.events)
    assert first[:2] == [(0, 1), (1, 2.5)], "alone to 1.5, then half as fast"
    assert second[0] == (1.5, 4.0), "half as fast to 2.5"
    assert second[1][0] == 4.0


def test_a_deadlock_of_stages_that_share_cores_is_seen() -> None:
    with pytest.raises(IllegalSchedule, match="deadlock"):
        simulate([listed("F0 B0 F1 B1"), listed("F0 F1 B0 B1")], 2, pace=lambda busy: 1 / busy)


def test_two_stages_and_two_micro_batches_by_hand() -> None:
    found = simulate(all_actions("1f1b", 2, 2), 2)
    first, second = ([(str(e.action), e.start, e.end) for e in events] for events in found.events)
    assert first == [("F0", 0, 1), ("F1", 1, 2), ("B0", 4, 6), ("B1", 7, 9)]
    assert second == [("F0", 1, 2), ("B0", 2, 4), ("F1", 4, 5), ("B1", 5, 7)]
    assert (found.makespan, found.busy, found.peak) == (9, (6, 6), (2, 1))
    assert found.bubble == pytest.approx(1 / 3)


def test_transfers_and_unequal_stages_by_hand() -> None:
    found = simulate(all_actions("1f1b", 2, 1), 1, sizes=[0.5, 1.5], links=links(2, 0.5))
    times = [[(e.start, e.end) for e in events] for events in found.events]
    assert times == [[(0, 0.5), (6, 7)], [(1, 2.5), (2.5, 5.5)]]


@PACES
def test_chunks_with_durations_of_their_own_take_all_of_them(pace: Callable[[int], float] | None) -> None:
    """Those of a stage of average size are shared by its chunks."""
    lists, own = all_actions("interleaved", 1, 1, 2), [Durations(forward=1), Durations(forward=3)]
    found = simulate(lists, 1, virtual_stages=2, durations=own, pace=pace)
    assert [(e.start, e.end) for e in found.events[0]] == [(0, 1), (1, 4), (4, 6), (6, 8)]
    found = simulate(lists, 1, virtual_stages=2, durations=own[0], pace=pace)
    assert [(e.start, e.end) for e in found.events[0]] == [(0, 0.5), (0.5, 1), (1, 2), (2, 3)]
    found = simulate(lists, 1, virtual_stages=2, durations=Durations(), sizes=[1, 3], pace=pace)
    assert [(e.start, e.end) for e in found.events[0]] == [(0, 1), (1, 4), (4, 10), (10, 12)]


@PACES
def test_a_transfer_takes_as_long_as_that_of_the_chunk_that_sends(pace: Callable[[int], float] | None) -> None:
    found = simulate(all_actions("gpipe", 2, 1), 1, links={(0, 1): (0.5, 0.0), (1, 0): (4.0, 0.0)}, pace=pace)
    assert [[(e.start, e.end) for e in events] for events in found.events] == [
        [(0, 1), (8.5, 10.5)],
        [(1.5, 2.5), (2.5, 4.5)],
    ]


@PACES
@pytest.mark.parametrize(
    ("latency", "forward", "backward"),
    [(0.0, (5, 9, 13), (18, 22, 26)), (2.0, (5, 7, 9), (14, 16, 18)), (3.0, (5, 6, 7), (12, 13, 14))],
)
def test_a_link_carries_one_message_after_the_other(
    latency: float, forward: tuple[float, ...], backward: tuple[float, ...], pace: Callable[[int], float] | None
) -> None:
    """But for latency, in which the next may begin."""
    durations, link = Durations(1, 0.5, 0.5), links(2, 4.0, latency)
    found = simulate(all_actions("gpipe", 2, 3), 3, durations=durations, sizes=[1, 0.5], links=link, pace=pace)
    first, last = ([event.start for event in events] for events in found.events)
    assert (first[:3], tuple(last[:3]), tuple(first[3:])) == ([0, 1, 2], forward, backward)


@PACES
def test_a_link_may_have_a_time_of_its_own(pace: Callable[[int], float] | None) -> None:
    """Over that to the second stage the next message comes 1 behind the first; back it waits until the link is free."""
    own = {(0, 1): (4.0, 3.0), (1, 0): (9.0, 0.0)}
    found = simulate(all_actions("gpipe", 2, 2), 2, durations=Durations(1, 0.5, 0.5), links=own, pace=pace)
    assert [[event.start for event in events] for events in found.events] == [[0, 1, 17, 26], [5, 6, 7, 8]]


@PACES
def test_messages_there_and_back_do_not_wait_for_each_other(pace: Callable[[int], float] | None) -> None:
    """From 6 to 7 the second forward and the first gradients are both under way; the first stage sends nothing back."""
    found = simulate(all_actions("1f1b", 2, 3), 3, durations=Durations(1, 0.5, 0.5), links=links(2, 3.0), pace=pace)
    first, last = ([(str(event.action), event.start) for event in events] for events in found.events)
    assert first == [("F0", 0), ("F1", 1), ("B0", 9), ("F2", 10), ("B1", 12), ("B2", 19)]
    assert last == [("F0", 4), ("B0", 5), ("F1", 7), ("B1", 8), ("F2", 14), ("B2", 15)]


@PACES
def test_stages_below_the_first_trained_one_wait_for_no_gradients(pace: Callable[[int], float] | None) -> None:
    """None are on the link back, which takes as long as the one there."""
    durations = [Durations(1, 0, 0), Durations(1, 1, 1)]
    found = simulate(all_actions("1f1b", 2, 3), 3, durations=durations, links=links(2, 3.0), pace=pace, first_trained=1)
    first, last = ([(str(event.action), event.start) for event in events] for events in found.events)
    assert first == [("F0", 0), ("F1", 1), ("B0", 2), ("F2", 2), ("B1", 3), ("B2", 3)]
    assert last == [("F0", 4), ("B0", 5), ("F1", 7), ("B1", 8), ("F2", 10), ("B2", 11)]


@PACES
@pytest.mark.parametrize("shape", [("gpipe", 2, 64, 1), ("interleaved", 2, 16, 4), ("zero_bubble", 4, 32, 1)], ids=str)
def test_a_step_takes_no_less_than_its_messages_take_on_a_link(
    shape: tuple[str, int, int, int], pace: Callable[[int], float] | None
) -> None:
    """Activations and gradients of all chunks of two stages share it where both go the same way."""
    _, num_stages, count, virtual_stages = shape
    link = links(num_stages * virtual_stages, 10.0)
    found = simulate(all_actions(*shape), count, virtual_stages=virtual_stages, links=link, pace=pace)
    sent = [each for each in sends(all_actions(*shape), num_stages * virtual_stages)[0] if each.to == 1]
    assert len(sent) == count * (2 * virtual_stages - 1 if virtual_stages > 1 else 1)
    assert found.makespan >= 10.0 * len(sent)


@PACES
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_messages_that_are_there_before_the_next_is_made_wait_for_none(
    name: str, pace: Callable[[int], float] | None
) -> None:
    lists = all_actions(name, 3, 6)
    alone, beside = (simulate(lists, 6, links=links(3, 0.75, latency), pace=pace) for latency in (0.0, 0.75))
    assert alone == beside


def test_chunks_of_one_stage_hand_on_without_a_transfer() -> None:
    found = simulate(all_actions("interleaved", 1, 1, 2), 1, virtual_stages=2, links=links(2, 100.0))
    assert found.makespan == 3


def test_a_step_ends_with_its_last_action_whichever_stage_runs_it() -> None:
    """Here the last, which has most of the work."""
    found = simulate(all_actions("zero_bubble", 2, 2), 2, sizes=[0.1, 1.9])
    first, last = (events[-1].end for events in found.events)
    assert found.makespan == last > first
    assert found.bubble == pytest.approx(1 - (2 * 3 * 0.1 + 2 * 3 * 1.9) / (2 * last))


def test_a_backward_that_is_split_takes_no_longer_in_all() -> None:
    split, whole = (simulate(all_actions(name, 3, 6), 6) for name in ("zero_bubble", "1f1b"))
    assert split.busy == whole.busy
    assert split.makespan < whole.makespan
    assert split.peak == (3, 3, 3) and whole.peak == (3, 2, 1), "activations live until weight gradients are computed"


@pytest.mark.parametrize(
    ("text", "freed_by", "peak"),
    [("F0 B0 F1 B1", "B", 1), ("F0 F1 B0 F2 B1 B2", "B", 2), ("F0 B0 F1 B1 W0 W1", "W", 2)],
)
def test_peak_activations_by_hand(text: str, freed_by: Kind, peak: int) -> None:
    assert peak_activations(listed(text), freed_by) == peak


def test_one_warm_up_too_few_is_legal_and_is_seen_in_bubble_and_peak() -> None:
    right = all_actions("1f1b", 4, 8)
    wrong = [in_turn(each("F", 8), each("B", 8), warm_up=max(0, 4 - stage - 2)) for stage in range(4)]
    found, expected = simulate(wrong, 8), simulate(right, 8)
    assert found.bubble > expected.bubble + 0.1
    assert found.peak == (3, 2, 1, 1) and expected.peak == (4, 3, 2, 1)


def test_one_warm_up_too_many_is_seen_in_the_peak() -> None:
    wrong = [in_turn(each("F", 8), each("B", 8), warm_up=4 - stage) for stage in range(4)]
    assert simulate(wrong, 8).peak == (5, 4, 3, 2)


# What is refused


def test_a_deadlock_tells_who_waits_for_what() -> None:
    with pytest.raises(IllegalSchedule) as error:
        simulate([listed("F0 B0 F1 B1"), listed("F0 F1 B0 B1")], 2)
    assert str(error.value) == (
        "deadlock: stage 0 cannot run B0 (number 1 of its list) before B0 of stage 1; "
        "stage 1 cannot run F1 (number 1 of its list) before F1 of stage 0."
    )


def test_a_backward_before_its_own_forward_is_a_deadlock_with_itself() -> None:
    with pytest.raises(IllegalSchedule, match=r"stage 0 cannot run B0 \(number 0 of its list\) before F0 of stage 0"):
        simulate([listed("B0 F0")], 1)


def test_weight_gradients_before_the_gradients_of_inputs_are_refused() -> None:
    with pytest.raises(IllegalSchedule, match=r"cannot run W0 .* before B0 of stage 0"):
        simulate([listed("F0 W0 B0")], 1)


def test_a_deadlock_between_chunks_names_them() -> None:
    lists = [[Action("F", 0, 1), Action("F", 0, 0), Action("B", 0, 1), Action("B", 0, 0)]]
    with pytest.raises(IllegalSchedule, match=r"cannot run F0 of chunk 1 .* before F0 of stage 0"):
        simulate(lists, 1, virtual_stages=2)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("F0 B0 F1", "B1 0 times"),
        ("F0 B0 F1 B1 B1", "B1 2 times"),
        ("F0 B0 F1 B1 F2 B2", "F2, which is none of this step's, B2, which is none of this step's"),
        ("F0 B0 F1 B1 W1", "W0 0 times"),
        ("", "F0 0 times, B0 0 times, F1 0 times, B1 0 times"),
    ],
)
def test_actions_that_are_missing_repeated_or_foreign_are_refused(text: str, wrong: str) -> None:
    with pytest.raises(IllegalSchedule) as error:
        simulate([listed(text)], 2)
    assert str(error.value) == f"stage 0 has to run each action once, and runs {wrong}."


def test_an_action_of_a_chunk_that_no_stage_has_is_refused() -> None:
    with pytest.raises(IllegalSchedule, match="and runs F0 of chunk 1, which is none of this step's"):
        simulate([[Action("F", 0), Action("B", 0), Action("F", 0, 1)]], 1)


@pytest.mark.parametrize(
    ("num_microbatches", "end"), [(4, "F3 0 times, B3 0 times."), (5, "B3 0 times, and 2 more."), (10, "and 12 more.")]
)
def test_a_list_of_more_than_eight_mistakes_is_cut(num_microbatches: int, end: str) -> None:
    with pytest.raises(IllegalSchedule) as error:
        simulate([[]], num_microbatches)
    assert str(error.value).endswith(end) and str(error.value).count("times") == 8
