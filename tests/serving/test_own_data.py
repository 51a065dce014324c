"""`evaluate --part`: a checkpoint on the held-out parts of its own run's data, as the run measures them."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.checkpoint.manifest import Manifest
from colonnade.config.load import load
from colonnade.config.model import ModelConfig
from colonnade.data.indexed import TokenFile
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import CheckpointError, ConfigError
from colonnade.evaluation.perplexity import Perplexity
from colonnade.mesh.mesh import Mesh
from colonnade.serving import own_data
from colonnade.tasks.bert import Guesses
from colonnade.tasks.labels import Labelled
from colonnade.tasks.t5 import Written
from tests.commands import Answer, forked, here
from tests.runs import Finished, metrics
from tests.tiny import TinyCorpus, write_config

EXACT = ["train.precision=fp64", "train.steps=2", "optim.warmup_steps=1", "train.evaluate_samples=3"]


@pytest.fixture(scope="module")
def parts(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with token files a and b, of other documents each."""
    folder, file = tmp_path_factory.mktemp("parts"), TokenFile(corpus.prefix)
    for name, documents in (("a", range(6)), ("b", range(6, 12))):
        with TokenFileWriter(folder / name, file.dtype) as writer:
            for number in documents:
                writer.add_document(file.document(number))
    return folder


def run(config: Path, parts: Path, folder: Path, validation: str, test: str, *more: str) -> Answer:
    own = [f"data.validation={parts / validation}", f"data.test={parts / test}", f"run.folder={folder}"]
    return forked("train", config, *EXACT, *own, *more, num_ranks=2 if more else 1)


def measured(*arguments: object, num_ranks: int = 1) -> dict[str, object]:
    answer = forked("evaluate", *arguments, "--json", num_ranks=num_ranks)
    assert answer.status == 0, answer
    told = json.loads(answer.out)
    assert isinstance(told, dict)
    return told


@pytest.mark.slow
def test_a_part_is_measured_as_the_run_measures_it(corpus: TinyCorpus, parts: Path, tmp_path: Path) -> None:
    """Of two runs whose parts are exchanged the test part of one is the validation part of the other."""
    config = write_config(corpus, tmp_path)
    assert run(config, parts, tmp_path / "ab", "a", "b", "parallel.tp=2").status == 0
    assert run(config, parts, tmp_path / "ba", "b", "a").status == 0
    own = [metrics(tmp_path / name)[-1]["validation_loss"] for name in ("ab", "ba")]
    assert own[0] != pytest.approx(own[1], rel=1e-6)
    validation, test = (measured(tmp_path / "ab", "--part", part) for part in ("validation", "test"))
    assert [validation["loss"], test["loss"]] == pytest.approx(own, rel=1e-12)
    assert (test["part"], test["samples"], test["step"], test["tokens"]) == ("test", 3, 2, 48)
    assert test["parameters"] == {"batch_size": 2}, "the run's train.micro_batch_size"
    assert any("the first 3 of" in str(note) for note in test["notes"])  # type: ignore[attr-defined]
    cut = measured(tmp_path / "ab", "perplexity", "--part", "test", "--pp", 2, num_ranks=2)
    assert cut["loss"] == pytest.approx(own[1], rel=1e-12)


@pytest.mark.slow
def test_all_of_a_part(corpus: TinyCorpus, parts: Path, tmp_path: Path) -> None:
    config = write_config(corpus, tmp_path)
    assert run(config, parts, tmp_path / "whole", "b", "a", "train.evaluate_samples=1000", "parallel.dp=2").status == 0
    found = measured(tmp_path / "whole", "--part", "validation", "--samples", 1000)
    assert found["loss"] == pytest.approx(metrics(tmp_path / "whole")[-1]["validation_loss"], rel=1e-12)
    assert found["samples"] == found["samples_of_part"] and not any("--samples" in n for n in found["notes"])  # type: ignore[attr-defined]
    fewer = forked("evaluate", tmp_path / "whole", "--part", "validation", "--samples", 2)
    assert "32 tokens" in fewer.out and f"Note: the first 2 of {found['samples']} samples" in fewer.out


