"""Names of scores that are known before a run starts are those that its evaluations find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colonnade.config.load import build
from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.evaluation.perplexity import Perplexity
from colonnade.evaluation.squad import SquadScores
from colonnade.tasks.bert import Guesses
from colonnade.tasks.labels import Labelled
from colonnade.tasks.preferences import Preferred
from colonnade.tasks.scores import scores_of
from colonnade.tasks.spans import FoundSpans
from colonnade.tasks.t5 import Written
from colonnade.tasks.task import Found
from colonnade.tasks.tasks import TASKS
from colonnade.train.held_out import Evaluation
from colonnade.train.score_names import data_set_names, of_each, score_names, score_problems
from tests.commands import here
from tests.tasks.examples import vocabulary, write_config, write_examples
from tests.tiny import TinyCorpus

SIZES = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "seq_length": 8, "vocab_size": 300}
LABELS = np.array([0.0, 1.0, 1.0])


def config_of(model: dict[str, Any], data: dict[str, Any] | None = None, **train: Any) -> Config:
    content: dict[str, Any] = {
        "model": SIZES | model,
        "data": {"train": "train", "validation": "validation", "split": "1:0"} | (data or {}),
        "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1} | train,
        "optim": {"learning_rate": 1.0},
        "run": {"folder": "run"},
    }
    content["data"] = {key: value for key, value in content["data"].items() if value is not None}
    return build(content, [], source="config")


def labelled(num_labels: int, *, binary: bool = False) -> Labelled:
    return Labelled(1.0, scores_of(np.eye(3)[:, :num_labels], LABELS, binary=binary), 3)


CASES: list[tuple[dict[str, Any], Found]] = [
    ({"kind": "gpt"}, Perplexity(1.0, 2.0, None, 3, None)),
    ({"kind": "gpt", "head": "preferences"}, Preferred(1.0, 1.0, 1.0, 1.0, 1.0, 1)),
    ({"kind": "bert"}, Guesses(1.0, 1.0, 1.0, 1.0, 1, 1)),
    ({"kind": "bert", "head": "classification", "num_labels": 1}, labelled(1)),
    ({"kind": "bert", "head": "classification", "num_labels": 2}, labelled(2, binary=True)),
    ({"kind": "bert", "head": "classification", "num_labels": 3}, labelled(3)),
    ({"kind": "bert", "head": "choice", "num_labels": 2}, labelled(2)),
    ({"kind": "bert", "head": "spans"}, FoundSpans(1.0, 1.0, 1.0, 1.0, 1)),
    ({"kind": "t5"}, Written(1.0, 1.0, 1)),
]


@pytest.mark.parametrize(("model", "found"), CASES, ids=lambda case: str(case)[:60])
def test_they_are_what_an_evaluation_finds(model: dict[str, Any], found: Found) -> None:
    init = {"init_from": "begun"} if model.get("head") == "preferences" else {}
    assert score_names(config_of(model, **init)) == list(Evaluation(found).numbers())


def test_every_task_has_names() -> None:
    assert {(model["kind"], model.get("head", "pretraining")) for model, _ in CASES} == TASKS.keys() - {
        ("bert", "none")
    }


def test_bytes_are_counted_where_the_tokenizer_tells_them(corpus: TinyCorpus, tmp_path: Path) -> None:
    told = Perplexity(1.0, 2.0, 3.0, 3, 4)
    assert score_names(config_of({}, {"tokenizer": str(corpus.tokenizer)})) == list(told.numbers())
    vocabulary(tmp_path)  # of words, not of bytes
    assert "bits_per_byte" not in score_names(config_of({}, {"tokenizer": str(tmp_path / "tokenizer.json")}))
    (tmp_path / "damaged.json").write_text("{")
    for name in ("damaged.json", "nowhere.json"):  # which is told for itself, and not by a score that would not be
        assert "bits_per_byte" in score_names(config_of({}, {"tokenizer": str(tmp_path / name)}))


def test_questions_are_scored_too() -> None:
    found = FoundSpans(1.0, 1.0, 1.0, 1.0, 1)
    asked = Evaluation(found, questions=SquadScores(1.0, 1.0, 1))
    config = config_of({"kind": "bert", "head": "spans"}, {"questions": "dev.json"})
    assert score_names(config) == list(asked.numbers())


def test_each_data_set_of_a_blend_has_scores() -> None:
    blend = {"train": None, "validation": None, "split": "1:1", "blend": {"a/web": 1.0, "b/books": 1.0}}
    config = config_of({}, blend)
    alone = Perplexity(1.0, 2.0, None, 3, None)
    found = Evaluation(alone, dict.fromkeys(of_each(config), alone)).numbers()
    assert "loss/web" in found and all(score_problems(score, config, set()) == [] for score in found)
    (problem,) = score_problems("loss/news", config, set())
    assert "is none of the scores: loss, perplexity, loss/web, loss/books. Name one" in problem.message
    assert of_each(config_of({}, blend | {"validation": "own"})) == []
    assert of_each(config_of({}, blend | {"blend": {"a/web": 1.0}})) == [], "what it finds is that of all"


@pytest.mark.parametrize(
    "key", ["data.blend", "data.validation", "data.questions", "data.tokenizer", "model.head", "train.evaluate_every"]
)
def test_where_a_key_that_decides_about_scores_is_not_known_none_is_refused(key: str) -> None:
    """As in a sweep over it."""
    config = config_of({})
    assert score_problems("loss/news", config, {key, "train.seed"}) == []
    assert score_problems("loss/news", config, {"train.seed"}) != []


def test_data_sets_are_named_by_as_little_as_tells_them_apart() -> None:
    assert data_set_names(["/a/books", "/b/web", "/c/books"]) == ["/a/books", "web", "/c/books"]


def test_a_second_part_of_the_data_is_evaluated_on() -> None:
    for split, names in (("9:1", ["loss"]), ("9:0:1", [])):
        assert score_names(config_of({}, {"validation": None, "split": split}))[:1] == names


@pytest.mark.parametrize("how", [{"evaluate_every": 0}, {"data": {"validation": None}}])
def test_a_run_that_is_not_evaluated_has_no_score(how: dict[str, Any]) -> None:
    config = config_of({}, **how)
    assert score_names(config) == []
    (problem,) = score_problems("loss", config, set())
    assert "the runs are not evaluated. Set train.evaluate_every" in problem.message


def test_a_score_that_there_is_not_is_told_before_the_first_point(tmp_path: Path) -> None:
    """Once, with what else is wrong with the configurations."""
    path = write_config(write_examples(tmp_path / "examples", ("qqp",)), "qqp", tmp_path)
    path.write_text(path.read_text() + '[sweep]\ntrain.seed = [1, 2]\nscore = "acuracy"\n')
    answer = here("finetune", path, "train.micro_batch_size=3")
    assert answer.status == 2 and answer.out == "", answer
    said = 'sweep.score = "acuracy" is none of the scores: loss, accuracy, f1, matthews. Name one of them.'
    assert answer.err.count(said) == 1 and "in all points" in answer.err and "2 problems" in answer.err, answer
    assert not list((tmp_path / "run").glob("*/")), "none was started"


def test_what_is_not_certain_is_not_judged() -> None:
    config = config_of({})
    assert score_problems("accuracy", config, {"model.head"}) == []
    with pytest.raises(ConfigError):
        config_of({"head": "classification"})
