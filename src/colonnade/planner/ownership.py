"""Which of a stage's buffers are whole at each moment, on paper: the moves of `data_parallel/zero.py` alone. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MOST_SUMS = 2  # sums over dp that are under way at once


@dataclass(frozen=True)
class PartBuffers:
    """Bytes of one part's buffers that come and go."""

    parameters: int
    """Whole; 0 where they are always there."""
    gradients: int
    """Whole; 0 where they are always there."""
    sent: int
    """While they are summed over dp: what the sum is put in, and a copy in a narrower type."""


class Ownership:
    """Told what its namesake is told, in the same order; knows how many bytes that takes."""

    def __init__(
        self, needs: Mapping[str, Sequence[str]], buffers: Mapping[str, PartBuffers], uses: Iterable[str], *, zero: int
    ) -> None:
        """`needs`: each unit, in the order of the model, with the parts whose weights it multiplies with. `uses`: the
        units that will be acquired, in their order.
        """
        self.needs, self.buffers, self.zero = needs, buffers, zero
        self._uses = deque(uses)
        self._completes = _first_needed(needs)
        self._whole: set[str] = set()
        self._open: set[str] = set()
        self._summing: deque[str] = deque()

    def acquire(self, unit: str, *, gradients: bool) -> None:
        assert self._uses.popleft() == unit, "units come as the schedule has them"
        self._whole.update(self.needs[unit], self._next())
        if gradients:
            self.open(unit)

    def release(self, unit: str) -> None:
        self._whole -= set(self.needs[unit]) - set(self._next())

    def open(self, unit: str) -> None:
        for part in self.needs[unit]:
            self._finish(part)
            self._open.add(part)

    def left(self, unit: str, *, last: bool) -> None:
        if not last and self.zero < 2:
            return
        for part in self._completes[unit]:
            while len(self._summing) >= MOST_SUMS:
                self._finish(self._summing[0])
            self._summing.append(part)

    @property
    def bytes(self) -> int:
        """Of whole buffers of which a rank keeps a slice, and of sums under way."""
        of = self.buffers
        gathered = sum(of[part].parameters for part in self._whole)
        return gathered + sum(of[part].gradients for part in self._open) + sum(of[part].sent for part in self._summing)

    def _next(self) -> Sequence[str]:
        return self.needs[self._uses[0]] if self._uses else ()

    def _finish(self, part: str) -> None:
        if part in self._summing:
            self._summing.remove(part)
            self._open.discard(part)


def _first_needed(needs: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Each unit with the parts that it is the first to need: their gradients are complete when backward leaves it."""
    seen: set[str] = set()
    completes: dict[str, list[str]] = {}
    for unit, parts in needs.items():
        completes[unit] = [part for part in parts if part not in seen]
        seen.update(parts)
    return completes
