"""Answers from scores: runs over windows, their order, no answer, and the official files."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.data.question_windows import Windows, most_context
from colonnade.evaluation.answers import Selection, WindowScores, answers_of, best_runs, submission
from colonnade.evaluation.questions import Prepared, choose
from colonnade.examples.squad import Question

TEXT = "ab cd ef gh"
PLACES = np.array([[0, 2], [3, 5], [6, 8], [9, 11]])


def window(
    starts: list[float], ends: list[float], null: tuple[float, float] = (0.0, 0.0), first: int = 0, begins: str = ""
) -> WindowScores:
    here = np.array([letter != "." for letter in begins or "x" * len(starts)])
    return WindowScores(first, np.array(starts), np.array(ends), here, null)


def test_the_likeliest_run_begins_before_it_ends() -> None:
    """Start 2 and end 0 are best, 6 + 5, and no run. Left: (0, 0) 2 + 5; (2, 2) 6 + 0.5; (2, 3) 6 + 0; (1, 2) 3.5."""
    found = answers_of([window([2, 3, 6, 0], [5, 0, 0.5, 0])], TEXT, PLACES, Selection(), may_be_none=False)
    assert [each.text for each in found.best[:4]] == ["ab", "ef", "ef gh", "cd ef"]
    assert found.null_odds is None and found.prediction(0.0) == "ab"


def test_a_text_that_stands_there_often_leaves_room_for_others() -> None:
    """ "to" is the likeliest three times, 1 + 3, 2 + 2 and 3 + 1, and counts once; then 1 + 2 and 1 + 1."""
    places = np.array([[0, 2], [3, 5], [6, 8]])
    found = answers_of([window([1, 2, 3], [3, 2, 1])], "to to to", places, Selection(n_best=3), may_be_none=False)
    assert [(each.text, each.start_logit + each.end_logit) for each in found.best] == [
        ("to", 4),
        ("to to", 3),
        ("to to to", 2),
    ]
    fewer = [window([2], [2]), window([3], [3], first=1)]
    found = answers_of(fewer, TEXT, PLACES, Selection(n_best=1), may_be_none=False)
    assert [(each.text, each.probability) for each in found.best] == [("cd", 1.0)]


def test_runs_are_at_most_so_long() -> None:
    """From 0 to 3 is 9 + 9, four tokens; of three at most (1, 3) 1 + 9 = 10 is best, then (0, 0) to (0, 2) 9 + 0."""
    scores = [window([9, 1, 0, 0], [0, 0, 0, 9])]
    assert answers_of(scores, TEXT, PLACES, Selection(longest=4), may_be_none=False).text == TEXT
    assert answers_of(scores, TEXT, PLACES, Selection(longest=3), may_be_none=False).text == "cd ef gh"


def test_unless_said_otherwise_they_are_as_long_as_those_of_the_first_scripts_for_bert() -> None:
    """`run_squad.py`: 30 tokens at most, of the 20 likeliest beginnings and ends."""
    text = " ".join(["a"] * 40)
    places = np.array([[2 * token, 2 * token + 1] for token in range(40)])
    for last in (29, 30):
        scores = [window([9.0] + [0.0] * 39, [8.0 - 0.1 * abs(place - last) for place in range(40)])]
        found = answers_of(scores, text, places, Selection(), may_be_none=False)
        assert len(found.text.split()) == 30
    assert Selection().n_best == 20


def test_runs_begin_where_most_text_is_around_them() -> None:
    """Token 1 is in both windows; in the first one, where it scores 9 + 9, no answer begins with it."""
    first = window([1, 9], [1, 9], begins="x.")
    second = window([3, 0, 0], [2, 0, 0], first=1)
    found = answers_of([first, second], TEXT, PLACES, Selection(), may_be_none=False)
    assert [(each.text, each.start_logit, each.end_logit) for each in found.best[:2]] == [("ab cd", 1, 9), ("cd", 3, 2)]


def test_no_answer_is_as_likely_as_where_it_is_least() -> None:
    """Null: min(1 + 2, 0 + 1) = 1, of the second window. Best run 2 + 2 = 4: odds -3. e^4, e^1 of their sum and 2."""
    windows = [window([2], [2], null=(1, 2)), window([1], [1], null=(0, 1), first=1)]
    found = answers_of(windows, TEXT, PLACES, Selection(), may_be_none=True)
    assert [each.text for each in found.best] == ["ab", "cd", ""]
    assert found.null_odds == -3
    chances = np.exp([4, 2, 1]) / np.exp([4, 2, 1]).sum()
    assert [each.probability for each in found.best] == pytest.approx(chances)
    assert (found.best[2].start_logit, found.best[2].end_logit) == (0, 1)
    assert [found.prediction(threshold) for threshold in (-2.9, -3.0, -3.1)] == ["ab", "ab", ""]


def test_scores_of_which_no_number_holds_the_exponential_have_chances_too() -> None:
    found = answers_of([window([900, 901], [900, 900])], TEXT, PLACES, Selection(longest=1), may_be_none=False)
    assert [each.probability for each in found.best] == pytest.approx([np.e / (1 + np.e), 1 / (1 + np.e)])


def test_that_is_where_its_two_scores_together_are_least() -> None:
    windows = [window([2], [2], null=(0, 5)), window([1], [1], null=(1, 2), first=1)]
    assert answers_of(windows, TEXT, PLACES, Selection(), may_be_none=True).null_odds == (1 + 2) - (2 + 2)


def test_runs_without_text_are_no_answers() -> None:
    """Of tokens that stand for no characters. The likeliest run, 9 + 9, has none; null 0 + 0, the best text 1 + 1."""
    places = np.array([[0, 0], [0, 2]])
    scores = [window([9, 1], [9, 1], begins="xx")]
    found = answers_of(scores, "ab", places, Selection(longest=1), may_be_none=True)
    assert [each.text for each in found.best] == ["ab", ""]
    assert found.null_odds == -2 and found.prediction(0.0) == "ab"


@pytest.mark.parametrize("may_be_none", [True, False])
def test_where_no_run_has_text_there_is_no_answer(may_be_none: bool) -> None:
    found = answers_of([window([9], [9])], "ab", np.array([[1, 1]]), Selection(), may_be_none=may_be_none)
    assert [(each.text, each.probability) for each in found.best] == [("", 1.0)]
    assert found.prediction(0.0) == found.prediction(-99.0) == ""
    assert (found.null_odds == -18) if may_be_none else found.null_odds is None


def test_the_official_files() -> None:
    one = answers_of([window([2], [2], null=(3, 2))], TEXT, PLACES, Selection(), may_be_none=True)
    files = submission({"q": one}, 0.0)
    assert files["predictions"] == {"q": ""} and files["null_odds"] == {"q": 1.0}
    assert submission({"q": one}, 1.0)["predictions"] == {"q": "ab"}, "no answer is likelier, and not by more"
    entry = files["nbest_predictions"]["q"][1]
    assert entry == {"text": "ab", "probability": pytest.approx(1 / (1 + np.e)), "start_logit": 2.0, "end_logit": 2.0}
    without = answers_of([window([2], [2])], TEXT, PLACES, Selection(), may_be_none=False)
    assert set(submission({"q": without}, 0.0)) == {"predictions", "nbest_predictions"}


@settings(deadline=None)
@given(st.data())
def test_the_best_of_all_runs_is_found(data: st.DataObject) -> None:
    """Against every run of every window; with few scores to keep, against run_squad.py's choice of tokens."""
    length, stride = data.draw(st.integers(5, 12)), data.draw(st.integers(1, 8))
    tokens, longest = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 8))
    ranges = Windows(stride).ranges(1, tokens, length)
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    windows = [
        WindowScores(each.start, draw.normal(size=len(each)), draw.normal(size=len(each)), begins, (0.0, 0.0))
        for each, begins in zip(ranges, most_context(ranges), strict=True)
    ]
    text, places = "x" * tokens, np.stack([np.arange(tokens), np.arange(tokens) + 1], axis=1)

    def all_runs(each: WindowScores, kept: int) -> list[float]:
        starts, ends = (set(np.argsort(-scores)[:kept].tolist()) for scores in (each.starts, each.ends))
        spans = ((i, j) for i, j in product(starts, ends) if i <= j < i + longest and each.begins[i])
        return [float(each.starts[i] + each.ends[j]) for i, j in spans]

    every = Selection(n_best=tokens, longest=longest)
    best = max(score for each in windows for score in all_runs(each, tokens))
    found = answers_of(windows, text, places, every, may_be_none=False).best[0]
    assert found.start_logit + found.end_logit == best
    few = Selection(n_best=3, longest=longest)
    theirs = [score for each in windows for score in all_runs(each, 3)]
    ours = [run.score for each in windows for run in best_runs(each, few)]
    assert not theirs or max(ours) >= max(theirs)


def test_no_answer_is_as_likely_as_the_first_token_begins_and_ends_one() -> None:
    """Of each window: what the model says of [CLS]. Behind it and a question of two come [SEP] and the text."""
    question = Question(Path("dev.json"), 1, "q", "who", TEXT, ())
    asked = Prepared(question, np.array([7, 8]), np.arange(4), PLACES, [range(3), range(1, 4)])
    logits = np.random.default_rng(1).normal(size=(2, 9, 2))
    logits[0, 5, 0], logits[0, 6, 1] = 8.0, 9.0  # "cd ef"
    logits[:, 0] = [[1.0, 2.5], [0.5, 1.5]]
    found = choose([asked], logits, Selection(), may_be_none=True)["q"]
    assert found.best[0].text == "cd ef" and found.null_odds == pytest.approx(2.0 - 17.0)
