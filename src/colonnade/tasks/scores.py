"""Scores of GLUE's tasks, of all examples at once, in float64 and in their order: the same on every layout.

labels   accuracy; of two labels F1 of the second one and Matthews' correlation
scores   Pearson's and Spearman's correlation

What is made of logits that are no numbers (NaN) is no number either: a likeliest one of them would be right by chance.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


def scores_of(logits: Floats, targets: Floats, *, binary: bool) -> dict[str, float]:
    """Of logits [n, labels], or scores [n, 1], and what was right, [n]. `binary`: the two labels have names."""
    if logits.shape[1] == 1:
        return {"pearson": pearson(logits[:, 0], targets), "spearman": spearman(logits[:, 0], targets)}
    predicted, right = logits.argmax(1), targets.astype(np.int64)
    found = {"accuracy": float((predicted == right).mean())}
    return found | ({"f1": f1(predicted, right), "matthews": matthews(predicted, right)} if binary else {})


def as_shares(right: Tensor, of: Tensor) -> Tensor:
    """Which guesses are right, bool, as numbers to be added up: NaN where their loss, or what they are made of, is."""
    return right.double().masked_fill(of.isnan(), math.nan)


def f1(predicted: NDArray[np.int64], right: NDArray[np.int64]) -> float:
    """The harmonic mean of precision and recall of label 1; 0 where it is neither there nor predicted."""
    hits = int(((predicted == 1) & (right == 1)).sum())
    total = int((predicted == 1).sum()) + int((right == 1).sum())
    return 2 * hits / total if total else 0.0


def matthews(predicted: NDArray[np.int64], right: NDArray[np.int64]) -> float:
    """Matthews' correlation of two labels: 0 where one side has a single label."""
    return pearson(predicted.astype(np.float64), right.astype(np.float64))


def pearson(x: Floats, y: Floats) -> float:
    """Pearson's correlation; 0 where one side does not vary."""
    if (x == x[:1]).all() or (y == y[:1]).all():  # their mean may be another number, by rounding
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x * x).sum()) * np.sqrt((y * y).sum()))
    return float((x * y).sum()) / size if size else 0.0


def spearman(x: Floats, y: Floats) -> float:
    """Pearson's correlation of ranks; equal numbers share the mean of theirs."""
    return pearson(_ranks(x), _ranks(y))


def _ranks(x: Floats) -> Floats:
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    ends = np.cumsum(count)
    return ((ends - count + ends - 1) / 2.0)[place].astype(np.float64)
