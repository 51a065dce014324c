"""Exact match and F1 of answers, as SQuAD's own scripts define them (evaluate-v1.1.py and evaluate-v2.0.py).

Both compare words, after capitals, ASCII punctuation, English articles and spare spaces are taken away, and count for
each question the best of its right answers. They differ in the rest:

                            1.1                          2.0
    a question without      (there are none)             its right answer is the empty text
    a prediction is missing counts 0                     the question is left out
    no word is left         F1 0                         F1 1 where neither side has one

Of 2.0 there is a threshold too: a question whose score of "no answer" lies above it counts as answered with nothing.

Source: Rajpurkar et al., "SQuAD: 100,000+ Questions", 2016, section 6.1; "Know What You Don't Know", 2018, section 5.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Score(NamedTuple):
    """Of one answer: 0 to 1."""

    exact: float
    f1: float


class Threshold(NamedTuple):
    """The best threshold of "no answer", and what it gives."""

    score: float
    """[percent]"""
    threshold: float


@dataclass(frozen=True)
class SquadScores:
    """Of a set of questions. All but thresholds and counts are in percent."""

    exact: float
    f1: float
    total: int
    has_answer: "Group | None" = None
    """Of the questions with an answer; None: 1.1."""
    no_answer: "Group | None" = None
    best_exact: Threshold | None = None
    best_f1: Threshold | None = None

    def numbers(self) -> dict[str, float]:
        """As the scripts print them."""
        if self.has_answer is None or self.no_answer is None:
            return {"exact_match": self.exact, "f1": self.f1}
        found: dict[str, float] = {"exact": self.exact, "f1": self.f1, "total": self.total}
        for prefix, group in (("HasAns", self.has_answer), ("NoAns", self.no_answer)):
            if group.total:
                found |= {f"{prefix}_exact": group.exact, f"{prefix}_f1": group.f1, f"{prefix}_total": group.total}
        for name, best in (("exact", self.best_exact), ("f1", self.best_f1)):
            if best is not None:
                found |= {f"best_{name}": best.score, f"best_{name}_thresh": best.threshold}
        return found

    def unknown(self) -> "SquadScores":
        """Of the same questions, where the model's logits are no numbers: NaN for each score."""
        has, no = (each and each._replace(exact=math.nan, f1=math.nan) for each in (self.has_answer, self.no_answer))
        exact, f1 = (each and each._replace(score=math.nan) for each in (self.best_exact, self.best_f1))
        return SquadScores(math.nan, math.nan, self.total, has, no, exact, f1)


class Group(NamedTuple):
    """The questions with an answer, or those without."""

    exact: float
    """[percent]"""
    f1: float
    """[percent]"""
    total: int


def normalize(text: str) -> str:
    """What is compared of an answer."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def score_1(predicted: str, answers: Sequence[str]) -> Score:
    """By the rules of 1.1."""
    return _best([Score(_exact(predicted, answer), _f1(predicted, answer, of_nothing=False)) for answer in answers])


def score_2(predicted: str, answers: Sequence[str]) -> Score:
    """By the rules of 2.0: answers of no word count as none, and no answers as the empty text."""
    answers = [answer for answer in answers if normalize(answer)] or [""]
    return _best([Score(_exact(predicted, answer), _f1(predicted, answer, of_nothing=True)) for answer in answers])


def _best(scores: Sequence[Score]) -> Score:
    """Exact match and F1 each of the answer that gives most."""
    return Score(max(score.exact for score in scores), max(score.f1 for score in scores))


def _exact(predicted: str, answer: str) -> float:
    return float(normalize(predicted) == normalize(answer))


def _f1(predicted: str, answer: str, *, of_nothing: bool) -> float:
    ours, theirs = normalize(predicted).split(), normalize(answer).split()
    if of_nothing and not (ours and theirs):
        return float(ours == theirs)
    same = sum((Counter(ours) & Counter(theirs)).values())
    if not same:
        return 0.0
    precision, recall = same / len(ours), same / len(theirs)
    return 2 * precision * recall / (precision + recall)


def scores_1(answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> SquadScores:
    """By the rules of 1.1: the right answers and the prediction of each question, by id."""
    scores = [score_1(predictions[name], answers[name]) for name in answers if name in predictions]
    total = len(answers)
    return SquadScores(_percent([s.exact for s in scores], total), _percent([s.f1 for s in scores], total), total)


def scores_2(
    answers: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    no_answer: Mapping[str, float] | None = None,
    *,
    threshold: float = 1.0,
) -> SquadScores:
    """By the rules of 2.0. `no_answer`: how strongly each question is held to have none, for the thresholds; what lies
    above `threshold` counts as answered with nothing.
    """
    raw = {name: score_2(predictions[name], answers[name]) for name in answers if name in predictions}
    has_answer = {name: bool(answers[name]) for name in answers}
    odds = no_answer or {}

    def kept(name: str) -> Score:
        if odds.get(name, 0.0) <= threshold:
            return raw[name]
        right = float(not has_answer[name])
        return Score(right, right)

    scores = {name: kept(name) for name in raw}
    found = {has: [scores[name] for name in scores if has_answer[name] is has] for has in (True, False)}
    whole = _group(list(scores.values()))
    best: dict[str, Threshold | None] = dict.fromkeys(Score._fields)
    if no_answer is not None:
        best = _best_thresholds(raw, no_answer, has_answer)
    return SquadScores(*whole, _group(found[True]), _group(found[False]), best["exact"], best["f1"])


def _best_thresholds(
    scores: Mapping[str, Score], no_answer: Mapping[str, float], has_answer: Mapping[str, bool]
) -> dict[str, Threshold | None]:
    """Of each score, by its name."""
    each = {
        metric: {name: score[number] for name, score in scores.items()} for number, metric in enumerate(Score._fields)
    }
    return {metric: best_threshold(values, no_answer, has_answer) for metric, values in each.items()}


def best_threshold(
    scores: Mapping[str, float], no_answer: Mapping[str, float], has_answer: Mapping[str, bool]
) -> Threshold:
    """The threshold with the best sum of scores, and the percentage that it gives: the lowest of several; one below all
    odds, at most 0, where answering nothing at all is best.

    Questions are taken one by one from the surest answer on; each that is answered adds its score, and takes away what
    no answer would have given. Those of equal odds are answered together.
    """
    sure = sorted((name for name in no_answer if name in scores), key=lambda name: no_answer[name])
    current = best = float(sum(not has_answer[name] for name in scores))
    found = min([0.0, *(no_answer[name] - 1 for name in sure[:1])])
    for odds, names in groupby(sure, key=lambda name: no_answer[name]):
        current += sum(scores[name] - (not has_answer[name]) for name in names)
        if current > best:
            best, found = current, odds
    return Threshold(_percent([best], len(scores)), found)


def _group(scores: Sequence[Score]) -> Group:
    total = len(scores)
    return Group(_percent([s.exact for s in scores], total), _percent([s.f1 for s in scores], total), total)


def _percent(values: Sequence[float], total: int) -> float:
    return 100.0 * sum(values) / total if total else 0.0
