"""A schedule run on paper: is it legal, does it end, how long does it take, how many activations live. Pure.

    lists of actions + durations ──▶ when each action starts and ends ──▶ makespan, bubble, peak activations

Each stage runs its list from left to right, an action as soon as everything that it needs is there. The real runner
does no more, so what deadlocks here deadlocks there. From one stage to another a link carries one message after the
other, in the order in which they were made; what goes the other way has a link of its own. Stages that share cores are
faster while others wait: a `pace`. A pipeline with one warm-up too few trains to the right losses: only its bubble and
its peak, found here, tell.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from colonnade.pipeline.messages import chunk_number
from colonnade.pipeline.schedule import Action, Kind


class IllegalSchedule(Exception):
    """Lists of actions that no pipeline can run: actions missing, repeated or unknown, or a deadlock."""


@dataclass(frozen=True)
class Durations:
    """How long the actions of one micro-batch take on a stage of average size, in any unit of time.

    The default has a forward of 1 and a backward of 2: of a matrix's three products, one is forward, one for the
    gradient of its input, one for that of its weight.
    """

    forward: float = 1.0
    input_gradients: float = 1.0
    weight_gradients: float = 1.0

    @property
    def microbatch(self) -> float:
        """All the work on a micro-batch."""
        return self.forward + self.input_gradients + self.weight_gradients

    def of(self, kind: Kind, *, split: bool) -> float:
        """Duration of an action; `split`: B is input gradients alone, and W follows."""
        whole = self.input_gradients if split else self.input_gradients + self.weight_gradients
        return {"F": self.forward, "B": whole, "W": self.weight_gradients}[kind]


EQUAL: Final = Durations()
"""Every product of matrices takes 1."""


class Event(NamedTuple):
    """An action on a stage, from its start to its end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What became of a schedule. All tuples have one entry a stage."""

    events: tuple[tuple[Event, ...], ...]
    """In the order of the stage's list."""
    peak: tuple[int, ...]
    """The most micro-batch chunks whose activations lived at once: from the start of F to the end of B, or of W where
    backward is split, which still needs them."""

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max(events[-1].end for events in self.events)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each stage computed."""
        return tuple(sum(event.end - event.start for event in events) for events in self.events)

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they waited, 0 … 1."""
        return 1 - sum(self.busy) / (self.makespan * len(self.events))


class _Done(NamedTuple):
    """The end of an action, by which those that need it find it; `chunk` counts over all stages."""

    kind: Kind
    microbatch: int
    chunk: int


_ONWARD: Final = {"F": 1, "B": -1, "W": 0}
"""From a chunk to the one that uses what an action made."""


@dataclass
class _Made:
    """What actions have made: when it was ready, and when it is there for the stage that it was sent to."""

    num_chunks: int
    num_stages: int
    links: Mapping[tuple[int, int], tuple[float, float]]
    first_trained: int
    ended: dict[_Done, float] = field(default_factory=dict)
    arrived: dict[_Done, float] = field(default_factory=dict)
    free: dict[tuple[int, int], float] = field(default_factory=dict)
    """From when on the link from one stage to another can take the next message."""

    def add(self, done: _Done, ended: float) -> None:
        """An action has ended: what it made is on its way."""
        self.ended[done] = ended
        chunk, to = done.chunk, done.chunk + _ONWARD[done.kind]
        link = chunk % self.num_stages, to % self.num_stages
        least = self.first_trained if done.kind == "B" else 0
        if link[0] == link[1] or not least <= to < self.num_chunks:
            return
        transfer, latency = self.links.get((chunk, to), (0.0, 0.0))
        there = max(ended, self.free.get(link, 0.0)) + transfer
        self.arrived[done], self.free[link] = there, there - latency

    def needs(self, done: _Done) -> list[_Done]:
        """What has to be done before an action: F of the previous chunk; F of its own and B of the next chunk; its B.
        A backward of what is not trained waits for no other.
        """
        kind, microbatch, chunk = done
        if kind == "F":
            return [_Done("F", microbatch, chunk - 1)] if chunk else []
        if kind == "W":
            return [_Done("B", microbatch, chunk)]
        is_sent = self.first_trained <= chunk < self.num_chunks - 1
        return [_Done("F", microbatch, chunk), *([_Done("B", microbatch, chunk + 1)] if is_sent else [])]

    def at(self, need: _Done, stage: int) -> float:
        """When a stage has what it needs."""
        return (self.ended if need.chunk % self.num_stages == stage else self.arrived)[need]


