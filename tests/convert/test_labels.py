"""Heads with labels beside Hugging Face's: logits, losses and gradients in float64, there and back, and beginnings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from colonnade.checkpoint.manifest import read_manifest
from colonnade.data.example_dataset import PairTokens
from colonnade.data.tokenizer import Tokenizer
from colonnade.huggingface.folder import open_published
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert_labels import LabelBERT, LabelInputs
from colonnade.serving.trained import open_trained
from colonnade.tensor_parallel.parallel import Parallel
from tests.commands import forked, here
from tests.convert.published import LLAMA, heard, transformers
from tests.convert.test_round_trip import converted
from tests.model.theirs import joined
from tests.runs import events, whole_tensors
from tests.tasks.examples import write_config, write_examples
from tests.train.test_init_from import WEIGHTS_ONLY

CPU = torch.device("cpu")
S, B, VOCAB = 13, 3, 61
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "labels": ("BertForSequenceClassification", {"num_labels": 3}),
    "score": ("BertForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "choice": ("BertForMultipleChoice", {}),
    "labels, pre-norm": ("MegatronBertForSequenceClassification", {"num_labels": 5}),
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def published(folder: Path, name: str) -> Any:
    """A model of theirs with random numbers everywhere, in a folder."""
    kind, more = THEIRS[name]
    config = getattr(transformers, kind.partition("For")[0] + "Config")
    model = getattr(transformers, kind)(config(**{**LLAMA, **NO_DROPOUT}, **more))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim == 2 else 0.2)
        parameter.data = drawn + (parameter.ndim == 1)
    model.eval().save_pretrained(folder)
    return model


def given(name: str) -> LabelInputs:
    sequences = 4 * B if name == "choice" else B
    generator, place = torch.Generator().manual_seed(3), torch.arange(S)[:, None]
    tokens = torch.randint(1, VOCAB, (S, sequences), generator=generator)
    lengths = torch.randint(6, S + 1, (sequences,), generator=generator)
    targets = torch.tensor([0.25, 3.0, 1.5] if name == "score" else [2.0, 0.0, 1.0]).double()
    weights = torch.full((B,), 1.0 / B, dtype=torch.float64)
    types = (place >= 5).long().expand(S, sequences)
    return LabelInputs(tokens, types=types, real=place < lengths, targets=targets, target_weights=weights)


@pytest.mark.parametrize("name", THEIRS)
def test_logits_losses_and_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    twin = published(tmp_path / "theirs", name).double()
    folder = open_published(tmp_path / "theirs")
    model = LabelBERT(folder.model, VOCAB, Parallel(Mesh().tp)).double()
    mine = {f"{p}.{k}": w for p, module in model.bucket_modules().items() for k, w in module.named_parameters()}
    with torch.no_grad():
        for ours in folder.sources:
            whole = folder.read(ours)
            mine[ours][: len(whole)].copy_(whole)
    inputs = given(name)
    assert inputs.tokens is not None and inputs.types is not None and inputs.real is not None
    carry: tuple[Tensor, ...] = ()
    for unit in model.units():
        before, carry = carry, model.run(unit, carry, inputs)
    (loss,) = carry
    loss.backward()
    batch = [each.t() for each in (inputs.tokens, inputs.types, inputs.real.long())]
    if name == "choice":
        batch = [each.reshape(B, 4, S) for each in batch]
    assert inputs.targets is not None
    targets = inputs.targets if name == "score" else inputs.targets.long()
    theirs = twin(input_ids=batch[0], token_type_ids=batch[1], attention_mask=batch[2], labels=targets)
    theirs.loss.backward()
    torch.testing.assert_close(model.head.predict(before[0]), theirs.logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loss, theirs.loss, rtol=1e-12, atol=0)
    gradients = {key: parameter.grad for key, parameter in twin.named_parameters()}
    for ours, source in folder.sources.items():
        expected = joined([gradients[part] for part in source.theirs], folder.model.head_width)  # type: ignore[misc]
        if ours == "embedding.tokens.weight":
            expected = expected[:VOCAB]
        found = mine[ours].grad
        assert found is not None
        torch.testing.assert_close(
            found[: len(expected)], expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=ours: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", THEIRS)
def test_there_and_back(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of it becomes a folder that transformers loads without a word, with the same numbers and config."""
    theirs = published(tmp_path / "theirs", name)
    converted(tmp_path / "theirs", tmp_path / "ours")
    said = converted(tmp_path / "ours", tmp_path / "back")
    assert THEIRS[name][0] in said
    with heard(caplog) as warned:
        back, info = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert warned == [] and not any(info.values()), (warned, info)
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert back.config.num_labels == theirs.config.num_labels or name == "choice"
    assert back.config.problem_type in (None, "regression" if name == "score" else "single_label_classification")


