"""What stages send each other, and in what order: read off the schedule, before anything runs.

A stage sends what an action made to the stage that uses it. Every receiver knows its sender's schedule, so receives are
posted ahead in the order in which the sender sends, and a sender knows from what it receives which of its own messages
must have arrived. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colonnade.pipeline.schedule import Action


class Message(NamedTuple):
    """What one action hands to the next: the carry after chunk `chunk` (F), or the gradients of what it took (B)."""

    kind: str
    microbatch: int
    chunk: int
    """Counted over all stages, in the order of the model."""


@dataclass(frozen=True)
class Sent:
    """A message on its way from one stage to another."""

    message: Message
    to: int
    made_at: int
    """The place in the sender's schedule of the action that made it."""
    used_at: int
    """The place in the receiver's schedule of the action that uses it."""


def chunk_number(stage: int, chunk: int, num_stages: int) -> int:
    """Which chunk of the model the `chunk`-th of a stage is."""
    return chunk * num_stages + stage


def sends(schedules: Sequence[Sequence[Action]], num_chunks: int, first_trained: int = 0) -> list[list[Sent]]:
    """What each stage sends, in order, given every stage's actions. Messages of a stage to itself are among them.

    `first_trained`: the first chunk with a backward. Those before it get no gradients.
    """
    num_stages = len(schedules)
    places = [{action: place for place, action in enumerate(actions)} for actions in schedules]

    def of(stage: int) -> Iterator[Sent]:
        for place, action in enumerate(schedules[stage]):
            number = chunk_number(stage, action.chunk, num_stages)
            target = {"F": number + 1, "B": number - 1}.get(action.kind)
            if target is None or not (0 if action.kind == "F" else first_trained) <= target < num_chunks:
                continue
            to, chunk = target % num_stages, target // num_stages
            use = places[to][Action(action.kind, action.microbatch, chunk)]
            yield Sent(Message(action.kind, action.microbatch, number), to, place, use)

    return [list(of(stage)) for stage in range(num_stages)]
