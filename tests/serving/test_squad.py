"""`evaluate CHECKPOINT squad`: the official files and scores, the same on every layout, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from colonnade.errors import ConfigError
from colonnade.evaluation.answers import Answer, Answers
from colonnade.evaluation.squad import scores_2
from colonnade.examples.squad import Given, Question
from colonnade.serving import predict_spans as predicting_spans
from colonnade.serving import squad as measured_squad
from colonnade.serving.measurement import Measurement
from colonnade.serving.predict_spans import AnsweredQuestions, predict_spans
from colonnade.serving.squad import answers_to, check_member, manner, may_go_unanswered, score_line
from tests.commands import forked, here
from tests.tasks.questions import squad, write_config, write_questions


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and dev.json beside it."""
    folder = write_questions(tmp_path_factory.mktemp("trained"))
    answer = forked("train", write_config(folder, folder / "at"))
    assert answer.status == 0, answer
    return folder


def measured(trained: Path, output: Path, *more: str, num_ranks: int = 1) -> tuple[dict[str, Any], list[Any]]:
    answer = forked(
        *("evaluate", trained / "at" / "run", "squad", "--data", trained / "dev.json", "--json", "--stride", "5"),
        *("--precision", "fp64", "--output", output / "p.json", *more),
        num_ranks=num_ranks,
    )
    assert answer.status == 0 and answer.out.count("\n") == 1, answer
    names = ("p.json", "p.nbest_predictions.json", "p.null_odds.json")
    return json.loads(answer.out), [json.loads((output / name).read_text()) for name in names]


@pytest.mark.slow
def test_every_layout_answers_the_same(trained: Path, tmp_path: Path) -> None:
    told, (predictions, best, odds) = measured(trained, tmp_path / "1")
    assert told["protocol"] == "SQuAD 2.0" and told["total"] == told["questions"] == 11
    assert {"exact", "f1", "HasAns_exact", "NoAns_f1", "best_f1", "best_f1_thresh"} <= told.keys()
    contexts = {q["id"]: text["context"] for text in squad(11)["data"][0]["paragraphs"] for q in text["qas"]}
    assert predictions.keys() == best.keys() == odds.keys() == contexts.keys()
    assert all(entry["text"] in contexts[name] for name, entries in best.items() for entry in entries)
    for number, layout in enumerate((["--tp", "2"], ["--pp", "2"], ["--dp", "2"])):
        again, files = measured(trained, tmp_path / f"on {number}", *layout, num_ranks=2)
        assert files[0] == predictions and files[2] == pytest.approx(odds, rel=1e-10, abs=1e-12)
        assert {key: again[key] for key in ("exact", "f1", "best_exact")} == {
            key: told[key] for key in ("exact", "f1", "best_exact")
        }


@pytest.mark.slow
def test_the_threshold_decides_who_is_answered(trained: Path, tmp_path: Path) -> None:
    all_answered, (predictions, *_) = measured(trained, tmp_path, "--null-threshold", "1e9")
    assert all(predictions.values()) and all_answered["NoAns_exact"] == 0
    none, (predictions, *_) = measured(trained, tmp_path, "--null-threshold", "-1e9")
    assert not any(predictions.values()) and none["NoAns_exact"] == 100


def test_each_option_is_its_own(trained: Path, tmp_path: Path) -> None:
    told, _ = measured(trained, tmp_path, "--max-query-length", "3", "--max-answer-length", "7", "--n-best", "2")
    used = told["parameters"]
    assert (used["max_query_length"], used["max_answer_length"], used["n_best"]) == (3, 7, 2)
    assert (used["window"], used["stride"], used["batch_size"]) == (16, 5, 8)


def test_questions_are_read_as_was_asked_for() -> None:
    """In windows as long as the model reads at most; 0 is a threshold."""
    trained: Any = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(seq_length=16)))
    usual, other = (manner(trained, asked) for asked in (Measurement(), Measurement(window=16, stride=5, batch_size=3)))
    assert (usual.length, usual.batch_size, usual.threshold) == (16, 8, 0.0)
    assert (other.length, other.windows.doc_stride, other.batch_size) == (16, 5, 3)


