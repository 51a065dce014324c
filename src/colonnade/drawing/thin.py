"""Long series as few points that keep every extreme. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST = 400
"""Points of a line: about one to two pixels each."""


@dataclass(frozen=True)
class Thin:
    """A series of numbers, several of which may stand for many."""

    rows: np.ndarray
    """Of which row of the whole series each point is, rising: the middle one of those that it stands for."""
    mean: Floats
    low: Floats
    high: Floats
    each: int
    """For how many numbers a point stands, at most; with 1, `mean`, `low` and `high` are the numbers themselves."""


def thin(values: Floats, most: int = MOST) -> Thin:
    """At most `most` points of a series' finite numbers: mean, lowest and highest of equal shares."""
    rows = np.flatnonzero(np.isfinite(values))
    kept = values[rows]
    each = -(-len(kept) // most) if len(kept) else 1
    if each <= 1:
        return Thin(rows, kept, kept, kept, 1)
    starts = np.arange(0, len(kept), each)
    counts = np.diff(np.append(starts, len(kept)))
    mean = np.add.reduceat(kept, starts) / counts
    low, high = np.minimum.reduceat(kept, starts), np.maximum.reduceat(kept, starts)
    return Thin(rows[starts + counts // 2], mean, low, high, each)
