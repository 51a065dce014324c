"""Numbers to places on a chart and to words on its axes. Pure."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

LOG_FROM = 30.0  # highest to lowest: from here on a scale of positive numbers is logarithmic
_SMALLEST = 1e-300  # of a scale: numbers below, which have few digits, lie at its end
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Scale:
    """From `low` to `high`, evenly or by powers of ten."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(max(value, _SMALLEST)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int) -> list[float]:
        """Round numbers within the scale."""
        if not self.log:
            step = round_step((self.high - self.low) / about)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [number * step for number in range(first, last + 1)]
        first, last = math.floor(math.log10(self.low)), min(math.ceil(math.log10(self.high)), sys.float_info.max_10_exp)
        every = max(1, round((last - first) / about))
        factors = (1, 2, 5) if last - first <= 2 else (1,)
        found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
        return [each for each in found if self.low * (1 - 1e-9) <= each <= self.high * (1 + 1e-9)]


def round_step(wanted: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is no smaller than wanted."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= wanted * (1 - 1e-9))


def scale_of(values: Sequence[float], *, may_be_log: bool = True, from_zero: bool = True) -> Scale:
    """A scale that shows all values; with some room, and logarithmic where they differ by much. `from_zero`: where 0 is
    near, it is on it.
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    if may_be_log and low > _SMALLEST and high / low > LOG_FROM:
        return Scale(low / 1.1, min(high * 1.1, sys.float_info.max), log=True)
    room = max((high - low) * 0.06 or abs(high) * 0.1 or 1.0, _SMALLEST)
    bottom = 0.0 if from_zero and 0 <= low <= (high - low) * 0.5 else low - room
    return Scale(bottom, min(high + room, sys.float_info.max))


def axis_of(highest: float) -> Scale:
    """From 0 to where a series ends."""
    return Scale(0.0, highest if highest > 0 else 1.0)


def short(value: float) -> str:
    """A number in few characters: 12.5k, 0.003, 3e-05."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for factor, letter in _LARGE:
        if size >= factor * 0.99995:
            return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    return f"{value:.1%}" if abs(value) < 0.995 else f"{value:.0%}"


def length_of_time(seconds: float) -> str:
    """'3 d 4 h', '2 h 05 min', '3 min 20 s', '12.3 s', '4.5 ms'."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 0.9995:  # what rounds to 1000 ms is a second
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def bytes_in_words(size: float) -> str:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= factor * 0.9995:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