def simulate(
    schedules: Sequence[Sequence[Action]],
    num_microbatches: int,
    *,
    virtual_stages: int = 1,
    durations: Durations | Sequence[Durations] = EQUAL,
    sizes: Sequence[float] | None = None,
    links: Mapping[tuple[int, int], tuple[float, float]] | None = None,
    pace: Callable[[int], float] | None = None,
    first_trained: int = 0,
) -> Simulation:
    """Run one list of actions a stage. Raises IllegalSchedule.

    `durations`: of a stage of average size, or of each chunk in the order of the model. `sizes` scales them for every
    chunk; 1 is an average stage. Without it all chunks are equal, 1 / virtual_stages, or as long as their durations.
    `links`: from a chunk to another, what a message takes from the end of an action until the other can use it, where
    the link is free, and the part of that which leaves the link free for the next (None: messages take no time).
    `pace`: how fast stages are while so many of them compute, 1 as fast as their durations say (None: always).
    `first_trained`: the first chunk with a backward. Those before it get no gradients, and wait for none.
    """
    split = any(action.kind == "W" for actions in schedules for action in actions)
    num_chunks = len(schedules) * virtual_stages
    check_complete(schedules, num_microbatches, virtual_stages, split=split)
    each = [durations] * num_chunks if isinstance(durations, Durations) else durations
    alone = 1 / virtual_stages if isinstance(durations, Durations) else 1.0
    sizes = [alone] * num_chunks if sizes is None else sizes
    assert len(each) == num_chunks, "durations of one chunk each"
    assert len(sizes) == num_chunks, "one size a chunk"
    made = _Made(num_chunks, len(schedules), links or {}, first_trained)
    if pace is None:
        events = _run(schedules, each, sizes, made, split=split)
    else:
        events = _Shared(schedules, each, sizes, split, pace, made).run()
    freed_by: Kind = "W" if split else "B"
    return Simulation(tuple(map(tuple, events)), tuple(peak_activations(actions, freed_by) for actions in schedules))


def check_complete(
    schedules: Sequence[Sequence[Action]], num_microbatches: int, virtual_stages: int, *, split: bool
) -> None:
    """Refuse lists in which a stage does not run each of its actions exactly once."""
    kinds: tuple[Kind, ...] = ("F", "B", "W") if split else ("F", "B")
    wanted = [Action(kind, i, c) for c in range(virtual_stages) for i in range(num_microbatches) for kind in kinds]
    known = set(wanted)
    for stage, actions in enumerate(schedules):
        count = Counter(actions)
        wrong = [f"{action} {count[action]} times" for action in wanted if count[action] != 1]
        wrong += [f"{action}, which is none of this step's" for action in count if action not in known]
        if wrong:
            raise IllegalSchedule(
                f"stage {stage} has to run each action once, and runs {', '.join(wrong[:8])}"
                + (f", and {len(wrong) - 8} more." if len(wrong) > 8 else ".")
            )


def peak_activations(actions: Sequence[Action], freed_by: Kind) -> int:
    """The most forwards of which the activations are not yet freed."""
    live = peak = 0
    for action in actions:
        live += (action.kind == "F") - (action.kind == freed_by)
        peak = max(peak, live)
    return peak


def peak_microbatches(actions: Sequence[Action]) -> int:
    """The most micro-batches at once of which some chunk has its backward to come."""
    chunks, live, peak = Counter[int](), set[int](), 0
    for action in actions:
        chunks[action.microbatch] += (action.kind == "F") - (action.kind == "B")
        (live.add if chunks[action.microbatch] else live.discard)(action.microbatch)
        peak = max(peak, len(live))
    return peak


