"""Numbers near a number, and lists of them in words: what messages propose; and what of a file is a number."""

import math
import sys
from collections.abc import Iterable


def is_number(value: object) -> bool:
    """Whether a value from a file is a number, and one that a float can hold: a JSON may have NaN, and whole numbers of
    any length.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def divisors(number: int) -> list[int]:
    """All divisors of a number >= 1, rising."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number` next to `wanted`, from below and above."""
    below = [d for d in divisors(number) if d <= wanted][-1:]
    above = [d for d in divisors(number) if d > wanted][:1]
    return below + above


def multiples_around(number: int, base: int) -> tuple[int, int]:
    """The multiples of `base` below and above a `number` that is none; the lower one may be 0."""
    return number // base * base, (number // base + 1) * base


def either(below: int, above: int) -> str:
    """'16 or 24', and '24' where the lower one is 0."""
    return f"{below} or {above}" if below else f"{above}"


def one_of(values: Iterable[object]) -> str:
    """'1', '1 or 2', '1, 2 or 4'."""
    *others, last = (str(value) for value in values)
    return f"{', '.join(others)} or {last}" if others else last


def in_words(value: object) -> str:
    """A value of a table: 1,234,567 · 4.08 · 'a, b'."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def counted(number: int, noun: str, nouns: str = "") -> str:
    """'1 document', '0 documents', '1,234 documents'. `nouns`: where it takes more than an s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def size_of_text(num_bytes: float) -> str:
    """'1,234.5 MB', '12.3 kB', '20 bytes'."""
    if num_bytes < 1e3:
        return counted(round(num_bytes), "byte")
    return f"{num_bytes / 1e3:,.1f} kB" if num_bytes < 1e5 else f"{num_bytes / 1e6:,.1f} MB"


def amount(size: int) -> str:
    """Bytes with three digits and a unit of a power of 1000: '2.09 GB', '820 B'."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[0]}"