def test_a_folder_whose_labels_are_not_exclusive(tmp_path: Path) -> None:
    model = published(tmp_path / "theirs", "labels")
    model.config.problem_type = "multi_label_classification"
    model.config.save_pretrained(tmp_path / "theirs")
    answer = here("convert", tmp_path / "theirs", tmp_path / "ours")
    assert answer.status == 2 and "problem_type" in answer.err, answer


# --- beginning from another head --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("examples"))


def trained(examples: Path, folder: Path, task: str, *more: str, num_ranks: int = 1) -> Path:
    answer = forked("train", write_config(examples, task, folder), *more, num_ranks=num_ranks)
    assert answer.status == 0, answer
    return folder / "run"


def sized(folder: Path, examples: Path, kind: str = "BertModel", **more: Any) -> Path:
    """An encoder of theirs of the size of the examples' configuration. `more`: of its config."""
    vocab_size = Tokenizer.load(examples / "tokenizer.json").vocab_size
    config = transformers.BertConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        layer_norm_eps=1e-5,
        **more,
    )
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


POST = ("model.norm_position=post", "model.embedding_norm=true")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BertModel", "BertForPreTraining", "BertForMaskedLM"])
def test_an_encoder_of_theirs_gets_a_new_head(kind: str, examples: Path, tmp_path: Path) -> None:
    source = sized(tmp_path / "theirs", examples, kind)
    run = trained(examples, tmp_path, "mnli", *POST, f"train.init_from={source}", *WEIGHTS_ONLY)
    (event,) = (event for event in events(run) if event["event"] == "initialized")
    pooler = [] if kind != "BertForMaskedLM" else ["head.pooler.bias", "head.pooler.weight"]
    assert event["new"] == ["head.classifier.bias", "head.classifier.weight", *pooler]
    weights = whole_tensors(run / "checkpoints" / "step_00000001")
    theirs = getattr(transformers, kind).from_pretrained(source)
    base = getattr(theirs, "bert", theirs)
    expected = base.embeddings.word_embeddings.weight
    torch.testing.assert_close(weights["embedding.tokens.weight"], expected.double(), rtol=0, atol=1e-12)
    if kind != "BertForMaskedLM":
        torch.testing.assert_close(weights["head.pooler.weight"], base.pooler.dense.weight.double(), rtol=0, atol=1e-12)
    assert weights["head.classifier.weight"].std() > 0.005


@pytest.mark.parametrize(("kind", "drawn"), [("BertModel", 3), ("BertForMaskedLM", 5)])
def test_a_classifier_that_was_drawn_is_not_lost_in_an_export_of_adapters(
    kind: str, drawn: int, examples: Path, tmp_path: Path
) -> None:
    """It is frozen, and the base does not have it, nor the positions as they were cut: PEFT would draw another."""
    source = sized(tmp_path / "theirs", examples, kind)
    more = ("lora.rank=2", "model.seq_length=12", "train.init_from_resize=true", "train.steps=1")
    run = trained(examples, tmp_path, "mnli", *POST, f"train.init_from={source}", *more, "train.evaluate_every=0")
    answer = here("convert", run, tmp_path / "peft")
    assert answer.status == 2 and f"has {drawn} weights besides its adapters that no base has" in answer.err, answer
    assert f"colonnade merge {run / 'checkpoints' / 'step_00000001'} TARGET" in answer.err
    assert not (tmp_path / "peft").exists()
    answer = here("merge", run, tmp_path / "merged")
    assert answer.status == 0, answer
    classifier = "head.classifier.weight"
    before, after = whole_tensors(run / "checkpoints" / "step_00000001"), whole_tensors(tmp_path / "merged")
    assert torch.equal(after[classifier], before[classifier])
    named = read_manifest(tmp_path / "merged").metadata["labels"]
    assert len(named) == 3 and named == read_manifest(run / "checkpoints" / "step_00000001").metadata["labels"]


@pytest.mark.slow
def test_a_head_for_other_labels_is_drawn_and_one_for_the_same_is_taken(examples: Path, tmp_path: Path) -> None:
    first = trained(examples, tmp_path / "mnli", "mnli")
    before = whole_tensors(first / "checkpoints" / "step_00000004")
    for task, new in (("mnli", False), ("qqp", True), ("race", True)):
        run = trained(
            examples, tmp_path / f"to {task}", task, f"train.init_from={first}", *WEIGHTS_ONLY, "parallel.dp=2",
            "parallel.zero=3", num_ranks=2,
        )  # fmt: skip
        (event,) = (event for event in events(run) if event["event"] == "initialized")
        classifier = ["head.classifier.bias", "head.classifier.weight"]
        assert (event["new"], event["left"]) == ((classifier, classifier) if new else ([], [])), task
        after = whole_tensors(run / "checkpoints" / "step_00000001")
        torch.testing.assert_close(after["head.pooler.weight"], before["head.pooler.weight"], rtol=0, atol=1e-12)
        assert torch.allclose(after["head.norm.weight"], before["head.norm.weight"])


