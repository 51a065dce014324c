"""Two runs, number against number. Pure: what the ranks wrote down in, a verdict out.

Every box of every rank is held against the same box of the serial run's tensor. The distance of two numbers is that of
their elements that are furthest apart, relative to the largest element of the serial run's tensor, or to its `Floor`;
NaN is infinitely far from everything. Of each tensor every element must be on some rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.mesh.layout import Layout

TOLERANCE = 1e-10
"""fp64: how far numbers may be apart that were added up in another order. Seen in tests: 1e-11 at most."""
FLOOR = 1e-3
"""Of a step's largest gradient. No gradient is held against less: it is a sum whose terms may cancel out, and what is
left then is their rounding, 1e-16 of them. So the bias that all choices of a softmax have in common has a gradient
of 0, or of 1e-17. With `TOLERANCE` it may be off by 1e-13 of the largest gradient. What a wrong sum does, 1e-3 of a
tensor, is seen down to tensors of 1e-10 of it."""
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
"""Of one rounding: the largest relative error in fp32, half of it in 16 bits."""
TIMES = 4.0
"""Other formats: up to the first update a layout's number may be so many times as far from the fp64 run as the serial
run's in that format, …"""
LATER_TIMES = 16.0
"""… later so many times as far as the furthest of its kind (gradients, weights, …): by then every number depends on how
each one before was rounded, and where AdamW divides a small gradient by its own size, on its sign …"""
ROUNDINGS = 16.0
"""… and so many roundings further."""


class Number(NamedTuple):
    """A tensor or scalar of the run."""

    what: str
    """loss, overflow, gradient, gradient norm, weight, optimizer and a name, parameter."""
    name: str
    """The weight's logical name; empty for a scalar of the step."""
    step: int
    """0: before the first step."""

    def __str__(self) -> str:
        if not self.name:
            return f"{self.what} of step {self.step}"
        if self.what == "gradient":
            return f"gradient of {self.name} in step {self.step}"
        when = f"after step {self.step}" if self.step else "before step 1"
        of = "" if self.what in ("weight", "parameter") else "of "
        return f"{self.what} {of}{self.name} {when}"


class LocalShard(NamedTuple):
    """What one rank has of a number."""

    number: Number
    shape: tuple[int, ...]
    """Of the logical tensor."""
    offsets: tuple[int, ...]
    values: Tensor
    """The box that begins at `offsets`."""


class Far(NamedTuple):
    """Where a rank's shard is furthest from the serial run's."""

    distance: float
    """Relative to the whole tensor's largest element, or its floor; infinite where one of the two is NaN."""
    rank: int
    element: tuple[int, ...]
    """Of the whole tensor."""


Bound = Callable[[Number], float]


@dataclass(frozen=True)
class Comparison:
    """How far every number of one run is from the serial run's."""

    furthest: Mapping[Number, Far]
    """In the serial run's order; of each number the furthest of all ranks."""
    missing: Mapping[Number, int]
    """Elements that no rank has, of numbers where there are any."""
    unknown: Sequence[Number]
    """Numbers that the serial run does not have."""


def of_serial_run(shards: Iterable[LocalShard]) -> dict[Number, Tensor]:
    """The numbers of a serial run, in their order."""
    shards = list(shards)
    assert all(tuple(shard.values.shape) == shard.shape for shard in shards), "a serial run has all of every tensor"
    return {shard.number: shard.values for shard in shards}


class Floor:
    """What the distance of a number is relative to where that is more than its tensor's largest element.

    gradient                 a = FLOOR · the largest element of any gradient of its step
    optimizer exp_avg        a mean of such: the largest a
    optimizer exp_avg_sq     TOLERANCE · a²: the square of what a gradient may be off by, TOLERANCE · a
    weight, parameter        a · per_gradient, added up over the steps
    """

    def __init__(self, serial: Mapping[Number, Tensor], per_gradient: float) -> None:
        """`per_gradient`: how far a step moves a weight at most, in units of its gradient."""
        self._of_step: dict[int, float] = {}
        for number, values in serial.items():
            if number.what == "gradient" and values.numel():
                largest = FLOOR * float(values.double().abs().max())
                self._of_step[number.step] = max(self._of_step.get(number.step, 0.0), largest)
        self._per_gradient = per_gradient

    def __call__(self, number: Number) -> float:
        """In the number's own units; 0 where there is none: losses, norms, initial weights."""
        so_far = [floor for step, floor in self._of_step.items() if step <= number.step]
        match number.what:
            case "gradient":
                return self._of_step[number.step]
            case "optimizer exp_avg":
                return max(so_far, default=0.0)
            case "optimizer exp_avg_sq":
                return TOLERANCE * max(so_far, default=0.0) ** 2
            case "weight" | "parameter":
                return self._per_gradient * sum(so_far)
        return 0.0