@pytest.mark.slow
def test_other_data_is_refused(finished: Finished, corpus: TinyCorpus, parts: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus.folder, tmp_path / "data")
    (folder / "tokens.json").unlink()  # it speaks of the file as it was, and would be missed first
    config = write_config(TinyCorpus(folder), tmp_path)
    assert forked("train", config, "train.steps=2").status == 0
    for ending in (".bin", ".idx"):
        shutil.copy(f"{parts / 'a'}{ending}", folder / f"tokens{ending}")
    answer = forked("evaluate", tmp_path / "run", "--part", "validation")
    assert answer.status == 2 and "was trained on other data than its [data] names now:\n  data.train (" in answer.err
    answer = forked("evaluate", finished.folder, "--part", "test", "--tp", 2, num_ranks=2)
    assert answer.status == 2 and "has no test part: its data.split = '5:1' leaves no sample" in answer.err, answer


def test_other_data_is_refused_of_a_run_that_may_go_on_over_it_too(finished: Finished, parts: Path) -> None:
    """checkpoint.allow_other_data is for training: of an evaluation nobody would see that the text was read."""
    config = load(finished.newest / "config.toml", [f"data.train={parts / 'a'}", "checkpoint.allow_other_data=true"])
    trained: Any = SimpleNamespace(config=config)
    with pytest.raises(CheckpointError, match="was trained on other data than its") as caught:
        own_data.measure_part(
            trained, Mesh(), finished.newest, "validation", samples=None, batch_size=None, as_json=False
        )
    assert f"\n  data.train ({parts / 'a'}): " in str(caught.value)


def test_a_part_is_measured_though_the_data_would_not_last_for_all_steps(finished: Finished) -> None:
    """As those of a checkpoint between a larger batch and fewer steps."""
    long = ["data.order=all_epochs", "data.epochs=1", "train.steps=1000"]
    config = load(finished.newest / "config.toml", long)
    assert own_data._opened(finished.newest, config, Mesh()).datasets.validation is not None