def test_what_is_refused(trained: Path, tmp_path: Path) -> None:
    run, data = trained / "at" / "run", trained / "dev.json"
    broken = tmp_path / "broken.json"
    broken.write_text('{"data": [')
    for arguments, message in (
        (["squad", "--data", broken], "line 1: no JSON"),
        (["squad", "--data", data, "--window", "5"], "leaves no room for text"),
        (["squad", "--data", data, "--window", "17"], "longer than model.seq_length = 16"),
        (["squad", "--data", "s3://here/dev.json"], "--data s3://here/dev.json does not exist. It is a URL"),
        (["lambada", "--data", data, "--n-best", "3"], "--n-best is of the task squad"),
        (["lambada", "--data", data, "--max-answer-length", "3"], "--max-answer-length is of the task squad"),
        (["lambada", "--data", data, "--max-query-length", "3"], "--max-query-length is of the task squad"),
        (["squad", "--data", data, "--variant", "lm-eval"], "--variant is of the task lambada"),
    ):
        answer = here("evaluate", run, *arguments)
        assert answer.status == 2 and message in answer.err, (arguments, answer)


def test_questions_whose_answers_are_not_known_are_answered_without_scores(trained: Path, tmp_path: Path) -> None:
    asked, content = tmp_path / "asked.json", squad(3)
    for text in content["data"][0]["paragraphs"]:
        text["qas"] = [{key: each[key] for key in ("id", "question")} for each in text["qas"]]
    asked.write_text(json.dumps(content))
    answer = here("evaluate", trained / "at" / "run", "squad", "--data", asked, "--json")
    assert answer.status == 0, answer
    told = json.loads(answer.out)
    assert told["questions"] == 3 and not {"exact", "exact_match", "f1"} & told.keys()


def test_a_threshold_has_a_file_of_1_1_answered_as_one_of_2_0_by_both_commands(trained: Path, tmp_path: Path) -> None:
    asked, content = tmp_path / "of 1.1.json", {**squad(6), "version": "1.1"}
    texts = content["data"][0]["paragraphs"]
    for text in texts:
        text["qas"] = [{k: v for k, v in q.items() if k != "is_impossible"} for q in text["qas"] if q["answers"]]
    asked.write_text(json.dumps(content))
    run = trained / "at" / "run"
    usual = json.loads(here("evaluate", run, "squad", "--data", asked, "--json").out)
    assert usual["protocol"] == "SQuAD 1.1" and "null_threshold" not in usual["parameters"]
    for threshold in ("-1e9", "0"):
        given = ("--null-threshold", threshold, "--json")
        told = json.loads(here("evaluate", run, "squad", "--data", asked, *given).out)
        assert told["protocol"] == "SQuAD 2.0" and told["parameters"]["null_threshold"] == float(threshold)
        assert told["exact"] == 0 or threshold == "0", "nothing is answered"
        scores = json.loads(here("predict", run, asked, *given).out)["scores"]
        assert scores == {key: told[key] for key in scores} and "best_exact" in scores


@pytest.mark.parametrize("name", ["dev-v2.0", "dev.JSON"])
def test_a_file_of_2_0_is_one_whatever_its_name_ends_in(trained: Path, tmp_path: Path, name: str) -> None:
    """As long as it is not .jsonl."""
    told = {}
    for file in (trained / "dev.json", tmp_path / name):
        file.write_bytes((trained / "dev.json").read_bytes())
        answer = here("evaluate", trained / "at" / "run", "squad", "--data", file, "--json")
        assert answer.status == 0, answer
        told[file] = json.loads(answer.out)
    usual, other = told.values()
    assert usual["protocol"] == other["protocol"] == "SQuAD 2.0"
    assert {key: other[key] for key in ("exact", "f1", "best_f1")} == {k: usual[k] for k in ("exact", "f1", "best_f1")}


def test_a_file_of_questions_alone_is_nothing_to_measure_on(trained: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"question": "Who?", "context": "Ada and Bob."}\n')
    answer = here("evaluate", trained / "at" / "run", "squad", "--data", asked)
    assert answer.status == 2 and "have the questions answered with `colonnade predict`" in answer.err, answer


