"""Which questions a run answers at its evaluations, and what is no file of them."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colonnade.data.question_windows import Windows
from colonnade.errors import ConfigError, DataError
from colonnade.evaluation import questions as answered
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert_spans import SpanBERT
from colonnade.train.questions import open_questions
from tests.tasks.examples import vocabulary

TOKENIZER: Any = SimpleNamespace()


def config_of(path: Path | None) -> Any:
    return SimpleNamespace(
        data=SimpleNamespace(questions=None if path is None else str(path)), model=SimpleNamespace(seq_length=48)
    )


def write(path: Path, version: str) -> Path:
    answers = [{"text": "Paris", "answer_start": 0}]
    asked = {"id": "q0", "question": "Which city?", "answers": answers}
    content = {"version": version, "data": [{"title": "x", "paragraphs": [{"context": "Paris.", "qas": [asked]}]}]}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(("version", "may_be_none"), [("1.1", False), ("v2.0", True)])
def test_only_a_file_of_2_has_questions_without_an_answer(version: str, may_be_none: bool, tmp_path: Path) -> None:
    path, windows = write(tmp_path / "dev.json", version), Windows()
    found = open_questions(config_of(path), TOKENIZER, windows)
    assert found is not None and found.may_be_none is may_be_none
    assert [each.name for each in found.questions] == ["q0"] and found.windows is windows and found.length == 48
    assert found.content == hashlib.sha256(path.read_bytes()).hexdigest()
    assert open_questions(config_of(None), TOKENIZER, windows) is None


def test_questions_that_do_not_say_what_is_right_are_no_measure(tmp_path: Path) -> None:
    """As those of a test set."""
    content = json.loads(write(tmp_path / "test.json", "1.1").read_text())
    asked = content["data"][0]["paragraphs"][0]["qas"]
    asked.append({"id": "q1", "question": "Which river?"})
    (tmp_path / "test.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r'"q1" does not say .* as the development set\.$'):
        open_questions(config_of(tmp_path / "test.json"), TOKENIZER, Windows())


def test_a_file_whose_empty_lists_of_answers_mean_nothing_is_told_how_to_say_that_they_do(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.json", "")
    content = json.loads(path.read_text())
    content["data"][0]["paragraphs"][0]["qas"].append({"id": "q1", "question": "Which river?", "answers": []})
    path.write_text(json.dumps(content))
    with pytest.raises(
        DataError, match=r'empty list of answers says .* none, write `"version": "v2\.0"` into the file\.$'
    ):
        open_questions(config_of(path), TOKENIZER, Windows())
    path.write_text(json.dumps(content | {"version": "v2.0"}))
    found = open_questions(config_of(path), TOKENIZER, Windows())
    assert found is not None and found.questions[-1].answers == ()


def test_what_is_no_file_of_questions_is_told_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name in ("dev.jsonl", "dev.txt"):
        write(tmp_path / name, "1.1")
    ending = "does not end in .json. Name"
    for name, said in (("folder.json", "is no file. Name"), ("dev.jsonl", ending), ("dev.txt", ending)):
        with pytest.raises(ConfigError, match=rf"^data\.questions = '{tmp_path / name}' {said} a file of SQuAD"):
            open_questions(config_of(tmp_path / name), TOKENIZER, Windows())


@pytest.mark.parametrize(
    ("version", "right", "percent"),
    [("v2.0", ["dog", "", "", "cat sun"], 75.0), ("1.1", ["dog", "cat", "sun"], 200 / 3)],
)
def test_questions_are_scored_as_their_version_says(
    version: str, right: list[str], percent: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model says "dog" to the first and the last; to others nothing, or where that may not be, "cat".

    It is hardly surer of the one than of the other.
    """
    context = "dog cat sun"
    asked = [
        {
            "id": f"q{number}",
            "question": "north",
            "answers": [{"text": text, "answer_start": context.find(text)}] if text else [],
            **({"is_impossible": not text} if version == "v2.0" else {}),
        }
        for number, text in enumerate(right)
    ]
    content = {"version": version, "data": [{"title": "x", "paragraphs": [{"context": context, "qas": asked}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(content))
    found = open_questions(config_of(tmp_path / "dev.json"), vocabulary(tmp_path), Windows())
    assert found is not None and found.prepared is found.prepared
    logits = np.zeros((len(right), 48, 2))
    logits[[0, -1], 3] = 5.0  # behind [CLS], the question and [SEP]: there the context begins
    logits[[0, -1], 0] = 4.75
    logits[1:-1, 4], logits[1:-1, 0] = 4.75, 5.0
    given: dict[str, Any] = {}

    def logits_of(model: object, questions: object, **how: Any) -> Any:
        given.update(how, model=model, questions=questions)
        return logits

    monkeypatch.setattr(answered, "logits_of", logits_of)
    model, mesh, hidden = object.__new__(SpanBERT), Mesh(), lambda inputs: None
    scores = found.score(model, mesh, hidden, batch_size=3)
    assert (given["model"], given["questions"], given["mesh"]) == (model, found.prepared, mesh)
    assert (given["hidden"], given["length"], given["batch_size"]) == (hidden, 48, 3)
    assert (scores.exact, scores.f1) == pytest.approx((percent, percent)) and scores.total == len(right)
    assert (scores.no_answer is not None) == (version == "v2.0")
    logits[1, 7, 0] = np.nan
    unknown = found.score(model, mesh, hidden, batch_size=3)
    assert unknown.numbers().keys() == scores.numbers().keys()
    counted = {name: value for name, value in scores.numbers().items() if name.endswith(("total", "thresh"))}
    assert {name for name, value in unknown.numbers().items() if value == value} == set(counted)