@pytest.mark.parametrize("kind", ["BertModel", "MegatronBertModel"])
def test_an_encoder_without_a_head_there_and_back(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It becomes a checkpoint that makes vectors, and a folder of the same class with the same numbers."""
    model = getattr(transformers, kind)
    theirs = model(getattr(transformers, kind.replace("Model", "Config"))(**{**LLAMA, **NO_DROPOUT}))
    theirs.eval().save_pretrained(tmp_path / "theirs")
    converted(tmp_path / "theirs", tmp_path / "ours")
    assert kind in converted(tmp_path / "ours", tmp_path / "back")
    with heard(caplog) as warned:
        back, info = model.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert warned == [] and not any(info.values()), (warned, info)
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    own = open_published(tmp_path / "back")
    assert own.model.head == "none" and [name for name in own.sources if name.startswith("head.")][-1] == (
        "head.pooler.bias"
    )


def test_an_encoder_without_a_head_is_not_trained_and_tells_no_labels(examples: Path, tmp_path: Path) -> None:
    converted(sized(tmp_path / "theirs", examples), tmp_path / "ours")
    answer = here("train", write_config(examples, "mnli", tmp_path), "model.head=none", *POST)
    assert answer.status == 2 and "it has no loss to train with" in answer.err, answer
    Tokenizer.load(examples / "tokenizer.json")
    (tmp_path / "ours" / "tokenizer.json").write_bytes((examples / "tokenizer.json").read_bytes())
    answer = here("predict", tmp_path / "ours", examples / "mnli")
    assert answer.status == 2 and "tells no labels" in answer.err, answer
    answer = here("embed", tmp_path / "ours", "--text", "dog", "--output", tmp_path / "v.npy")
    assert answer.status == 0, answer


def test_a_head_of_which_a_part_is_missing_says_what_can_be_done(tmp_path: Path) -> None:
    transformers.BertForMaskedLM(transformers.BertConfig(**LLAMA)).save_pretrained(tmp_path / "theirs")
    answer = here("convert", tmp_path / "theirs", tmp_path / "ours")
    assert answer.status == 2 and "4 tensors are missing: bert.pooler" in answer.err, answer
    assert "Or begin a run from these weights (train.init_from)" in answer.err


def test_names_of_labels_are_kept(tmp_path: Path) -> None:
    model = published(tmp_path / "theirs", "labels")
    names = ["entailment", "neutral", "contradiction"]
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: number for number, name in enumerate(names)}
    model.config.save_pretrained(tmp_path / "theirs")
    converted(tmp_path / "theirs", tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "back")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert (config.id2label, config.label2id) == (model.config.id2label, model.config.label2id)


def test_names_of_labels_go_by_their_numbers_in_whatever_order_a_file_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written with sorted keys, 10 comes before 2."""
    monkeypatch.setitem(THEIRS, "twelve", ("BertForSequenceClassification", {"num_labels": 12}))
    published(tmp_path / "theirs", "twelve")
    names = [f"label of {number}" for number in range(12)]
    path = tmp_path / "theirs" / "config.json"
    named = {"id2label": {str(number): name for number, name in enumerate(names)}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **named}, sort_keys=True))
    assert open_published(tmp_path / "theirs").labels == tuple(names)