def question(name: str) -> Question:
    return Question(Path("dev.json"), 1, name, "where?", "Denver", answers=None)


def test_the_best_thresholds_stand_in_the_line_for_people() -> None:
    right = {"a": ["Denver"], "b": []}
    scores = scores_2(right, {"a": "Denver", "b": "Rome"}, {"a": -2.5, "b": 3.0})
    best = "; best exact match 100.00 with --null-threshold -2.5, best F1 100.00 with --null-threshold -2.5"
    assert score_line(scores, [question(name) for name in right]).endswith(best)


def test_why_there_are_no_scores_is_told_with_what_to_do() -> None:
    """Where a question says it; the others say what is right, or are of a test set."""
    line = "2 questions answered; the file does not say what is right, so there are no scores"
    assert score_line(None, [question("a"), question("b")]) == line
    assert score_line(None, [question("a"), replace(question("b"), unsaid="do this")]) == f"{line}: do this"


def test_questions_with_and_without_an_answer_are_told_apart_in_the_line_for_people() -> None:
    """Of the three that have one, two are answered as they should; the one that has none is answered."""
    right = {"a": ["Denver"], "b": ["Rome"], "c": ["Oslo"], "d": []}
    scores = scores_2(right, {"a": "Denver", "b": "Rome", "c": "Lima", "d": "Bonn"}, dict.fromkeys(right, 0.0))
    told = score_line(scores, [question(name) for name in right])
    assert told.startswith("exact match 50.00, F1 50.00 of 4 questions (with an answer: exact match 66.67, F1 66.67; ")
    assert "; without: 0.00)" in told


# --- predict ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_predictions_are_those_that_are_measured(trained: Path, tmp_path: Path) -> None:
    run, data = trained / "at" / "run", trained / "dev.json"
    answer = forked("evaluate", run, "squad", "--data", data, "--json", "--output", tmp_path / "measured.json")
    assert answer.status == 0, answer
    scores = json.loads(answer.out)
    answer = forked(
        *("predict", run, data, "--format", "squad", "--output", tmp_path / "predicted.json", "--json", "--tp", "2"),
        num_ranks=2,
    )
    assert answer.status == 0, answer
    told = json.loads(answer.out)
    assert told["questions"] == 11 and told["output"] == str(tmp_path / "predicted.json")
    assert told["scores"] == pytest.approx({key: scores[key] for key in told["scores"]}, rel=1e-12)
    assert "best_f1" in told["scores"]
    for ending in (".json", ".nbest_predictions.json", ".null_odds.json"):
        measured_file, predicted = (
            json.loads((tmp_path / f"{name}{ending}").read_text()) for name in ("measured", "predicted")
        )
        assert predicted.keys() == measured_file.keys()
        if ending == ".json":
            assert predicted == measured_file


def test_new_questions_are_answered_from_their_texts(trained: Path, tmp_path: Path) -> None:
    run, asked = trained / "at" / "run", tmp_path / "asked.jsonl"
    paragraphs = squad(3)["data"][0]["paragraphs"]
    pairs = [(text["qas"][0]["question"], text["context"]) for text in paragraphs]
    lines = [{"question": question, "context": context} for question, context in pairs]
    asked.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**lines[0], "id": "again"}]))
    answer = here("predict", run, asked, "--output", tmp_path / "told.jsonl")
    assert answer.status == 0 and "4 questions answered; the file does not say what is right" in answer.out, answer
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert [each["id"] for each in told] == ["1", "2", "3", "again"]
    for each, (question, context) in zip(told, [*pairs, pairs[0]], strict=True):
        assert each["question"] == question and each["prediction"] and each["prediction"] in context
        assert each["prediction"] == each["answers"][0]["text"] and "null_odds" not in each
        chances = [one["probability"] for one in each["answers"]]
        assert chances == sorted(chances, reverse=True) and sum(chances) <= 1
    assert {**told[0], "id": ""} == {**told[3], "id": ""}
    answer = here("predict", run, asked, "--null-threshold", "-1e9", "--json")
    nothing = json.loads(answer.out)["predictions"]
    assert [each["prediction"] for each in nothing] == [""] * 4 and all("null_odds" in each for each in nothing)


