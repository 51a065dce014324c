"""Predictions of a fine-tuned model: what its run's evaluation found, on every layout, as others read them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from colonnade.cli_predict import _unwritable
from colonnade.data.sidecar import ExampleFields
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ConfigError
from colonnade.examples.formats import FORMATS
from colonnade.examples.make import make_examples
from colonnade.mesh.mesh import Mesh
from colonnade.serving import predict as predicting
from colonnade.serving.predict import Predictions, averaged, check_options, columns_of, predict, predict_any, show
from colonnade.serving.trained import find, open_trained
from tests.commands import forked, here
from tests.runs import Finished, metrics
from tests.slow import first_fast
from tests.tasks.examples import write_config, write_examples

TASKS = ("mnli", "qqp", "stsb", "race")
LAYOUTS = {"tp 2": ("--tp", 2), "pp 2": ("--pp", 2), "dp 2": ("--dp", 2, "--batch-size", 3)}


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("examples"), TASKS)


@pytest.fixture(scope="module")
def runs(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for task in TASKS:
        folder = tmp_path_factory.mktemp(task)
        answer = forked("train", write_config(examples, task, folder))
        assert answer.status == 0, answer
        found[task] = folder / "run"
    return found


def predictions(run: Path, *arguments: object, num_ranks: int = 1) -> list[dict[str, Any]]:
    answer = forked("predict", run, *arguments, "--json", num_ranks=num_ranks)
    assert answer.status == 0, answer
    return list(json.loads(answer.out)["predictions"])


def rows(examples: Path, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (examples / f"{task}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_chances_of_what_is_right_are_the_losses_of_the_runs_own_validation(
    examples: Path, runs: dict[str, Path]
) -> None:
    names = ("entailment", "neutral", "contradiction")
    told = predictions(runs["mnli"], examples / "mnli.jsonl", "--format", "mnli")
    labels = [names[row["label"]] for row in rows(examples, "mnli")]
    chances = [each["probabilities"][label] for each, label in zip(told, labels, strict=True)]
    loss = sum(-math.log(chance) for chance in chances) / len(chances)
    assert loss == pytest.approx(metrics(runs["mnli"])[-1]["validation_loss"], rel=1e-12)
    right = [each["prediction"] == label for each, label in zip(told, labels, strict=True)]
    answer = forked("predict", runs["mnli"], examples / "mnli", "--json")  # the token file of the same examples
    assert json.loads(answer.out)["scores"] == {"accuracy": pytest.approx(sum(right) / len(right))}
    assert json.loads(answer.out)["predictions"] == told


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mnli", "race"])
@pytest.mark.parametrize("layout", first_fast(list(LAYOUTS)))
def test_every_layout_tells_the_same(examples: Path, runs: dict[str, Path], layout: str, task: str) -> None:
    alone = predictions(runs[task], examples / task)
    cut = predictions(runs[task], examples / task, *LAYOUTS[layout], num_ranks=2)
    for one, other in zip(alone, cut, strict=True):
        assert one["prediction"] == other["prediction"]
        assert one["probabilities"] == pytest.approx(other["probabilities"], rel=1e-10)


@pytest.mark.parametrize(
    ("task", "prediction"),
    [
        ("mnli", "entailment|neutral|contradiction"),
        ("qqp", "0|1"),
        ("stsb", r"-?\d+\.\d\d\d"),
        ("race", "[ABCD]"),
    ],
)
def test_submissions_are_as_the_benchmark_takes_them(
    examples: Path, runs: dict[str, Path], tmp_path: Path, task: str, prediction: str
) -> None:
    """GLUE: a header, the row's number and a label; of some tasks its name, of others its number."""
    output = tmp_path / "predictions.tsv"
    answer = forked("predict", runs[task], examples / f"{task}.jsonl", "--format", task, "--output", output)
    assert answer.status == 0 and f"11 examples of {task}" in answer.out and str(output) in answer.out, answer
    header, *lines = output.read_text().splitlines()
    assert header == "index\tprediction"
    assert [line.split("\t")[0] for line in lines] == [str(number) for number in range(11)]
    assert all(re.fullmatch(prediction, line.split("\t")[1]) for line in lines)


