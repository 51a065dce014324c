"""What stages send each other: every message once, from its maker to its user, in an order that both know."""

from collections import Counter

from hypothesis import given, settings

from colonnade.pipeline.messages import Message, Sent, chunk_number, sends
from colonnade.pipeline.schedule import Action, all_actions
from tests.pipeline.shapes import Shape, shapes


def of(shape: Shape) -> list[list[Sent]]:
    return sends(all_actions(*shape), shape.num_stages * shape.virtual_stages)


def test_two_stages_and_two_micro_batches_by_hand() -> None:
    """F0 F1 B0 B1 and F0 B0 F1 B1."""
    first, second = of(Shape("1f1b", 2, 2, 1))
    assert first == [
        Sent(Message("F", 0, 0), to=1, made_at=0, used_at=0),
        Sent(Message("F", 1, 0), to=1, made_at=1, used_at=2),
    ]
    assert second == [
        Sent(Message("B", 0, 1), to=0, made_at=1, used_at=2),
        Sent(Message("B", 1, 1), to=0, made_at=3, used_at=3),
    ]


def test_the_last_stage_sends_to_the_first_between_virtual_stages() -> None:
    first, second = of(Shape("interleaved", 2, 2, 2))
    assert {(sent.message.kind, sent.message.chunk, sent.to) for sent in second} == {
        ("F", 1, 0),  # chunk 1 of the model goes on in chunk 2, on the first stage
        ("B", 1, 0),
        ("B", 3, 0),
    }
    assert {(sent.message.kind, sent.message.chunk) for sent in first} == {("F", 0), ("F", 2), ("B", 2)}


def test_chunks_before_the_first_that_is_trained_get_no_gradients() -> None:
    schedules = all_actions(*Shape("interleaved", 2, 2, 2))
    found = {sent.message for each in sends(schedules, 4, first_trained=1) for sent in each}
    assert {message.chunk for message in found if message.kind == "B"} == {2, 3}
    assert {message.chunk for message in found if message.kind == "F"} == {0, 1, 2}


def test_one_stage_sends_to_itself_alone() -> None:
    (only,) = of(Shape("interleaved", 1, 2, 3))
    assert {sent.to for sent in only} == {0}
    assert of(Shape("gpipe", 1, 4, 1)) == [[]]


def test_chunks_are_counted_over_all_stages() -> None:
    assert [chunk_number(stage, chunk, 3) for chunk in (0, 1) for stage in range(3)] == list(range(6))


@given(shapes())
@settings(max_examples=60)
def test_every_result_that_another_chunk_needs_is_sent_once(shape: Shape) -> None:
    num_chunks = shape.num_stages * shape.virtual_stages
    count = Counter(sent.message for each in of(shape) for sent in each)
    assert count == Counter(
        [Message("F", i, chunk) for i in range(shape.num_microbatches) for chunk in range(num_chunks - 1)]
        + [Message("B", i, chunk) for i in range(shape.num_microbatches) for chunk in range(1, num_chunks)]
    )


@given(shapes())
@settings(max_examples=60)
def test_places_are_those_of_the_maker_and_of_the_user(shape: Shape) -> None:
    schedules = all_actions(*shape)
    for stage, each in enumerate(of(shape)):
        assert [sent.made_at for sent in each] == sorted(sent.made_at for sent in each), "in the order of making"
        for message, to, made_at, used_at in ((s.message, s.to, s.made_at, s.used_at) for s in each):
            kind, microbatch, chunk = message
            target = chunk + (1 if kind == "F" else -1)
            assert schedules[stage][made_at] == Action(kind, microbatch, chunk // shape.num_stages)  # type: ignore[arg-type]
            assert schedules[to][used_at] == Action(kind, microbatch, target // shape.num_stages)  # type: ignore[arg-type]
            assert (stage, to) == (chunk % shape.num_stages, target % shape.num_stages)
