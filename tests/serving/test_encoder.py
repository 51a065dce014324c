"""Words for gaps and vectors of texts: those of `transformers` with the same weights, on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, DataError
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert import BERT
from colonnade.serving.encoder import _filled, _with_gaps, embeddings, fillings
from colonnade.serving.trained import open_trained
from tests.commands import Answer, forked, here
from tests.convert.published import transformers
from tests.runs import Finished
from tests.tasks.examples import WORDS, vocabulary

TEXTS = ("the dog and the [MASK] stone", "[MASK] north river [MASK] boat")
LAYOUTS = {"tp 2": ("--tp", 2), "pp 2": ("--pp", 2)}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Tokenizer]:
    return published(tmp_path_factory.mktemp("bert"), "Bert")


def published(folder: Path, kind: str, *, more_rows: int = 0) -> tuple[Path, Any, Tokenizer]:
    """A checkpoint, the same model of transformers in float64, and their tokenizer; `more_rows` than it has ids."""
    tokenizer = vocabulary(folder / "theirs")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=tokenizer.vocab_size + more_rows,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=50,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    model = getattr(transformers, f"{kind}ForPreTraining")(config)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1)
    model.save_pretrained(folder / "theirs")
    answer = here("convert", folder / "theirs", folder / "ours")
    assert (answer.status, answer.err) == (0, ""), answer
    return folder / "ours", model.double().eval(), tokenizer


def in_fp64(command: str, *arguments: object, num_ranks: int = 1) -> Answer:
    answer = forked(command, *arguments, "--precision", "fp64", num_ranks=num_ranks)
    assert answer.status == 0, answer
    return answer


def ids_of(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    cls, sep, mask = (tokenizer.id_of(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
    words = [[mask] if word == "[MASK]" else tokenizer.encode(word) for word in text.split()]
    return torch.tensor([[cls, *(token for word in words for token in word), sep]])


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_the_likeliest_words_are_those_of_transformers(bert: tuple[Path, Any, Tokenizer], layout: str) -> None:
    checkpoint, model, tokenizer = bert
    options = LAYOUTS.get(layout, ())
    answer = in_fp64(
        "fill-mask", checkpoint, "--text", TEXTS[0], "--text", TEXTS[1], "--top", 3, "--json", *options,
        num_ranks=2 if options else 1,
    )  # fmt: skip
    told = json.loads(answer.out)["texts"]
    assert [each["text"] for each in told] == list(TEXTS)
    for text, found in zip(TEXTS, told, strict=True):
        ids = ids_of(tokenizer, text)
        with torch.no_grad():
            chances = model(ids).prediction_logits[0].softmax(-1)
        gaps = [place for place, token in enumerate(ids[0].tolist()) if token == tokenizer.id_of("[MASK]")]
        assert len(found["masks"]) == len(gaps)
        for gap, words in zip(gaps, found["masks"], strict=True):
            expected = chances[gap].topk(3)
            assert [each["token"] for each in words] == [tokenizer.names[token] for token in expected.indices]
            assert [each["probability"] for each in words] == pytest.approx(expected.values.tolist(), rel=1e-10)
    word = told[1]["masks"][1][0]["token"]
    filled = f"[MASK] north river {word} boat" if not word.startswith("##") else f"[MASK] north river{word[2:]} boat"
    assert told[1]["masks"][1][0]["text"] == filled


def test_without_a_token_for_gaps_nothing_is_guessed() -> None:
    trained: Any = SimpleNamespace(model=BERT.__new__(BERT), tokenizer=SimpleNamespace(id_of=lambda name: None))
    with pytest.raises(DataError, match=r"the tokenizer has no \[MASK\]"):
        fillings(trained, Mesh(), ["a [MASK]"], top=3)


@pytest.mark.parametrize(
    ("number", "word", "filled"),
    [
        (0, "sun", "the sun and [MASK] [MASK]."),
        (1, "rain", "the [MASK] and rain [MASK]."),
        (2, "##s", "the [MASK] and [MASK]s."),
    ],
)
def test_a_word_stands_in_its_gap_and_other_gaps_stay(number: int, word: str, filled: str) -> None:
    """A piece of a word joins what is before it."""
    assert _filled("the [MASK] and [MASK] [MASK].", number, word) == filled


def test_a_text_may_have_as_many_tokens_as_the_model_reads(tmp_path: Path) -> None:
    """Two of them around it."""
    model = SimpleNamespace(seq_length=16)
    trained: Any = SimpleNamespace(tokenizer=vocabulary(tmp_path), config=SimpleNamespace(model=model))
    assert len(_with_gaps(trained, "[MASK]" + " dog" * 13, 4)) == 16
    with pytest.raises(DataError, match="has 17 tokens, and the model reads 16"):
        _with_gaps(trained, "[MASK]" + " dog" * 14, 4)


def test_rows_that_are_no_tokens_fill_no_gap(tmp_path: Path) -> None:
    """Their share of the probabilities stays with them."""
    checkpoint, model, tokenizer = published(tmp_path, "Bert", more_rows=8)
    answer = in_fp64("fill-mask", checkpoint, "--text", TEXTS[0], "--top", 10**6, "--json")
    told = json.loads(answer.out)["texts"][0]["masks"][0]
    ids = ids_of(tokenizer, TEXTS[0])
    with torch.no_grad():
        chances = model(ids).prediction_logits[0].softmax(-1)[(ids[0] == tokenizer.id_of("[MASK]")).nonzero().item()]
    assert chances[tokenizer.vocab_size :].max() > chances[: tokenizer.vocab_size].min()
    expected = chances[: tokenizer.vocab_size].sort(descending=True)
    assert [each["token"] for each in told] == [tokenizer.names[token] for token in expected.indices]
    assert [each["probability"] for each in told] == pytest.approx(expected.values.tolist(), rel=1e-10)


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_vectors_are_the_mean_over_a_texts_tokens(
    bert: tuple[Path, Any, Tokenizer], layout: str, tmp_path: Path
) -> None:
    """Whatever texts are read beside it; of the last two the end is cut, as the model reads 16 tokens."""
    checkpoint, model, tokenizer = bert
    options, output = LAYOUTS.get(layout, ()), tmp_path / "vectors.npy"
    texts = [" ".join(WORDS[:6]), "dog", "the sun and the rain", "dog " * 14, "dog " * 15, " ".join(WORDS * 3)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    answer = in_fp64(
        "embed", checkpoint, "--texts", tmp_path / "texts.txt", "--output", output, "--batch-size", 3, "--no-normalize",
        *options, num_ranks=2 if options else 1,
    )  # fmt: skip
    assert "6 vectors of 24 numbers" in answer.out and "2 of 6 texts lost their end" in answer.err
    vectors = np.load(output)
    for text, vector in zip(texts, vectors, strict=True):
        ids = ids_of(tokenizer, text)
        ids = torch.cat([ids[:, :15], ids[:, -1:]], 1) if ids.shape[1] > 16 else ids
        with torch.no_grad():
            expected = model.bert(ids).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-6)  # they are kept in float32


@pytest.mark.parametrize("asked", [False, True])
def test_names_of_control_tokens_are_text_unless_it_is_asked_otherwise(
    asked: bool, bert: tuple[Path, Any, Tokenizer]
) -> None:
    checkpoint, model, tokenizer = bert
    cls, sep = (tokenizer.id_of(name) for name in ("[CLS]", "[SEP]"))
    read = [*tokenizer.encode("dog"), sep, *tokenizer.encode("rain")] if asked else tokenizer.encode("dog [SEP] rain")
    option = ["--control-tokens"] if asked else []
    answer = in_fp64("embed", checkpoint, "--text", "dog", "--text", "dog [SEP] rain", "--no-normalize", *option)
    with torch.no_grad():
        expected = model.bert(torch.tensor([[cls, *read, sep]])).last_hidden_state[0].mean(0)
    assert json.loads(answer.out.splitlines()[1])["vector"] == pytest.approx(expected.tolist(), rel=1e-5)
    told = "text 2 spells [SEP], read as text like any other: --control-tokens reads names of control tokens as these."
    assert answer.err == ("" if asked else f"{told}\n")


def test_an_empty_text_has_a_vector_and_a_blank_line_is_none(bert: tuple[Path, Any, Tokenizer], tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("dog\n\nrain\n")
    (tmp_path / "lines.jsonl").write_text('{"text": "dog"}\n\n{"text": ""}\n{"text": "rain"}\n')
    for name, rows in (("lines.txt", 2), ("lines.jsonl", 3)):
        answer = in_fp64("embed", bert[0], "--texts", tmp_path / name, "--output", tmp_path / f"{name}.npy")
        assert f"{rows} vectors of 24 numbers" in answer.out
    lines, records = np.load(tmp_path / "lines.txt.npy"), np.load(tmp_path / "lines.jsonl.npy")
    np.testing.assert_allclose(records[[0, 2]], lines, rtol=1e-6)
    assert np.linalg.norm(records[1]) == pytest.approx(1.0)


def test_vectors_of_a_pre_norm_model_are_of_what_its_last_norm_makes(tmp_path: Path) -> None:
    checkpoint, model, tokenizer = published(tmp_path, "MegatronBert")
    trained = open_trained(checkpoint, Mesh(), torch.device("cpu"), "fp64")
    assert trained.config.model.norm_position == "pre"
    texts = ["the sun and the rain", "dog"]
    found, _ = embeddings(trained, Mesh(), texts, batch_size=2, normalize=False)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            expected = model.bert(ids_of(tokenizer, text)).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector.numpy(), expected.numpy(), rtol=1e-6)  # it is kept in float32


def test_broken_weights_fill_no_gap_and_make_no_vectors(bert: tuple[Path, Any, Tokenizer]) -> None:
    trained = open_trained(bert[0], Mesh(), torch.device("cpu"))
    next(trained.model.parameters()).fill_(torch.nan)
    with pytest.raises(CheckpointError, match="the model's logits of words are not finite"):
        fillings(trained, Mesh(), ["[MASK]"], top=1)
    with pytest.raises(CheckpointError, match="the model's vectors of texts are not finite"):
        embeddings(trained, Mesh(), ["dog"], batch_size=1)


def test_one_word_with_broken_weights_leaves_no_probability_to_others(bert: tuple[Path, Any, Tokenizer]) -> None:
    """Nor does it make a vector, where a text has it."""
    trained = open_trained(bert[0], Mesh(), torch.device("cpu"))
    next(trained.model.parameters())[trained.tokenizer.id_of("dog")] = torch.nan
    with pytest.raises(CheckpointError, match="the model's logits of words are not finite"):
        fillings(trained, Mesh(), ["the [MASK]"], top=1)
    with pytest.raises(CheckpointError, match="the model's vectors of texts are not finite"):
        embeddings(trained, Mesh(), ["the cat", "dog"], batch_size=1)
    assert embeddings(trained, Mesh(), ["the cat"], batch_size=1)[0].isfinite().all(), "which has another word"


def test_vectors_have_the_length_of_one(bert: tuple[Path, Any, Tokenizer]) -> None:
    answer = in_fp64("embed", bert[0], "--text", "dog", "--text", "the cat")
    told = [json.loads(line) for line in answer.out.splitlines()]
    assert [each["text"] for each in told] == ["dog", "the cat"]
    assert [np.linalg.norm(each["vector"]) for each in told] == pytest.approx([1.0, 1.0], rel=1e-6)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["fill-mask", "--text", "no gap"], "has no [MASK]"),
        (["fill-mask", "--text", "[MASK] " + "dog " * 20], "the model reads 16"),
        (["fill-mask"], "neither --text nor --texts is given"),
        (["embed", "--texts", "gone.txt"], "gone.txt cannot be read"),
        (["embed", "--text", "dog", "--output", "vectors.txt"], "Use a name that ends so"),
    ],
    ids=str,
)
def test_mistakes_are_one_message(bert: tuple[Path, Any, Tokenizer], command: list[str], words: str) -> None:
    name, *arguments = command
    answer = here(name, bert[0], *arguments)
    assert (answer.status, answer.out) == (2, ""), answer
    assert words in " ".join(answer.err.split())


@pytest.mark.parametrize("command", ["fill-mask", "embed"])
def test_a_language_model_is_no_encoder(finished: Finished, command: str) -> None:
    answer = here(command, finished.folder, "--text", "[MASK]")
    assert answer.status == 2 and 'model.kind = "bert"' in answer.err, answer