def test_examples_without_labels_are_predicted_and_not_scored(
    examples: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    new, output = tmp_path / "test.jsonl", tmp_path / "predictions.jsonl"
    new.write_text("".join(json.dumps({**row, "label": None}) + "\n" for row in rows(examples, "mnli")))
    answer = forked("predict", runs["mnli"], new, "--format", "mnli", "--output", output)
    assert answer.status == 0 and "accuracy" not in answer.out, answer
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert written == predictions(runs["mnli"], examples / "mnli")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mnli.jsonl"], "--format is not given"),
        (["mnli.jsonl", "--format", "nothing"], "no format of examples"),
        (["mnli.jsonl", "--format", "chat"], "--format chat: a conversation has no label to predict. Use cola, sst2, "),
        (["mnli.jsonl", "--format", "preferences"], "wnli, race or squad, or write answers"),
        (
            ["race.jsonl", "--format", "race"],
            'colonnade: race.jsonl: examples of race, for model.head = "choice", and model.head is "classification" in '
            "the checkpoint. Use a checkpoint of a model that was fine-tuned for them, or name other files.",
        ),
        (["qqp"], "and model.num_labels = 3 in the checkpoint. Use a checkpoint of a model"),
        (["mnli", "--output", "predictions.csv"], "Use a name that ends so"),
        (["mnli", "--output", "nowhere/predictions.tsv"], "there is no folder"),
        (["bad.jsonl", "--format", "mnli"], "bad.jsonl, line 2"),
        (["gone.jsonl", "--format", "mnli"], "gone.jsonl does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_mistakes_are_one_message(
    examples: Path, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(examples)
    good = rows(examples, "mnli")[0]
    Path("bad.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({**good, "label": 7}) + "\n")
    answer = here("predict", runs["mnli"], *arguments)
    assert (answer.status, answer.out) == (2, ""), answer
    assert words in " ".join(answer.err.split())


def test_a_model_that_was_trained_here_labels_examples_whose_labels_have_other_names(
    examples: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    """By their numbers, which is told; so are evaluations of its run that has such files."""
    make_examples(
        FORMATS["mrpc"], [examples / "qqp.jsonl"], tmp_path / "mrpc", Tokenizer.load(examples / "tokenizer.json")
    )
    own = json.loads(here("predict", runs["qqp"], examples / "qqp", "--json").out)
    answer = here("predict", runs["qqp"], tmp_path / "mrpc", "--json")
    assert answer.status == 0 and answer.err.count("\n") == 1, answer
    assert answer.err.startswith("Note: the checkpoint tells not_duplicate, duplicate apart, and examples of mrpc have")
    assert "labels not_equivalent, equivalent: their numbers are taken to mean the same." in answer.err
    found = json.loads(answer.out)
    assert found["scores"] == own["scores"]
    for each, other in zip(found["predictions"], own["predictions"], strict=True):
        assert [*each["probabilities"].values()] == [*other["probabilities"].values()]
    path = write_config(examples, "qqp", tmp_path)
    assert forked("train", path, f"data.validation={tmp_path / 'mrpc'}", "train.steps=1").status == 0
    measured = here("evaluate", tmp_path / "run", "--part", "validation")
    assert measured.status == 0 and "their numbers are taken to mean the same" in measured.out, measured


def test_nothing_is_predicted_by_broken_weights(examples: Path, runs: dict[str, Path]) -> None:
    trained = open_trained(find(runs["mnli"]), Mesh(), torch.device("cpu"))
    next(trained.model.parameters()).fill_(math.nan)
    with pytest.raises(CheckpointError, match="the model's logits of labels are not finite"):
        predict(trained, Mesh(), [examples / "mnli"], format_name=None, batch_size=4)


def test_a_language_model_tells_no_labels(finished: Finished, examples: Path) -> None:
    answer = here("predict", finished.folder, examples / "mnli")
    assert answer.status == 2 and "tells no labels" in answer.err, answer


@pytest.mark.slow
def test_an_ensemble_is_the_mean_of_its_members_logits(
    examples: Path, runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("another")
    other = write_config(examples, "mnli", folder)
    assert forked("train", other, "train.seed=7").status == 0
    members, given = (runs["mnli"], folder / "run"), (examples / "mnli.jsonl", "--format", "mnli")
    apart = [predictions(each, *given) for each in members]
    together = predictions(members[0], *given, "--with", members[1])
    assert apart[0] != apart[1]
    for one, another, both in zip(*apart, together, strict=True):
        raised = {name: math.sqrt(p * another["probabilities"][name]) for name, p in one["probabilities"].items()}
        expected = {
            name: p / sum(raised.values()) for name, p in raised.items()
        }  # logits differ from log p by a number
        assert both["probabilities"] == pytest.approx(expected, rel=1e-12)
        assert both["prediction"] == max(expected, key=lambda name: expected[name])
    on_two = predictions(members[0], *given, "--with", members[1], "--tp", 2, num_ranks=2)
    for each, both in zip(on_two, together, strict=True):
        assert each["probabilities"] == pytest.approx(both["probabilities"], rel=1e-9)
    answer = here("predict", members[0], *given, "--with", runs["qqp"])
    assert answer.status == 2 and "mnli with 3 labels" in answer.err and "model.num_labels = 2" in answer.err, answer
    answer = here("predict", members[0], *given, "--with", folder / "nothing")
    assert answer.status == 2 and "there is no such folder" in answer.err, answer


def test_logits_of_an_ensemble_are_averaged() -> None:
    fields, nobody = ExampleFields("sst2", "classification", ("text",), ("negative", "positive")), np.full(1, np.nan)
    members = [Predictions(fields, np.array([logits]), nobody) for logits in ([1.0, -2.0], [3.0, 6.0], [-1.0, 5.0])]
    assert averaged(members).logits.tolist() == [[1.0, 3.0]]


NOBODY = np.full(2, np.nan)
SST2 = ExampleFields("sst2", "classification", ("text",), ("negative", "positive"))
RTE = ExampleFields("rte", "classification", ("text", "text"), ("entailment", "not_entailment"))
RACE = ExampleFields("race", "choice", ("passage", "option A", "option B"))
STSB = ExampleFields("stsb", "classification", ("text", "text"), ())


def test_however_large_logits_are_their_probabilities_are_numbers() -> None:
    found = Predictions(SST2, np.array([[1000.0, 0.0], [-2000.0, -2000.0 + math.log(3)]]), NOBODY)
    np.testing.assert_allclose(found.probabilities, [[1.0, 0.0], [0.25, 0.75]], rtol=1e-12)
    (first, second) = found.records()
    assert first == {"index": 0, "prediction": "negative", "probabilities": {"negative": 1.0, "positive": 0.0}}
    assert (second["index"], second["prediction"]) == (1, "positive")


@pytest.mark.parametrize(
    ("fields", "told", "lines"),
    [
        (SST2, ["negative", "positive"], ["0\t0", "1\t1"]),
        (RTE, ["entailment", "not_entailment"], ["0\tentailment", "1\tnot_entailment"]),
        (RACE, ["A", "B"], ["0\tA", "1\tB"]),
        (STSB, [2.5, -1.0], ["0\t2.500", "1\t-1.000"]),
    ],
    ids=lambda value: value.format if isinstance(value, ExampleFields) else "",
)
def test_predictions_are_written_as_the_name_of_the_file_says(
    fields: ExampleFields, told: list[Any], lines: list[str], tmp_path: Path
) -> None:
    """A score is one number, and no prediction."""
    found = Predictions(fields, np.array([[2.5, 0.5], [-1.0, 3.0]])[:, : 1 if fields is STSB else 2], NOBODY)
    for name in ("p.tsv", "p.jsonl"):
        found.save(tmp_path / name)
    assert (tmp_path / "p.tsv").read_text().splitlines() == ["index\tprediction", *lines]
    written = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert written == list(found.records()) and [each["index"] for each in written] == [0, 1]
    assert [each["score" if fields is STSB else "prediction"] for each in written] == told
    assert all(each.keys() == {"index", "score"} for each in written) is (fields is STSB)
    assert found.about() == {"format": fields.format, "examples": 2, "scores": {}}


@pytest.mark.parametrize(
    ("head", "output", "threshold", "said"),
    [
        ("spans", "p.tsv", None, "SQuAD's predictions are .json, or .jsonl."),
        ("classification", "p.json", None, "labels are told in .tsv, as GLUE takes it, or .jsonl."),
        ("choice", None, 0.0, '--null-threshold is of questions about texts, and the checkpoint has model.head = "ch'),
        ("spans", "p.json", 0.0, None),
        ("spans", "p.jsonl", None, None),
        ("classification", "p.tsv", None, None),
        ("choice", "p.jsonl", None, None),
        ("choice", None, None, None),
    ],
)
def test_each_head_has_options_of_its_own(
    head: str, output: str | None, threshold: float | None, said: str | None
) -> None:
    def check() -> None:
        check_options(head, None if output is None else Path(output), threshold)

    if said is None:
        check()
        return
    with pytest.raises(ConfigError) as caught:
        check()
    assert said in str(caught.value)


@pytest.mark.parametrize("names", [[], ["a", "a"], ["a", "gone"], ["gone"]], ids=len)
def test_one_token_file_is_predicted_and_no_other_passed_over(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.idx").touch()
    nothing: Any = None
    with predicting._token_file(nothing, [tmp_path / "a"], None) as prefix:
        assert prefix == str(tmp_path / "a")
    with (
        pytest.raises(ConfigError, match="no token file, and --format is not given"),
        predicting._token_file(nothing, [tmp_path / name for name in names], None),
    ):
        pass


def test_an_ensemble_is_of_all_models_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on the ranks of the first, and read as the first is."""
    logits = {"first": [1.0, -2.0], "a": [3.0, 6.0], "b": [-1.0, 5.0]}
    config, asked = SimpleNamespace(model=SimpleNamespace(head="classification")), list[Any]()
    first: Any = SimpleNamespace(name="first", config=config)

    def ask(trained: Any, mesh: Any, inputs: Any, **how: Any) -> Predictions:
        asked.append((mesh, inputs, how))
        return Predictions(SST2, np.array([logits[trained.name]]), NOBODY[:1])

    monkeypatch.setattr(predicting, "predict", ask)
    monkeypatch.setattr(
        predicting,
        "open_another",
        lambda path, mesh, beside: SimpleNamespace(name=str(path)) if (mesh, beside) == ("ranks", first) else None,
    )
    mesh: Any = "ranks"
    how: dict[str, Any] = {"output": None, "format_name": "sst2", "batch_size": 3, "null_threshold": None}
    for others, expected in (([], [1.0, -2.0]), ([Path("a"), Path("b")], [1.0, 3.0])):
        found = predict_any(first, mesh, [Path("x")], others=others, **how)
        assert isinstance(found, Predictions) and found.logits.tolist() == [expected]
    assert asked == [("ranks", [Path("x")], {"format_name": "sst2", "batch_size": 3})] * 4


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("output", [None, "p.jsonl"])
def test_predictions_are_shown_or_written(
    output: str | None, as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is about them stands beside the lines of predictions, and never among them. Names are legible in lines."""
    found = Predictions(replace(SST2, labels=("négatif", "positif")), np.array([[2.5, 0.5]]), np.array([1.0]))
    place = None if output is None else tmp_path / output
    show(found, place, as_json=as_json)
    said, (record,) = capsys.readouterr(), list(found.records())
    summary = "1 example of sst2: accuracy 0.0000"
    lines = "" if place is None else place.read_text(encoding="utf-8")
    assert place is None or ([json.loads(line) for line in lines.splitlines()] == [record] and "négatif" in lines)
    if as_json:
        more = {"predictions": [record]} if place is None else {"output": str(place)}
        assert (json.loads(said.out), said.err) == ({**found.about(), **more}, "")
    elif place is None:
        assert json.loads(said.out) == record and said.err.startswith(summary) and "->" not in said.err
        assert '"prediction": "négatif"' in said.out
    else:
        assert said.out.startswith(summary) and said.out.endswith(f" -> {place}\n") and said.err == ""


def test_models_of_two_tasks_are_no_ensemble() -> None:
    nobody = np.full(2, np.nan)
    members = [
        Predictions(ExampleFields(task, "classification", ("text",), labels), np.zeros((2, len(labels))), nobody)
        for task, labels in (("sst2", ("negative", "positive")), ("rte", ("entailment", "not_entailment")))
    ]
    assert averaged(members[:1] * 3).summary() == "2 examples of sst2"
    fewer = replace(members[0], logits=np.zeros((1, 2)), targets=nobody[:1])
    with pytest.raises(ConfigError, match="negative, positive of 1 example, another negative, positive of 2 examples"):
        averaged([members[0], members[0], fewer])
    with pytest.raises(ConfigError, match="entailment, not_entailment of 2 examples, another negative, positive of 2"):
        averaged(members)


def test_logits_of_a_model_whose_labels_are_rotated_are_put_into_the_examples_order() -> None:
    """Of three, there and back are two orders."""
    trained: Any = SimpleNamespace(labels=("neutral", "entailment", "contradiction"), is_converted=True)
    fields = ExampleFields("mnli", "classification", ("text",), ("entailment", "contradiction", "neutral"))
    assert columns_of(trained, fields, 3) == [1, 2, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_says_that_labels_of_other_names_are_taken_by_their_numbers(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model that was trained here; a converted one may mean anything by them."""
    trained: Any = SimpleNamespace(labels=("no", "yes"), is_converted=False, mesh=SimpleNamespace(rank=rank))
    assert columns_of(trained, SST2, 2) == [0, 1]
    said = capsys.readouterr()
    note = (
        "Note: the checkpoint tells no, yes apart, and examples of sst2 have the labels negative, positive: "
        "their numbers are taken to mean the same.\n"
    )
    assert (said.out, said.err) == ("", note if rank == 0 else "")
    trained.is_converted = True
    with pytest.raises(ConfigError, match="Use a model that was fine-tuned for sst2"):
        columns_of(trained, SST2, 2)


@pytest.mark.parametrize("labels", [("negative", "positive"), ()], ids=["labels", "scores"])
def test_examples_are_scored_where_every_one_says_what_is_right(labels: tuple[str, ...]) -> None:
    logits = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])[:, : len(labels) or 1]
    fields = ExampleFields("sst2", "classification", ("text",), labels)
    assert Predictions(fields, logits, np.array([1.0, 0.0, 1.0])).scores()
    for targets in ([1.0, 0.0, np.nan], [np.nan] * 3):
        found = Predictions(fields, logits, np.array(targets))
        assert found.scores() == {} and found.summary() == "3 examples of sst2"


def test_a_choice_between_two_texts_is_scored_by_accuracy_alone() -> None:
    """The place of the right text says nothing, unlike a label's."""
    logits, targets = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]]), np.array([1.0, 0.0, 0.0])
    choice = ExampleFields("race", "choice", ("passage", "option A", "option B"))
    found = Predictions(choice, logits, targets)
    assert found.names == ("A", "B") and found.scores() == {"accuracy": pytest.approx(2 / 3)}
    yes_or_no = ExampleFields("sst2", "classification", ("text",), ("negative", "positive"))
    assert Predictions(yes_or_no, logits, targets).scores().keys() == {"accuracy", "f1", "matthews"}


@pytest.mark.parametrize("read", ["examples.json", "examples.bin", "text.json"])
def test_no_file_that_is_read_is_written_over(read: str, tmp_path: Path) -> None:
    """Nor the one beside a token file that says what its examples are."""
    for name in ("examples.bin", "examples.idx", "examples.json", "text.json"):
        (tmp_path / name).touch()
    inputs = [tmp_path / "examples", tmp_path / "text.json"]
    (problem,) = _unwritable((tmp_path / read).with_suffix(".json"), inputs)
    assert "is among what this command is given" in problem
    assert list(_unwritable(tmp_path / "new.json", inputs)) == []
