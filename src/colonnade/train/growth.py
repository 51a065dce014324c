"""A thermometer that grows over thousands of steps: a sign of a divergence that the loss does not show yet. Pure.

    steps      │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │ 8 │ 9         windows of growth_steps / 8
    lowest       7   7   8   9  11  14  18  24  31             of each, of the largest |value| at a site
                 └──────────── 31 > 4 × 7 ──────┘              told with the first reading of window 9

The lowest of a window is what all its readings exceed: a single outlier moves nothing, what stays does. YaLM-100B's
largest attention logits grew so for thousands of steps before its loss diverged.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from colonnade.architecture.sites import CROSS
from colonnade.config.thermometers import GROWING
from colonnade.train.thermometers import Reading

WINDOWS = 8
"""In growth_steps."""

Windows = dict[str, list[tuple[int, float]]]
"""By thermometer: the numbers of the last windows, with the lowest reading of each."""


class Grown(NamedTuple):
    """A thermometer that has."""

    since: int
    """The last step at which it was still low."""
    reason: str


def observe(windows: Mapping[str, list[tuple[int, float]]], reading: Reading, growth_steps: int) -> Windows:
    """The windows behind a reading, of the thermometers that it has. What is not finite is left out: the loss tells of
    that.
    """
    number, there = reading.step * WINDOWS // growth_steps, _there(reading)
    found = {name: kept for name, kept in windows.items() if name in there}
    for name, value in _watched(reading):
        kept = found.get(name, [])
        if kept and kept[-1][0] == number:
            kept = [*kept[:-1], (number, min(kept[-1][1], value))]
        else:
            kept = [*kept, (number, value)]
        found[name] = [each for each in kept if each[0] >= number - WINDOWS - 1]
    return found


def grown(
    before: Mapping[str, list[tuple[int, float]]], reading: Reading, growth: float, growth_steps: int
) -> Grown | None:
    """What the windows that this reading has completed show: of several thermometers, the one that has grown most."""
    number = reading.step * WINDOWS // growth_steps
    factors: list[tuple[float, str, int, float]] = []
    for name in before.keys() & _there(reading):
        kept = before[name]
        complete, lowest = kept[-1]
        past = dict(kept).get(complete - WINDOWS)
        if complete < number and past is not None and lowest > growth * past:
            factors.append((lowest / past if past else float("inf"), name, complete - WINDOWS, lowest))
    if not factors:
        return None
    factor, name, window, lowest = max(factors)
    since = -(-(window + 1) * growth_steps // WINDOWS) - 1
    return Grown(
        since,
        f"has {name} of at least {lowest:.4g} for {max(1, growth_steps // WINDOWS)} steps, {factor:.3g} times what it "
        f"was at step {since} (divergence.growth = {growth:g})",
    )


def _there(reading: Reading) -> set[str]:
    """Thermometers that are measured, whatever they show."""
    return {f"{unit} {site}" for (unit, site), _ in reading.activations}


def _watched(reading: Reading) -> Iterator[tuple[str, float]]:
    for (unit, site), found in reading.activations:
        if site.removeprefix(CROSS) in GROWING and found.largest < float("inf"):
            yield f"{unit} {site}", found.largest