def test_two_labels_may_have_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers writes a classifier of two."""
    monkeypatch.setitem(THEIRS, "two", ("BertForSequenceClassification", {"num_labels": 2}))
    published(tmp_path / "theirs", "two")
    assert "id2label" not in (tmp_path / "theirs" / "config.json").read_text()
    converted(tmp_path / "theirs", tmp_path / "ours")
    assert open_published(tmp_path / "theirs").labels == ()


@pytest.mark.slow
def test_a_fine_tuned_checkpoint_predicts_with_transformers(examples: Path, tmp_path: Path) -> None:
    """The way of a user: an encoder of theirs, trained here, back to them: the same answers to the same texts."""
    source = sized(tmp_path / "theirs", examples)
    run = trained(examples, tmp_path, "mnli", *POST, f"train.init_from={source}")
    converted(run, tmp_path / "back")
    twin = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "back", dtype=torch.float64).eval()
    assert list(twin.config.id2label.values()) == ["entailment", "neutral", "contradiction"], "as the examples say"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    encoded = tokenizer("dog", "rain tree")
    own = open_trained(run / "checkpoints" / "step_00000004", Mesh(), CPU, "fp64")
    assert isinstance(own.model, LabelBERT)
    ids = Tokenizer.load(examples / "tokenizer.json")
    cls, sep = ids.id_of("[CLS]"), ids.id_of("[SEP]")
    assert cls is not None and sep is not None
    pair = [cls, *ids.encode("dog"), sep, *ids.encode("rain tree"), sep]
    tokens = torch.tensor(pair)[:, None]
    types = (torch.arange(len(pair)) > 1 + len(ids.encode("dog")))[:, None].long()
    carry = own.hidden(LabelInputs(tokens, types=types, real=torch.ones_like(tokens).bool()))
    assert carry is not None
    with torch.no_grad():
        theirs = twin(input_ids=tokens.t(), token_type_ids=types.t()).logits
        torch.testing.assert_close(own.model.head.predict(carry[0]), theirs, rtol=1e-10, atol=1e-10)
    assert (encoded.input_ids, encoded.token_type_ids) == (pair, types[:, 0].tolist()), "with control tokens around"


# --- names of labels --------------------------------------------------------------------------------------------------


def named(folder: Path, examples: Path, *names: str) -> Path:
    """A classifier of theirs whose labels are called so, which tells the examples apart, and its checkpoint."""
    torch.manual_seed(3)
    more = {"id2label": dict(enumerate(names)), "initializer_range": 0.5}
    theirs = sized(folder / "theirs", examples, "BertForSequenceClassification", **more)
    (theirs / "tokenizer.json").write_bytes((examples / "tokenizer.json").read_bytes())
    converted(theirs, folder / "ours")
    return theirs


def test_predictions_go_by_the_names_that_a_published_model_gives_its_labels(examples: Path, tmp_path: Path) -> None:
    """Its second label is the first of the examples."""
    theirs = named(tmp_path, examples, "contradiction", "ENTAILMENT", "neutral")
    twin = transformers.BertForSequenceClassification.from_pretrained(theirs).eval()
    tokenizer = Tokenizer.load(examples / "tokenizer.json")
    control = PairTokens.of(tokenizer)
    rows = [json.loads(line) for line in (examples / "mnli.jsonl").read_text().splitlines()]
    answer = here("predict", tmp_path / "ours", examples / "mnli.jsonl", "--format", "mnli", "--json")
    assert answer.status == 0, answer
    right, told = [], json.loads(answer.out)
    for row, found in zip(rows, told["predictions"], strict=True):
        pair = [np.array(tokenizer.encode(row[text])) for text in ("text_a", "text_b")]
        ids, types, real = (torch.from_numpy(x)[None] for x in control.sequence(*pair, 16))
        with torch.no_grad():
            logits = twin(input_ids=ids, token_type_ids=types, attention_mask=real.long()).logits[0]
        chances = {twin.config.id2label[number].lower(): float(p) for number, p in enumerate(logits.softmax(0))}
        assert found["probabilities"] == pytest.approx(chances, rel=1e-5)
        likeliest = max(chances, key=lambda name: chances[name])
        assert found["prediction"] == likeliest
        right.append(likeliest == ("entailment", "neutral", "contradiction")[row["label"]])
    assert told["scores"] == {"accuracy": pytest.approx(sum(right) / len(right))}


def test_a_model_of_other_labels_predicts_none_of_these(examples: Path, tmp_path: Path) -> None:
    named(tmp_path, examples, "joy", "fear", "anger")
    answer = here("predict", tmp_path / "ours", examples / "mnli")
    assert answer.status == 2 and answer.out == "", answer
    assert "tells joy, fear, anger apart, and examples of mnli have the labels entailment, neutral, " in answer.err


@pytest.mark.parametrize("names", [("LABEL_0", "LABEL_1", "LABEL_2"), ("0", "1", "2")])
def test_a_model_that_says_no_names_predicts_by_numbers(names: tuple[str, ...], examples: Path, tmp_path: Path) -> None:
    theirs = named(tmp_path, examples, *names)
    answer = here("predict", tmp_path / "ours", examples / "mnli")
    assert answer.status == 0 and "taken to mean the same" not in answer.err, answer
    converted(tmp_path / "ours", tmp_path / "back")
    before, after = (transformers.AutoConfig.from_pretrained(folder) for folder in (theirs, tmp_path / "back"))
    assert before.id2label == after.id2label == dict(enumerate(names))
