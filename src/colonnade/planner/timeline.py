"""A walk played on a machine's clocks: what each action takes, and for what.

    host      asks for one operator after the other
    device    runs an operator when it has been asked for and the one before is done
    links     one line for each axis; what is sent begins when its tensors are there, and who needs the result waits

So what overlaps is what the program lets overlap: a collective that is waited for at once stands in the way, one that
is waited for later costs what is left of it by then. On CPUs the host is the device, and collectives run at once.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from colonnade.pipeline.schedule import Action
from colonnade.planner.cost import Cost
from colonnade.planner.operators import Event, Operator, Section, Sent


@dataclass
class Clock:
    """Where host, device and links are."""

    cost: Cost
    host: float = 0.0
    device: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """[s] Of the device's time, by what it was for: "products", "memory", "launches", "tp", "dp", …"""
    _links: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _done: dict[int, tuple[float, str]] = field(default_factory=dict)

    @property
    def is_synchronous(self) -> bool:
        return self.cost.hardware.kind == "cpu"

    def play(self, events: Iterable[Event]) -> float:
        """[s] By which the device is further behind these."""
        began = self.device
        for event in events:
            if isinstance(event, Operator):
                self._operator(event)
            elif isinstance(event, Sent):
                self._sent(event)
            else:
                self._waited(event.number)
        return self.device - began

    def _operator(self, operator: Operator) -> None:
        cost = self.cost
        self.host += cost.dispatch
        self._wait("launches", self.host)
        seconds, products = cost.operator(operator), cost.arithmetic(operator)
        self.spent["products" if products >= cost.movement(operator) else "memory"] += seconds
        self.device += seconds
        if self.is_synchronous:
            self.host = self.device

    def _sent(self, sent: Sent) -> None:
        """Messages between stages are the pipeline's affair."""
        axis = sent.entry.axis
        if sent.entry.operation in ("send", "receive"):
            return
        seconds = self.cost.collective(sent.entry, sent.ranks)
        if self.is_synchronous:
            self.spent[axis] += seconds
            self.device += seconds
            self.host = self.device
            return
        begin = max(self.device, self.host, self._links[axis])
        self._links[axis] = begin + seconds
        self._done[sent.number] = begin + seconds, axis

    def _waited(self, number: int) -> None:
        until, axis = self._done.pop(number, (0.0, ""))
        self._wait(axis, until)

    def _wait(self, what: str, until: float) -> None:
        if until > self.device:
            self.spent[what] += until - self.device
            self.device = until


@dataclass(frozen=True)
class Played:
    """A walk with times."""

    seconds: tuple[float, ...]
    """Of each section."""
    spent: dict[str, float]
    """[s] Of the whole walk, by what it was for."""

    @property
    def total(self) -> float:
        return sum(self.seconds)


def play(sections: Sequence[Section], cost: Cost) -> Played:
    """All sections, one behind the other."""
    clock = Clock(cost)
    seconds = tuple(clock.play(section.events) for section in sections)
    return Played(seconds, dict(clock.spent))


def of_actions(sections: Sequence[Section], seconds: Sequence[float]) -> dict[tuple[str, int], float]:
    """[s] Of each kind of action on each chunk: the median over the micro-batches, which leaves out the first and the
    last.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for section, each in zip(sections, seconds, strict=True):
        if isinstance(section.action, Action):
            found.setdefault((section.action.kind, section.action.chunk), []).append(each)
    return {key: sorted(every)[len(every) // 2] for key, every in found.items()}
