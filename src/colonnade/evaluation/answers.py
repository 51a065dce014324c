"""From the scores of tokens to answers: the likeliest runs of tokens over all windows of a question's text.

A window gives each of its tokens a score to begin the answer and one to end it; a run's score is their sum. A run
begins at a token in the window that has most text around it, is at most so many tokens long, and of runs with the same
text the likeliest counts. The score of "no answer" is that of the first token, [CLS], in the window where it is least.

As run_squad.py and squad_metrics.py (Devlin et al., "BERT"; Hugging Face transformers), but for one thing: their
n likeliest tokens are taken of the whole window and then those outside of the text are dropped, here of the text alone.
So there is always a run, and a run that they find is among those found here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Selection:
    """How answers are chosen."""

    n_best: int = 20
    """Answers of a question that are kept, and tokens of a window that runs may begin or end with."""
    longest: int = 30
    """[tokens] Of an answer."""


class WindowScores(NamedTuple):
    """What a model says of one window."""

    first: int
    """Number of the window's first token in the question's text."""
    starts: Numbers
    """[tokens of text in the window]"""
    ends: Numbers
    begins: NDArray[np.bool_]
    """Where runs may begin: no other window has more text around the token."""
    null: tuple[float, float]
    """Start and end score of [CLS]."""


class Run(NamedTuple):
    """A run of tokens, by their numbers in the question's text; `stop` is behind the last."""

    begin: int
    stop: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


class Answer(NamedTuple):
    """A text that the model may answer with, and how sure it is among those found; "" is no answer."""

    text: str
    probability: float
    start_logit: float
    end_logit: float

    def as_json(self) -> dict[str, Any]:
        """An entry of nbest_predictions.json."""
        return self._asdict()


@dataclass(frozen=True)
class Answers:
    """Of one question."""

    best: Sequence[Answer]
    """From the likeliest on."""
    null_odds: float | None
    """[logits] How much likelier no answer is than the best one; None: every question has an answer (1.1)."""

    @property
    def text(self) -> str:
        """The likeliest that is not empty, if there is one."""
        return next((answer.text for answer in self.best if answer.text), "")

    def prediction(self, threshold: float) -> str:
        """What is answered: nothing, where that is likelier by more than `threshold`."""
        return "" if self.null_odds is not None and self.null_odds > threshold else self.text


def best_runs(window: WindowScores, selection: Selection) -> list[Run]:
    """The runs between the likeliest tokens of one window, from the likeliest on; of equal ones the higher start score
    first.
    """
    at_start = np.where(window.begins, window.starts, -np.inf)
    starts = _largest(at_start, min(selection.n_best, int(window.begins.sum())))
    reach = np.zeros(len(window.ends), dtype=bool)
    for start in starts.tolist():
        reach[start : start + selection.longest] = True
    ends = np.union1d(
        _largest(np.where(reach, window.ends, -np.inf), min(selection.n_best, int(reach.sum()))),
        starts,  # so that there is a run: of one token at least
    )
    length = ends[None] - starts[:, None]
    sums = np.where(
        (length >= 0) & (length < selection.longest), window.starts[starts][:, None] + window.ends[ends], -np.inf
    )
    order = np.argsort(-sums, axis=None, kind="stable")  # all: several may have one text
    pairs = zip(*np.unravel_index(order, sums.shape), strict=True)
    return [
        Run(
            window.first + int(starts[i]),
            window.first + int(ends[j]) + 1,
            float(window.starts[starts[i]]),
            float(window.ends[ends[j]]),
        )
        for i, j in pairs
        if np.isfinite(sums[i, j])
    ]


def _largest(values: Numbers, count: int) -> NDArray[np.int64]:
    """Where the `count` largest are, from the largest on."""
    return np.argsort(-values, kind="stable")[:count].astype(np.int64)


def answers_of(
    windows: Sequence[WindowScores], text: str, offsets: NDArray[np.int64], selection: Selection, *, may_be_none: bool
) -> Answers:
    """Of a question's windows, its text and the characters [tokens, 2] that its tokens stand for. `may_be_none`: the
    question may have no answer (2.0); it has none where no run has text, whose tokens may stand for no characters. The
    text has a token.
    """
    runs = sorted((run for window in windows for run in best_runs(window, selection)), key=lambda run: -run.score)
    found: dict[str, Run] = {}
    for run in runs:
        said = text[offsets[run.begin, 0] : offsets[run.stop - 1, 1]]
        if said and said not in found:
            found[said] = run
        if len(found) == selection.n_best:
            break
    entries = [(said, run.start_logit, run.end_logit) for said, run in found.items()]
    null = min((window.null for window in windows), key=sum)
    odds = sum(null) - next(iter(found.values()), runs[0]).score if may_be_none else None
    if may_be_none or not entries:
        entries = sorted([*entries, ("", *null)], key=lambda entry: -(entry[1] + entry[2]))
    chances = _softmax(np.array([start + end for _, start, end in entries]))
    best = [Answer(said, float(p), start, end) for (said, start, end), p in zip(entries, chances, strict=True)]
    return Answers(best, odds)


def _softmax(scores: Numbers) -> Numbers:
    shifted = np.exp(scores - scores.max())
    result: Numbers = shifted / shifted.sum()
    return result


def submission(answers: Mapping[str, Answers], threshold: float) -> dict[str, dict[str, Any]]:
    """The official files by name: predictions, nbest_predictions and, where questions may have no answer, null_odds."""
    odds = {name: each.null_odds for name, each in answers.items() if each.null_odds is not None}
    files: dict[str, dict[str, Any]] = {
        "predictions": {name: each.prediction(threshold) for name, each in answers.items()},
        "nbest_predictions": {name: [one.as_json() for one in each.best] for name, each in answers.items()},
    }
    return files | ({"null_odds": odds} if odds else {})