def compare(
    serial: Mapping[Number, Tensor], ranks: Iterable[Sequence[LocalShard]], per_gradient: float = 0.0
) -> Comparison:
    """Hold every shard of every rank against the serial run. `per_gradient`: see `Floor`."""
    floor = Floor(serial, per_gradient)
    furthest: dict[Number, Far] = {}
    seen = {number: torch.zeros(values.shape, dtype=torch.bool) for number, values in serial.items()}
    unknown: list[Number] = []
    for rank, shards in enumerate(ranks):
        for shard in shards:
            if shard.number not in serial or shard.shape != tuple(serial[shard.number].shape):
                unknown.append(shard.number)
                continue
            seen[shard.number][_window(shard)] = True
            far = distance(shard, serial[shard.number], rank, floor(shard.number))
            furthest[shard.number] = max(furthest.get(shard.number, far), far, key=lambda each: each.distance)
    missing = {number: int((~mask).sum()) for number, mask in seen.items() if not bool(mask.all())}
    nothing = Far(0.0, 0, ())
    return Comparison({number: furthest.get(number, nothing) for number in serial}, missing, unknown)


def distance(shard: LocalShard, serial: Tensor, rank: int, floor: float = 0.0) -> Far:
    """Where a shard is furthest from the serial run's tensor."""
    if shard.values.numel() == 0:
        return Far(0.0, rank, shard.offsets)
    apart = (shard.values.double() - serial[_window(shard)].double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    flat = int(apart.argmax())
    inside = torch.unravel_index(torch.tensor(flat), apart.shape) if apart.ndim else ()
    element = tuple(at + int(i) for at, i in zip(shard.offsets, inside, strict=True))
    largest = float(serial.double().abs().max())
    scale = max(largest, floor) if math.isfinite(largest) else largest
    return Far(_relative(float(apart.flatten()[flat]), scale), rank, element)


def _relative(apart: float, scale: float) -> float:
    if apart == 0.0:
        return 0.0
    return apart / scale if 0.0 < scale < math.inf else math.inf


def _window(shard: LocalShard) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.values.shape, strict=True))


# --- what is equal ----------------------------------------------------------------------------------------------------


def exact(number: Number) -> float:
    """The bound in fp64."""
    return TOLERANCE


def near(own: Comparison, precision: str) -> Bound:
    """The bound in a format of fewer bits, given how far the serial run in that format is from the one in fp64."""
    furthest: dict[str, float] = {}
    for number, far in own.furthest.items():
        furthest[number.what] = max(furthest.get(number.what, 0.0), far.distance)

    def bound(number: Number) -> float:
        if number.what == "overflow":
            return 0.0  # a step is skipped or it is not
        first = number.step == 0 or (number.step == 1 and number.what in ("loss", "gradient", "gradient norm"))
        times = TIMES * own.furthest[number].distance if first else LATER_TIMES * furthest[number.what]
        return times + ROUNDINGS * UNIT[precision]

    return bound


# --- verdicts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """How far one layout is from the serial run."""

    layout: str
    num_ranks: int
    max_relative_difference: float | None
    """None where a number is none (NaN) or infinite, and where the run failed."""
    furthest: str | None
    """The number that is this far, and where."""
    first_difference: str | None
    """The first number in the order of the run that differs by more than its bound, by how much and where."""
    ok: bool
    max_ratio_to_bound: float | None
    """The largest distance in units of the number's own bound: above 1, that number differs. None as above."""
    nearest_to_bound: str | None
    """The number of this ratio, and where."""


def judge(text: str, layout: Layout, comparison: Comparison, bound: Bound) -> Verdict:
    """The verdict on a run that came to its end."""
    number, far = max(comparison.furthest.items(), key=lambda item: item[1].distance)
    first = next(_differences(layout, comparison, bound), None)
    ratios = {each: _ratio(seen.distance, bound(each)) for each, seen in comparison.furthest.items()}
    nearest = max(ratios, key=lambda each: ratios[each])
    return Verdict(
        layout=text,
        num_ranks=layout.num_ranks,
        max_relative_difference=far.distance if math.isfinite(far.distance) else None,
        furthest=_described(number, far, layout) if far.distance else None,
        first_difference=first,
        ok=first is None,
        max_ratio_to_bound=ratios[nearest] if math.isfinite(ratios[nearest]) else None,
        nearest_to_bound=_described(nearest, comparison.furthest[nearest], layout) if ratios[nearest] else None,
    )


def _ratio(distance: float, bound: float) -> float:
    """Above 1 where the distance is; a bound may be 0 or infinite."""
    if bound == 0.0:
        return math.inf if distance else 0.0
    return distance / bound if bound < math.inf else 0.0


def failed(text: str, layout: Layout, status: int) -> Verdict:
    """The verdict on a run that ended with an error."""
    reason = f"its ranks failed with exit status {status} before there was anything to compare"
    return Verdict(text, layout.num_ranks, None, None, reason, ok=False, max_ratio_to_bound=None, nearest_to_bound=None)


def _differences(layout: Layout, comparison: Comparison, bound: Bound) -> Iterator[str]:
    for number, far in comparison.furthest.items():
        if number in comparison.missing:
            yield f"{number}: {comparison.missing[number]} of its elements are on no rank"
        if far.distance > bound(number):
            yield _described(number, far, layout)
    yield from (f"{number}, which the serial run does not have" for number in comparison.unknown)


def _described(number: Number, far: Far, layout: Layout) -> str:
    """ "gradient of blocks.1.mlp.up.weight in step 1 by 2.3e-02 at [12, 3] on rank 1 [pp0 dp0 tp1]"."""
    at = f" at {list(far.element)}" if far.element else ""
    place = " ".join(f"{axis}{rank}" for axis, rank in layout.coordinates(far.rank).items())
    return f"{number} by {far.distance:.1e}{at} on rank {far.rank} [{place}]"