def test_with_a_threshold_of_zero_what_is_likelier_is_answered(trained: Path, tmp_path: Path) -> None:
    """Any threshold says that a question may have no answer."""
    asked = tmp_path / "asked.jsonl"
    texts = squad(11)["data"][0]["paragraphs"]
    lines = [{"question": text["qas"][0]["question"], "context": text["context"]} for text in texts]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = here("predict", trained / "at" / "run", asked, "--null-threshold", "0", "--json")
    assert answer.status == 0, answer
    for each in json.loads(answer.out)["predictions"]:
        assert (each["prediction"] == "") == (each["null_odds"] > 0)


@pytest.mark.slow
def test_what_no_answer_can_be_given_to(trained: Path, tmp_path: Path) -> None:
    run, data = trained / "at" / "run", trained / "dev.json"
    empty, twice = tmp_path / "empty.jsonl", tmp_path / "twice.jsonl"
    empty.write_text('{"question": "Who?"}\n')
    twice.write_text('{"question": "Who?", "context": "Ada.", "id": 1}\n' * 2)
    for arguments, message in (
        ([empty], 'line 1: it has no texts in "question" and "context"'),
        ([twice], 'has the id "1" twice'),
        ([data, data], "or a file before it has it"),
        ([tmp_path], "is no file"),
        ([data, "--format", "mnli"], '--format mnli, and the checkpoint has model.head = "spans"'),
        ([data, "--output", tmp_path / "a.tsv"], "SQuAD's predictions are .json"),
    ):
        answer = here("predict", run, *arguments)
        assert answer.status == 2 and message in answer.err, (arguments, answer)


@pytest.mark.parametrize(
    ("name", "form", "said"),
    [
        ("dev.json", "mnli", '--format mnli, and the checkpoint has model.head = "spans"'),
        ("folder.json", None, "folder.json is no file"),
        ("gone.jsonl", "squad", "gone.jsonl is no file"),
        ("dev.txt", None, "dev.txt does not end in .json or .jsonl"),
    ],
)
def test_what_holds_no_questions(name: str, form: str | None, said: str, tmp_path: Path) -> None:
    """Whatever stands before it among the files."""
    for file in ("dev.json", "dev.txt"):
        (tmp_path / file).write_text("{}")
    (tmp_path / "folder.json").mkdir()
    nothing: Any = None
    inputs = [tmp_path / "dev.json", tmp_path / name]
    with pytest.raises(ConfigError) as caught:
        predict_spans(nothing, nothing, inputs, format_name=form, batch_size=8, null_threshold=None)
    assert said in str(caught.value)


def test_a_model_that_tells_labels_answers_no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_squad, "prepare", lambda *_: [])
    config = SimpleNamespace(model=SimpleNamespace(kind="bert", head="classification"))
    labels, nothing = SimpleNamespace(config=config, model=None, tokenizer=None), SimpleNamespace()
    how: Any = SimpleNamespace(windows=None, length=16, selection=None)
    with pytest.raises(ConfigError, match='of kind "bert" with head "classification" has no answers to questions'):
        answers_to([], labels, nothing, how, may_be_none=True)  # type: ignore[arg-type]