def _run(
    schedules: Sequence[Sequence[Action]],
    durations: Sequence[Durations],
    sizes: Sequence[float],
    made: _Made,
    *,
    split: bool,
) -> list[list[Event]]:
    """Every stage goes on as far as it can, again and again, until all lists are done."""
    num_stages = len(schedules)
    events: list[list[Event]] = [[] for _ in schedules]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedules):
            while len(events[stage]) < len(actions):
                action = actions[len(events[stage])]
                done = _done(action, stage, num_stages)
                needs = made.needs(done)
                if any(need not in made.ended for need in needs):
                    break
                before = events[stage][-1].end if events[stage] else 0.0
                start = max([before, *(made.at(need, stage) for need in needs)])
                end = start + durations[done.chunk].of(action.kind, split=split) * sizes[done.chunk]
                made.add(done, end)
                events[stage].append(Event(action, start, end))
                moved = True
    _refuse_deadlock(schedules, events, made)
    return events


@dataclass
class _Shared:
    """The same where stages are the faster the fewer of them compute: from one start or end to the next."""

    schedules: Sequence[Sequence[Action]]
    durations: Sequence[Durations]
    sizes: Sequence[float]
    split: bool
    pace: Callable[[int], float]
    made: _Made
    now: float = 0.0
    left: dict[int, float] = field(default_factory=dict)
    """Of the actions that are being computed, by stage: how long they take yet, at a pace of 1."""
    begun: dict[int, float] = field(default_factory=dict)
    events: list[list[Event]] = field(init=False)

    def __post_init__(self) -> None:
        self.events = [[] for _ in self.schedules]

    def run(self) -> list[list[Event]]:
        while True:
            starts = [self._start(stage) for stage in range(len(self.schedules)) if stage not in self.left]
            pace = self.pace(len(self.left)) if self.left else 1.0
            ends = [self.now + left / pace for left in self.left.values()]
            moments = ends + [start for start in starts if start is not None]
            if not moments:
                break
            self._advance(min(moments), pace)
        _refuse_deadlock(self.schedules, self.events, self.made)
        return self.events

    def _start(self, stage: int) -> float | None:
        """When a stage that waits goes on: now, where it has what it needs, or later, or not before others end."""
        if len(self.events[stage]) == len(self.schedules[stage]):
            return None
        done = self._next(stage)
        needs = self.made.needs(done)
        if any(need not in self.made.ended for need in needs):
            return None
        start = max([self.now, *(self.made.at(need, stage) for need in needs)])
        if start > self.now:
            return start
        self.begun[stage] = self.now
        duration = self.durations[done.chunk].of(done.kind, split=self.split)
        self.left[stage] = duration * self.sizes[done.chunk]
        return None

    def _advance(self, until: float, pace: float) -> None:
        for stage, left in list(self.left.items()):
            if self.now + left / pace > until:
                self.left[stage] = left - (until - self.now) * pace
                continue
            del self.left[stage]
            action = self.schedules[stage][len(self.events[stage])]
            self.made.add(self._next(stage), until)
            self.events[stage].append(Event(action, self.begun.pop(stage), until))
        self.now = until

    def _next(self, stage: int) -> _Done:
        return _done(self.schedules[stage][len(self.events[stage])], stage, len(self.schedules))


def _done(action: Action, stage: int, num_stages: int) -> _Done:
    return _Done(action.kind, action.microbatch, chunk_number(stage, action.chunk, num_stages))


def _refuse_deadlock(schedules: Sequence[Sequence[Action]], events: Sequence[Sequence[Event]], made: _Made) -> None:
    """Say who waits for what, where lists are not done and nobody can go on."""
    waits = []
    for stage, (actions, done) in enumerate(zip(schedules, events, strict=True)):
        if len(done) < len(actions):
            action, num_stages = actions[len(done)], len(schedules)
            missing = next(n for n in made.needs(_done(action, stage, num_stages)) if n not in made.ended)
            need = Action(missing.kind, missing.microbatch, missing.chunk // num_stages)
            waits.append(
                f"stage {stage} cannot run {action} (number {len(done)} of its list) before {need} of stage "
                f"{missing.chunk % num_stages}"
            )
    if waits:
        raise IllegalSchedule("deadlock: " + "; ".join(waits) + ".")
