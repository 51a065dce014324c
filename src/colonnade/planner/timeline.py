"""What a stage holds at each moment of a step, on paper: the moves of the runner and its chunks without the work.

It follows `pipeline/runner.py` and `pipeline/chunk.py` (what is kept of a micro-batch from forward to backward) move by
move, with an owner and a mailbox that count bytes, and yields what is alive whenever a unit is about to run, has run,
or has handed its gradients over. Pure; tests hold it beside a real step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colonnade.pipeline.messages import Message, chunk_number
from colonnade.pipeline.schedule import Action
from colonnade.planner.activations import Kept
from colonnade.planner.mail import Mail
from colonnade.planner.ownership import Ownership, PartBuffers

EMBEDDING, HEAD = "embedding", "head"


class Live(NamedTuple):
    """Bytes alive at one moment, beside what is there all the time."""

    activations: int
    """What backward will need, gradients of the stream, and messages between stages."""
    buffers: int
    """Whole parameters and gradients of which only a slice is kept, and gradients on their way to other ranks."""


@dataclass(frozen=True)
class Stage:
    """What the timeline has to know of a stage."""

    number: int
    chunks: Sequence[Sequence[str]]
    """The units of each chunk."""
    needs: Mapping[str, Sequence[str]]
    """The parts whose weights each unit multiplies with."""
    buffers: Mapping[str, PartBuffers]
    """Of each part."""
    kept: Mapping[str, Kept]
    """What a micro-batch leaves in each unit."""
    stream: int
    """Bytes of a micro-batch's residual stream."""
    zero: int
    recompute_every: int
    """Blocks are computed again in groups of so many; 0: never."""
    splits: bool
    """Whether weight gradients are put off."""


def timeline(stage: Stage, schedules: Sequence[Sequence[Action]]) -> Iterator[Live]:
    """The moments of one step, given the actions of every stage."""
    return _Timeline(stage, schedules).run()


def groups(units: Sequence[str], every: int) -> list[tuple[list[str], bool]]:
    """(units, whether backward computes them again): blocks by `every`, the others one by one and never again."""
    found: list[tuple[list[str], bool]] = []
    for unit in units:
        again = every > 0 and unit not in (EMBEDDING, HEAD)
        if again and found and found[-1][1] and len(found[-1][0]) < every:
            found[-1][0].append(unit)
        else:
            found.append(([unit], again))
    return found


class _Timeline:
    def __init__(self, stage: Stage, schedules: Sequence[Sequence[Action]]) -> None:
        self.stage, self.num_stages, self.actions = stage, len(schedules), schedules[stage.number]
        self.groups = [groups(units, stage.recompute_every) for units in stage.chunks]
        self.owner = Ownership(stage.needs, stage.buffers, self._uses(), zero=stage.zero)
        self.mail = Mail(schedules, stage.number, self.num_stages * len(stage.chunks))
        self.activations = 0

    def run(self) -> Iterator[Live]:
        last = {(action.kind, action.chunk): action for action in self.actions}
        moves = {"F": self._forward, "B": self._backward, "W": self._weights}
        for action in self.actions:
            yield from moves[action.kind](action, last=action is last[action.kind, action.chunk])

    def _uses(self) -> Iterator[str]:
        for action in self.actions:
            if action.kind == "F":
                yield from self.stage.chunks[action.chunk]
            if action.kind == "B":
                for group, again in reversed(self.groups[action.chunk]):
                    yield from [*(group if again else []), *reversed(group)]

    # --- actions ------------------------------------------------------------------------------------------------------

    def _forward(self, action: Action, *, last: bool) -> Iterator[Live]:
        number, chunk = self._number(action), self.groups[action.chunk]
        self.mail.take(Message("F", action.microbatch, number - 1))
        self.activations += self._entry(action.chunk)
        for group, again in chunk:
            yield from self._pass(group, kept=not again)
            if again and group is not chunk[-1][0]:
                self.activations += self.stage.stream  # the next group's input
        self.mail.put(Message("F", action.microbatch, number), self.stage.stream if chunk[-1][1] else 0)

    def _backward(self, action: Action, *, last: bool) -> Iterator[Live]:
        number, chunk = self._number(action), self.groups[action.chunk]
        self.mail.take(Message("B", action.microbatch, number + 1))
        afterwards = self.activations - self._left_by_forward(action.chunk)
        self.activations += 0 if chunk[-1][0] == [HEAD] else self.stage.stream  # the gradient that came
        for place, (group, again) in reversed(list(enumerate(chunk))):
            if again:
                yield from self._pass(group, kept=True)
            for unit in reversed(group):
                yield self._acquire(unit, gradients=True)
                afterwards += self._undo(unit)
                yield self._release(unit)
                self.activations -= self._done_with(unit)
                if not self.stage.splits:
                    yield self._left(unit, last=last)
            if place == 0 or chunk[place - 1][1]:  # else what went in is the unit before's, which still holds it
                self.activations -= self._entry(action.chunk) if place == 0 else self.stage.stream
        self.activations = afterwards
        self.mail.put(Message("B", action.microbatch, number), self.stage.stream)

    def _weights(self, action: Action, *, last: bool) -> Iterator[Live]:
        for unit in reversed(self.stage.chunks[action.chunk]):
            self.owner.open(unit)
            yield self._now()
            self.activations -= self.stage.kept[unit].put_off
            yield self._left(unit, last=last)

    # --- units --------------------------------------------------------------------------------------------------------

    def _pass(self, units: Sequence[str], *, kept: bool) -> Iterator[Live]:
        for unit in units:
            yield self._acquire(unit, gradients=unit == HEAD)
            if kept:
                self.activations += self.stage.kept[unit].inside + self.stage.kept[unit].out
            yield self._release(unit)

    def _undo(self, unit: str) -> int:
        """Backward through a unit makes its input's gradient; returns what it puts off."""
        kept = self.stage.kept[unit]
        put_off = kept.put_off if self.stage.splits else 0
        self.activations += put_off - kept.inside + (0 if unit == EMBEDDING else self.stage.stream)
        return put_off

    def _done_with(self, unit: str) -> int:
        """What goes with a unit that backward has left: what came out, and the gradient of that."""
        return self.stage.kept[unit].out + (0 if unit == HEAD else self.stage.stream)

    def _left_by_forward(self, chunk: int) -> int:
        """What one micro-batch's forward through a chunk has left."""
        left = self._entry(chunk)
        for group, again in self.groups[chunk]:
            kept = [self.stage.kept[unit] for unit in group]
            left += self.stage.stream if again else sum(each.inside + each.out for each in kept)
        return left - (self.stage.stream if self.groups[chunk][-1][1] else 0)

    def _entry(self, chunk: int) -> int:
        return 0 if self.stage.chunks[chunk][0] == EMBEDDING else self.stage.stream

    def _number(self, action: Action) -> int:
        return chunk_number(self.stage.number, action.chunk, self.num_stages)

    # --- moments ------------------------------------------------------------------------------------------------------

    def _acquire(self, unit: str, *, gradients: bool) -> Live:
        self.owner.acquire(unit, gradients=gradients)
        return self._now()

    def _release(self, unit: str) -> Live:
        self.owner.release(unit)
        return self._now()

    def _left(self, unit: str, *, last: bool) -> Live:
        self.owner.left(unit, last=last)
        return self._now()

    def _now(self) -> Live:
        return Live(self.activations + self.mail.bytes(self.stage.stream), self.owner.bytes)