def test_the_runs_data_are_read_with_the_checkpoints_own_tokenizer(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that the configuration names may have changed since, or be gone."""
    opened: list[Any] = []
    monkeypatch.setattr(own_data, "open_together", lambda config, world: opened.append(config.data))
    monkeypatch.setattr(own_data, "other_data", lambda *_: [])
    config = load(finished.newest / "config.toml", ["data.tokenizer=gone.json"])
    own_data._opened(finished.newest, config, Mesh())
    assert opened == [config.data.model_copy(update={"tokenizer": str(finished.newest / "tokenizer.json")})]


def test_pairs_are_no_data_of_the_model_of_text_that_was_merged_from_a_run_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {"step": 0, "samples": 0, "model": {"vocab_size": 300}, "merged_from": {"head": "preferences"}}
    monkeypatch.setattr(own_data, "read_manifest", lambda path: Manifest(0, facts, {}, {}))
    config: Any = SimpleNamespace(model=ModelConfig())
    with pytest.raises(CheckpointError) as caught:
        own_data._opened(Path("merged"), config, Mesh())
    assert str(caught.value) == (
        "merged was merged from a run on preferences, whose data are pairs of answers: it is a model of text. Evaluate "
        "that run, or measure a text that it has not read with --data FILE."
    )


def test_a_part_that_the_run_does_not_have_is_not_measured() -> None:
    """Nor another in its place."""
    corpus: Any = SimpleNamespace(datasets=SimpleNamespace(validation=range(3), test=None))
    config: Any = SimpleNamespace(data=SimpleNamespace(split="5:1"), model=ModelConfig())
    assert own_data._part(corpus, config, Path("step"), "validation") == range(3)
    with pytest.raises(ConfigError, match=r"has no test part: its data\.split = '5:1' leaves no sample for it, and"):
        own_data._part(corpus, config, Path("step"), "test")


@pytest.mark.parametrize(
    ("kind", "head", "instead"),
    [
        ("gpt", "pretraining", "Measure a text that it has not read with --data FILE."),
        ("bert", "classification", "Predict the examples of a file with `colonnade predict`."),
        ("t5", "pretraining", "Train with a data.split that leaves some."),
    ],
)
def test_of_a_run_without_parts_that_is_said_which_its_model_can(kind: Any, head: Any, instead: str) -> None:
    config: Any = SimpleNamespace(data=SimpleNamespace(split="1:0"), model=ModelConfig(kind=kind, head=head))
    corpus: Any = SimpleNamespace(datasets=SimpleNamespace(validation=None, test=None))
    with pytest.raises(ConfigError) as caught:
        own_data._part(corpus, config, Path("step"), "test")
    assert str(caught.value).endswith(f" and data.test is not set. {instead}")
    corpus.datasets.validation = range(3)
    with pytest.raises(ConfigError, match=r" is not set\. Measure the validation part with --part validation[.,]"):
        own_data._part(corpus, config, Path("step"), "test")


def test_of_a_checkpoint_that_does_not_know_its_data_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus: Any = SimpleNamespace(files={key: SimpleNamespace(prefix=key) for key in ("a/train", "b/test")})
    known: list[Any] = [{"data.train": "sha"}, None]
    monkeypatch.setattr(own_data, "read_manifest", lambda path: path)
    monkeypatch.setattr(own_data, "metadata_of", lambda path, manifest: SimpleNamespace(data=known.pop(0)))
    assert own_data._not_known(Path("step"), corpus) == ""
    assert own_data._not_known(Path("step"), corpus).startswith(
        "the checkpoint does not know its data: whether a/train, b/test are the files that it was trained on"
    )


def test_options_that_do_not_go_together(finished: Finished) -> None:
    for arguments, said in (
        ([], "neither --data nor --part is given"),
        (["--part", "train"], "--part 'train': there is no such held-out part. Use validation or test."),
        (["--part", "test", "--stride", 4], "--stride 4 does not go with --part"),
        (["--part", "test", "--data", finished.config], "and --part test are given"),
        (["--data", finished.config, "--samples", 4], "--samples 4 is of a --part"),
    ):
        answer = here("evaluate", finished.folder, *arguments)
        assert answer.status == 2 and said in answer.err and answer.out == "", answer


def test_what_is_held_out_was_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {key: SimpleNamespace(prefix=key) for key in ("data.train", "data.validation", "data.test")}
    monkeypatch.setattr(own_data, "_opened", lambda *_: SimpleNamespace(files=files))
    trained: Any = SimpleNamespace(config=None)
    assert own_data.own_corpus(trained, Mesh(), Path("checkpoint")) == [Path("data.train")]


@pytest.mark.parametrize(
    ("samples", "batch_size", "read", "at_once", "notes"),
    [
        (None, None, 3, 2, ["the first 3 of 7 samples of the validation part; --samples reads more"]),
        (100, 5, 7, 5, []),
    ],
)
def test_a_part_is_read_as_the_runs_own_evaluations_read_it_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    samples: int | None,
    batch_size: int | None,
    read: int,
    at_once: int,
    notes: list[str],
) -> None:
    """Of 7 samples; train.evaluate_samples is 3, train.micro_batch_size 2."""
    datasets = SimpleNamespace(validation=range(7), test=None)
    config = SimpleNamespace(train=SimpleNamespace(evaluate_samples=3, micro_batch_size=2))
    asked: list[dict[str, Any]] = []
    found = Written(mean_loss=0.5, accuracy=0.25, tokens=9)

    def evaluate_part(*_: object, hidden: object, **how: Any) -> Any:
        asked.append(how)
        return SimpleNamespace(found=found, each={}, of_each=list)

    monkeypatch.setattr(
        own_data, "_opened", lambda *_: SimpleNamespace(datasets=datasets, other_labels=["other labels"])
    )
    monkeypatch.setattr(own_data, "evaluate_part", evaluate_part)
    attached: list[Any] = []
    monkeypatch.setattr(own_data, "attach_stored", lambda config, corpus: attached.append((config, corpus.datasets)))
    for name, said in (("_not_known", ""), ("about", {"step": 6})):
        monkeypatch.setattr(own_data, name, lambda *_, said=said: said)
    trained: Any = SimpleNamespace(config=config, model=None, hidden=None)
    own_data.measure_part(
        trained, Mesh(), Path("step"), "validation", samples=samples, batch_size=batch_size, as_json=True
    )
    told = json.loads(capsys.readouterr().out)
    assert asked == [{"samples": samples or 3, "micro_batch_size": at_once}]
    assert attached == [(config, datasets)], "with what the run has stored of a reference model"
    assert (told["samples"], told["samples_of_part"], told["parameters"]) == (read, 7, {"batch_size": at_once})
    assert told["notes"] == [*notes, "other labels"], "of its files, as the run tells it at its start"
    assert (told["part"], told["step"], told["accuracy"]) == ("validation", 6, 0.25)


@pytest.mark.parametrize(
    "found",
    [
        Perplexity(loss=0.5, perplexity=1.6, bits_per_byte=None, tokens=9, bytes=None),
        Written(mean_loss=0.5, accuracy=0.25, tokens=9),
        Guesses(masked_loss=0.5, masked_accuracy=0.25, order_loss=0.75, order_accuracy=0.5, masked_tokens=9, samples=7),
        Labelled(loss=0.5, scores={"accuracy": 0.25}, examples=7),
    ],
    ids=lambda found: type(found).__name__,
)
def test_each_data_set_of_a_part_is_told_beside_all_of_it(
    found: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By rank 0 alone, and of all of it what the run's metrics have, whatever the kind of model."""
    config = SimpleNamespace(train=SimpleNamespace(evaluate_samples=9, micro_batch_size=2))
    corpus = SimpleNamespace(datasets=SimpleNamespace(validation=None, test=range(7)), other_labels=[])
    web = SimpleNamespace(numbers=lambda: {"loss": 0.75})
    result, called = SimpleNamespace(found=found, each={"web": web}, of_each=lambda: ["web: loss 0.7500"]), list[str]()
    for name, said in (("attach_stored", None), ("_not_known", "not checked"), ("about", {}), ("_opened", corpus),
                       ("evaluate_part", result)):  # fmt: skip
        monkeypatch.setattr(own_data, name, lambda *_, said=said, name=name, **__: (called.append(name), said)[1])
    trained: Any = SimpleNamespace(config=config, model=None, hidden=None)

    def told(rank: int, *, as_json: bool) -> str:
        mesh: Any = SimpleNamespace(rank=rank)
        called.clear()
        own_data.measure_part(trained, mesh, Path("step"), "test", samples=None, batch_size=None, as_json=as_json)
        together = {"attach_stored", "about", "_opened", "evaluate_part"}
        assert together <= {*called}, "every rank takes part"
        return capsys.readouterr().out

    content = json.loads(told(0, as_json=True))
    assert (content["part"], content["data_sets"], content["notes"]) == (
        "test",
        {"web": {"loss": 0.75}},
        ["not checked"],
    )
    assert content == {**content, **found.numbers()}
    assert content["protocol"] == ("perplexity" if isinstance(found, Perplexity) else "held-out part")
    assert told(0, as_json=False) == f"{found.summary()}\n  web: loss 0.7500\nNote: not checked.\n"
    assert told(1, as_json=True) == ""