def test_a_question_may_go_unanswered_where_one_file_says_so_or_a_threshold_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines say nothing of that."""
    monkeypatch.setattr(measured_squad, "may_have_none", lambda path: path == Path("2.0.json"))
    older, newer, lines = Path("1.1.json"), Path("2.0.json"), Path("2.0.jsonl")
    for files, expected in (([older, newer], True), ([newer, older], True), ([older, lines], False), ([lines], False)):
        assert may_go_unanswered(Measurement(), files) is expected
        assert may_go_unanswered(Measurement(null_threshold=0.0), files)


@pytest.mark.parametrize("threshold", [None, 0.0, 2.5])
@pytest.mark.parametrize("may_be_none", [True, False])
def test_the_threshold_is_told_where_questions_may_go_unanswered(
    threshold: float | None, may_be_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was taken."""
    monkeypatch.setattr(measured_squad, "read_questions", lambda path: [])
    monkeypatch.setattr(measured_squad, "may_go_unanswered", lambda asked, paths: may_be_none)
    monkeypatch.setattr(measured_squad, "answers_to", lambda *_, **__: {})
    monkeypatch.setattr(measured_squad, "scores_of_answers", lambda *_, **__: None)
    member: Any = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(seq_length=16)))
    asked, mesh = Measurement(null_threshold=threshold), cast(Any, SimpleNamespace(rank=0))
    found = measured_squad.measure_squad(member, mesh, asked, "dev.json")
    assert found.protocol == ("SQuAD 2.0" if may_be_none else "SQuAD 1.1")
    assert found.parameters.get("null_threshold") == ((threshold or 0.0) if may_be_none else None)
    assert (found.parameters["window"], found.parameters["batch_size"]) == (16, measured_squad.BATCH_SIZE)


def test_models_that_read_other_tokens_are_no_ensemble() -> None:
    def member(tokenizer: str, seq_length: int) -> Any:
        config = SimpleNamespace(model=SimpleNamespace(seq_length=seq_length))
        return SimpleNamespace(tokenizer=SimpleNamespace(sha256=tokenizer), config=config)

    check_member(member("a", 16), member("a", 16))
    for other in (member("b", 16), member("a", 24)):
        with pytest.raises(ConfigError, match="averages logits of the same tokens"):
            check_member(other, member("a", 16))


@pytest.mark.parametrize("others", [[], [3.0], [3.0, 8.0]])
def test_logits_are_averaged_over_all_models_one_open_at_a_time(
    others: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = SimpleNamespace(model=SimpleNamespace(seq_length=16)), list[Any]()
    monkeypatch.setattr(measured_squad, "prepare", lambda questions, tokenizer, windows, length: ["prepared", length])
    monkeypatch.setattr(measured_squad, "_logits", lambda member, *_: said.append(member) or np.array([member.logit]))
    monkeypatch.setattr(measured_squad, "choose", lambda prepared, logits, selection, may_be_none: (prepared, logits))

    def member(logit: float) -> Any:
        return SimpleNamespace(logit=logit, tokenizer=SimpleNamespace(sha256="a"), config=config)

    def opened() -> Iterator[Any]:
        for number, logit in enumerate(others, 1):
            assert len(said) == number, "those before it have been asked"
            yield member(logit)

    how: Any = SimpleNamespace(windows=None, length=16, selection=None)
    nothing: Any = None
    prepared, logits = answers_to([], member(1.0), nothing, how, may_be_none=True, others=opened())  # type: ignore[misc]
    assert prepared == ["prepared", 16] and logits.tolist() == [np.mean([1.0, *others])]


def test_new_questions_are_answered_by_all_models_that_are_named_one_open_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened, found = list[Path](), {"1": Answers([Answer("1990", 1.0, 0.0, 0.0)], None)}
    others, (mesh, trained) = [Path("a"), Path("b")], cast(Any, ("ranks", "trained"))

    def answers(questions: Any, trained: Any, mesh: Any, how: Any, *, may_be_none: bool, others: Iterable[Any]) -> Any:
        assert [(*opened,) for _ in others] == [(Path("a"),), (Path("a"), Path("b"))]
        return found

    def open_one(path: Path, on: Any, beside: Any) -> None:
        assert (on, beside) == (mesh, trained)
        opened.append(path)

    monkeypatch.setattr(predicting_spans, "answers_to", answers)
    monkeypatch.setattr(predicting_spans, "manner", lambda *_: SimpleNamespace(threshold=0.0))
    monkeypatch.setattr(predicting_spans, "open_another", open_one)
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"id": "1", "question": "When?", "context": "In 1990."}))
    predicted = predict_spans(trained, mesh, [file], format_name=None, batch_size=8, null_threshold=None, others=others)
    assert [record["prediction"] for record in predicted.records()] == ["1990"] and opened == others


