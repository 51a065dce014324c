"""SQuAD's scores on made-up predictions: what evaluate-v1.1.py and evaluate-v2.0.py give, worked out by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from colonnade.errors import DataError
from colonnade.evaluation.answers import Answer, Answers
from colonnade.evaluation.squad import Threshold, best_threshold, normalize, score_1, score_2, scores_1, scores_2
from colonnade.evaluation.squad_files import output_files, read_questions, scores_of_answers
from colonnade.examples.squad import Given, Question


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Quick, brown\tFox!", "quick brown fox"),
        ("a an the", ""),
        ("The theory of a thean", "theory of thean"),  # articles are words of their own
        ("the-other", "theother"),  # punctuation goes first, and leaves no space behind
        ("U.S.A.", "usa"),
        ("$5.50", "550"),
        ("“Düsseldorf” – naïve", "“düsseldorf” – naïve"),  # only ASCII's punctuation goes
        ("İstanbul", "i̇stanbul"),
        ("a\u00a0b", "b"),  # a space of Unicode separates
    ],
)
def test_what_is_compared(text: str, normalized: str) -> None:
    assert normalize(text) == normalized


@pytest.mark.parametrize(
    ("predicted", "answers", "exact", "f1"),
    [
        ("the Eiffel Tower", ["Eiffel Tower!"], 1, 1),
        ("Denver Broncos won", ["Denver Broncos"], 0, 0.8),  # 2 of 3 and 2 of 2: 2·(2/3)·1 / (5/3)
        ("Broncos", ["Denver Broncos", "The Broncos"], 1, 1),  # the best of several
        ("red red blue", ["red blue blue"], 0, 2 / 3),  # red once, blue once: 2 of 3 on both sides
        ("Denver", ["Carolina"], 0, 0),
        ("", ["Denver"], 0, 0),
    ],
)
def test_one_answer_of_both(predicted: str, answers: list[str], exact: float, f1: float) -> None:
    for score in (score_1, score_2):
        assert score(predicted, answers) == pytest.approx((exact, f1), abs=1e-15)


def test_where_no_word_is_left() -> None:
    assert score_1("the", ["a"]) == (1, 0)  # equal, but no word in common
    assert score_2("the", ["a"]) == (1, 1)  # a right answer of no word is no answer
    assert score_2("", []) == (1, 1)
    assert score_2("Denver", []) == (0, 0)
    assert score_2("the", ["Denver"]) == (0, 0)


def test_scores_of_1_1() -> None:
    """Exact: 1, 0, 0 (missing) of 3. F1: 1, 0.8, 0."""
    answers = {"1": ["Denver", "the city of Denver"], "2": ["Denver Broncos"], "3": ["Rome"]}
    found = scores_1(answers, {"1": "DENVER.", "2": "Denver Broncos won"})
    assert found.numbers() == pytest.approx({"exact_match": 100 / 3, "f1": 60.0})


ANSWERS = {"a": ["Denver"], "b": ["Denver Broncos"], "c": [], "d": []}
PREDICTIONS = {"a": "Denver", "b": "the Broncos", "c": "Rome", "d": "Paris"}
NO_ANSWER = {"a": -3.0, "c": -2.0, "b": -1.0, "d": 4.0}


def test_scores_of_2_0_with_a_threshold() -> None:
    """Above 0 is d alone, so it is answered with nothing, and right.

    exact: a 1, b 0, c 0, d 1. F1 of b: precision 1, recall 1/2: 2/3. Answering all gives F1 1 + 2/3 + 0 + 0 = 5/3.

    Thresholds, from the surest on, beginning with 2 of nothing but "no answer":
        exact   a: 3   c: 2    b: 2     d: 1       best 3 of 4, at -3
        F1      a: 3   c: 2    b: 8/3   d: 5/3     best 3 of 4, at -3
    """
    found = scores_2(ANSWERS, PREDICTIONS, NO_ANSWER, threshold=0.0)
    assert found.numbers() == pytest.approx(
        {
            "exact": 50.0,
            "f1": 100 * (1 + 2 / 3 + 1) / 4,
            "total": 4,
            "HasAns_exact": 50.0,
            "HasAns_f1": 100 * (1 + 2 / 3) / 2,
            "HasAns_total": 2,
            "NoAns_exact": 50.0,
            "NoAns_f1": 50.0,
            "NoAns_total": 2,
            "best_exact": 75.0,
            "best_exact_thresh": -3.0,
            "best_f1": 75.0,
            "best_f1_thresh": -3.0,
        }
    )


def test_of_questions_that_all_have_an_answer_nothing_is_told_of_those_without() -> None:
    found = scores_2({"a": ["Denver"]}, {"a": "Denver"}).numbers()
    assert found == {"exact": 100, "f1": 100, "total": 1, "HasAns_exact": 100, "HasAns_f1": 100, "HasAns_total": 1}


def test_a_threshold_takes_answers_away_from_questions_that_have_one() -> None:
    """Above -2: b and d are answered with nothing. a 1, b 0, c 0, d 1."""
    found = scores_2(ANSWERS, PREDICTIONS, NO_ANSWER, threshold=-2.0)
    assert (found.exact, found.f1) == (50.0, 50.0)


def test_the_best_threshold_is_of_answers_that_no_threshold_has_taken_away() -> None:
    """At 0 the right answer of a counts for none: 2 of 3. Answering up to 2, all three are right."""
    answers, predictions = {"a": ["Denver"], "b": ["Paris"], "c": []}, {"a": "Denver", "b": "Paris", "c": ""}
    found = scores_2(answers, predictions, {"a": 2.0, "b": -1.0, "c": 1.0}, threshold=0.0).numbers()
    assert found["exact"] == pytest.approx(200 / 3)
    assert (found["best_exact"], found["best_exact_thresh"]) == (found["best_f1"], found["best_f1_thresh"]) == (100, 2)


def test_2_0_leaves_out_what_is_not_predicted() -> None:
    """a 1, c (answered, and has none) 0: of 2. b and d are not counted."""
    found = scores_2(ANSWERS, {"a": "Denver", "c": "Rome"}).numbers()
    assert found["total"] == 2 and found["exact"] == found["f1"] == 50.0 and "best_f1" not in found


def test_the_threshold_of_nothing_at_all_is_below_all_odds() -> None:
    """Answering any takes away from the 2 that "no answer" gives: a wrong, c and d have none; e is missing."""
    has = {"a": True, "c": False, "d": False, "e": True}
    scores = {"a": 0.0, "c": 0.0, "d": 1.0}
    no_answer = {"a": -9.0, "c": 1.0, "d": 2.0, "e": -1.0}
    assert best_threshold(scores, no_answer, has) == Threshold(200 / 3, -10.0)
    assert best_threshold(scores, {name: odds + 11 for name, odds in no_answer.items()}, has).threshold == 0.0


def test_of_equal_thresholds_the_lowest_counts() -> None:
    """a: 1 + 1 = 2. c has no answer and was given none: 2 again."""
    has = {"a": True, "c": False}
    assert best_threshold({"a": 1.0, "c": 1.0}, {"a": 0.5, "c": 0.7}, has) == Threshold(100, 0.5)


def test_an_answer_of_nothing_takes_no_point_away() -> None:
    """c gives 1 whether its empty answer counts or not, and a one more: 2 of 2."""
    has = {"c": False, "a": True}
    assert best_threshold({"c": 1.0, "a": 1.0}, {"c": 0.5, "a": 0.7}, has) == Threshold(100, 0.7)


def test_the_threshold_that_is_told_gives_the_score_that_is_told() -> None:
    """Of few odds, so that many are equal; of no right answer and of answers without a word, too."""
    draw = random.Random(0)
    for _ in range(200):
        names = [str(number) for number in range(draw.randint(1, 6))]
        answers = {name: draw.choice([[], ["Rome"], ["the city of Rome"]]) for name in names}
        predictions = {name: draw.choice(["Rome", "Paris", "the", ""]) for name in names}
        odds = {name: draw.choice([-2.5, -0.6, 0.5]) for name in names}
        told = scores_2(answers, predictions, odds)
        for metric, best in (("exact", told.best_exact), ("f1", told.best_f1)):
            assert best is not None
            reached = {
                at: scores_2(answers, predictions, odds, threshold=at) for at in (best.threshold, -9, -2.5, -0.6, 1)
            }
            assert getattr(reached[best.threshold], metric) == pytest.approx(best.score, abs=1e-9)
            assert max(getattr(each, metric) for each in reached.values()) == pytest.approx(best.score, abs=1e-9)


def test_the_nearest_of_several_right_answers_counts() -> None:
    context = "In the year 1990 or so."
    right = (Given("1990", 12), Given("the year 1990", 3))
    question = Question(Path("dev.json"), 1, "a", "When?", context, right)
    found = Answers([Answer("the year 1990", 1.0, 0.0, 0.0)], None)
    scores = scores_of_answers([question], {"a": found}, 0.0, may_be_none=False)
    assert scores is not None and (scores.exact, scores.f1) == (100.0, 100.0)


def asked_of(folder: Path, *lines: object, name: str = "asked.jsonl") -> Path:
    (folder / name).write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return folder / name


def test_questions_of_lines_are_known_by_their_id_or_their_line(tmp_path: Path) -> None:
    who = {"question": "Who?", "context": "Ada."}
    found = read_questions(asked_of(tmp_path, who, "", {**who, "id": "x"}, {**who, "id": 0}))
    assert [(each.name, each.number, each.answers) for each in found] == [
        ("1", 1, None),
        ("x", 3, None),
        ("0", 4, None),
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"question": "Who?"}, r'has 1 entry without .*line 2: it has no texts in "question" and "context"'),
        ({"question": "Who?", "context": ""}, "has 1 entry without a question"),
        ({"question": "", "context": "Ada."}, "has 1 entry without a question"),
        ({"question": "Who?", "context": 3}, "has 1 entry without a question"),
        ("[", "has 1 entry without .*line 2: no JSON"),
        ({"question": "When?", "context": "1815.", "id": 1}, 'has the id "1" twice'),
    ],
)
def test_all_questions_of_a_file_are_read_or_none(wrong: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"asked.jsonl {said}"):
        read_questions(asked_of(tmp_path, {"question": "Who?", "context": "Ada."}, wrong))


def test_an_id_is_that_of_one_question_over_all_files(tmp_path: Path) -> None:
    one, other = (asked_of(tmp_path, {"question": "Who?", "context": "Ada."}, name=f"{n}.jsonl") for n in range(2))
    with pytest.raises(DataError, match=r'1.jsonl has the id "1" twice, or a file before it has it'):
        read_questions(one, other)
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(DataError, match=r"none.jsonl has no question"):
        read_questions(one, tmp_path / "none.jsonl")


def test_the_official_files_lie_beside_the_predictions() -> None:
    found = {name: str(path) for name, path in output_files("out/dev.json").items()}
    assert found == {
        "predictions": "out/dev.json",
        "nbest_predictions": "out/dev.nbest_predictions.json",
        "null_odds": "out/dev.null_odds.json",
    }


def test_no_scores_are_told_where_one_question_does_not_say_what_is_right() -> None:
    """Of the others alone they would look as if of all."""
    asked = [Question(Path("dev.json"), n, name, "When?", "1990", right) for n, name, right in
             ((1, "a", (Given("1990", 0),)), (2, "b", None))]  # fmt: skip
    found = {each.name: Answers([Answer("1990", 1.0, 0.0, 0.0)], None) for each in asked}
    for may_be_none in (False, True):
        assert scores_of_answers(asked, found, 0.0, may_be_none=may_be_none) is None
        assert scores_of_answers(asked[:1], found, 0.0, may_be_none=may_be_none) is not None


@pytest.mark.parametrize(
    ("may_be_none", "threshold", "exact", "best"),
    [(False, 0.0, 50.0, None), (True, 0.0, 100.0, 100.0), (True, 3.0, 50.0, 100.0)],
)
def test_answers_are_scored_by_the_rules_of_their_file_and_the_threshold(
    may_be_none: bool, threshold: float, exact: float, best: float | None
) -> None:
    """b has no answer, and is answered where "no answer" is likelier by no more than the threshold."""
    asked = [Question(Path("dev.json"), n, name, "When?", "1990 or 1991", right) for n, name, right in
             ((1, "a", (Given("1990", 0),)), (2, "b", () if may_be_none else (Given("1991", 8),)))]  # fmt: skip
    odds = {"a": -1.0, "b": 2.0}
    found = {name: Answers([Answer("1990", 1.0, 0.0, 0.0)], odds[name] if may_be_none else None) for name in odds}
    scores = scores_of_answers(asked, found, threshold, may_be_none=may_be_none)
    assert scores is not None and scores.exact == exact and (scores.has_answer is not None) == may_be_none
    assert (None if scores.best_exact is None else scores.best_exact.score) == best