@pytest.mark.slow
def test_an_ensemble_answers_by_the_mean_of_its_logits(trained: Path, tmp_path: Path) -> None:
    """Two models' n-best lists have the same texts' logits; a model with itself is itself."""
    run, data = trained / "at" / "run", trained / "dev.json"
    answer = forked("train", write_config(trained, tmp_path), "train.seed=7", "model.init_std=0.3")
    assert answer.status == 0, answer
    other = tmp_path / "run"

    def likeliest(*arguments: object, num_ranks: int = 1) -> dict[str, dict[str, float]]:
        path = tmp_path / "p.json"
        said = forked("predict", run, data, "--precision", "fp64", "--output", path, *arguments, num_ranks=num_ranks)
        assert said.status == 0, said
        best = json.loads((tmp_path / "p.nbest_predictions.json").read_text())
        return {name: next(each for each in entries if not each["text"]) for name, entries in best.items()}

    alone, again = likeliest(), likeliest("--with", run)
    assert again == alone
    both, on_two = likeliest("--with", other), likeliest("--with", other, "--tp", 2, num_ranks=2)
    answer = forked("predict", other, data, "--precision", "fp64", "--output", tmp_path / "p.json")
    theirs = json.loads((tmp_path / "p.nbest_predictions.json").read_text())
    contexts = {q["id"]: text["context"] for text in squad(11)["data"][0]["paragraphs"] for q in text["qas"]}
    short = [name for name, context in contexts.items() if len(context.split()) <= 8]  # of one window
    assert short
    for name in short:
        second = next(each for each in theirs[name] if not each["text"])
        for key in ("start_logit", "end_logit"):
            assert both[name][key] == pytest.approx((alone[name][key] + second[key]) / 2, rel=1e-12)
            assert on_two[name][key] == pytest.approx(both[name][key], rel=1e-10)
    answer = forked("train", write_config(trained, tmp_path / "longer"), "model.seq_length=24", "train.steps=1")
    assert answer.status == 0, answer
    answer = here("predict", run, data, "--with", tmp_path / "longer" / "run")
    assert answer.status == 2 and "windows of 16 tokens, another of 24" in answer.err, answer


@pytest.mark.parametrize(("threshold", "prediction"), [(3.0, "1990"), (1.0, "")])
def test_predictions_that_are_written_obey_the_threshold(threshold: float, prediction: str, tmp_path: Path) -> None:
    """In lines as in the official file; odds of 1.5."""
    question = Question(Path("dev.json"), 1, "a", "When?", "In 1990.", (Given("1990", 3),))
    found = Answers([Answer("1990", 1.0, 0.0, 0.0)], 1.5)
    answered = AnsweredQuestions([question], {"a": found}, threshold, may_be_none=True)
    (record,) = answered.records()
    assert (record["prediction"], record["null_odds"]) == (prediction, 1.5)
    for name in ("p.jsonl", "p.json"):
        answered.save(tmp_path / name)
    assert json.loads((tmp_path / "p.jsonl").read_text())["prediction"] == prediction
    assert json.loads((tmp_path / "p.json").read_text()) == {"a": prediction}
    assert answered.about()["questions"] == 1 and answered.about()["scores"] == answered.scores()
    assert answered.scores()["exact"] == (100.0 if prediction else 0.0)


def test_of_many_answers_the_likeliest_are_told() -> None:
    """With what is certain of each; where nobody asked whether there is one, nothing about that."""
    question = Question(Path("asked.jsonl"), 1, "a", "When?", "In 1990, or 1991.", None)
    found = Answers([Answer(f"199{n}", 0.4 - n / 10, 0.0, 0.0) for n in range(5)], None)
    answered = AnsweredQuestions([question], {"a": found}, 0.0, may_be_none=False)
    (record,) = answered.records()
    assert record == {
        "id": "a",
        "question": "When?",
        "prediction": "1990",
        "answers": [{"text": f"199{n}", "probability": 0.4 - n / 10} for n in range(3)],
    }
    assert answered.scores() == {} and answered.summary().startswith("1 question answered; the file does not say")
