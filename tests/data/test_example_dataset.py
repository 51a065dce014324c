"""Examples as samples: control tokens, types, truncation as in Hugging Face `tokenizers`, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.load import load
from colonnade.data.bert_dataset import PairSamples
from colonnade.data.datasets import SampleKind
from colonnade.data.example_dataset import (
    ExampleDataset,
    PairTokens,
    Reading,
    cut_longest_first,
    example_samples_of,
    fields_of,
)
from colonnade.data.gpt_dataset import TextSamples
from colonnade.data.indexed import TokenFile, smallest_dtype
from colonnade.data.remote import open_token_file
from colonnade.data.sampler import AllEpochsOrder, EpochOrder
from colonnade.data.sidecar import ExampleFields, Sidecar
from colonnade.data.t5_dataset import SpanSamples
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import ConfigError, DataError
from colonnade.train.corpus import open_corpus
from tests.tasks.examples import vocabulary, write_config, write_examples

PAIR = PairTokens(classify=90, separate=91, pad=99)


def file_of(
    folder: Path, documents: Sequence[Sequence[Sequence[int]]], fields: ExampleFields, *, vocab_size: int = 100
) -> TokenFile:
    with TokenFileWriter(folder / "made", smallest_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add_document(
                [token for part in document for token in part], lengths=[len(part) for part in document]
            )
        tokens = sum(len(part) for document in documents for part in document)
        writer.close(Sidecar("0" * 64, vocab_size, None, len(documents), tokens, 0, (), examples=fields))
    return TokenFile(folder / "made")


LABELS = ExampleFields("mnli", "classification", ("text_a", "text_b"), ("x", "y", "z"))
CHOICE = ExampleFields("race", "choice", ("passage", "option A", "option B"))
SCORE = ExampleFields("stsb", "classification", ("text_a", "text_b"), (), 1000)


def dataset(
    folder: Path, documents: Sequence[Sequence[Sequence[int]]], fields: ExampleFields, labels: int, length: int = 8,
    *, labelled: bool = True,
) -> ExampleDataset:  # fmt: skip
    file, reading = file_of(folder, documents, fields), Reading(PAIR, fields.head, labels, labelled)
    return ExampleDataset(file, range(file.num_documents), length, vocab_size=100, reading=reading)


def test_two_texts_and_a_label(tmp_path: Path) -> None:
    rows = dataset(tmp_path, [[[1, 2], [3], [2]], [[], [3, 4], [0]]], LABELS, 3).rows([0, 1])
    assert rows.tokens.tolist() == [[[90, 1, 2, 91, 3, 91, 99, 99]], [[90, 91, 3, 4, 91, 99, 99, 99]]]
    assert rows.types.tolist() == [[[0, 0, 0, 0, 1, 1, 0, 0]], [[0, 0, 1, 1, 1, 0, 0, 0]]]
    assert rows.real.sum(-1).tolist() == [[6], [5]] and rows.targets.tolist() == [2.0, 0.0]


def test_a_part_has_the_tokens_of_its_own_documents(tmp_path: Path) -> None:
    file = file_of(tmp_path, [[[1, 2], [3], [2]], [[4], [5], [0]], [[6, 7, 8], [9], [1]]], LABELS)
    parts = [
        ExampleDataset(file, part, 8, vocab_size=100, reading=Reading(PAIR, LABELS.head, 3, labelled=True))
        for part in (range(1), range(1, 3), range(3))
    ]
    assert [(len(part), part.num_tokens) for part in parts] == [(1, 4), (2, 8), (3, 12)]
    assert [part.rows([len(part) - 1]).tokens[0, 0, :5].tolist() for part in parts] == [
        [90, 1, 2, 91, 3], [90, 6, 7, 8, 91], [90, 6, 7, 8, 91]
    ]  # fmt: skip
    assert parts[1].rows([0, 1]).targets.tolist() == [0.0, 1.0]


def test_sequences_without_room_for_two_texts(tmp_path: Path) -> None:
    """They may be those of a phase, so that no one key is named for them."""
    said = r"^sequences of 7 tokens leave no room .* Use a model\.seq_length \(.* each curriculum\.seq_length\) of 8 or"
    with pytest.raises(DataError, match=said):
        dataset(tmp_path, [([11, 12], [21, 22], [0])], LABELS, 3, length=7)


def test_one_text(tmp_path: Path) -> None:
    fields = ExampleFields("sst2", "classification", ("text_a",), ("x", "y"))
    rows = dataset(tmp_path, [[list(range(9)), [1]]], fields, 2).rows([0])
    assert rows.tokens.tolist() == [[[90, 0, 1, 2, 3, 4, 5, 91]]] and not rows.types.any()


def test_choices_stand_with_the_passage(tmp_path: Path) -> None:
    rows = dataset(tmp_path, [[[1, 2], [3], [4, 5], [1]]], CHOICE, 2).rows([0])
    assert rows.tokens.tolist() == [[[90, 1, 2, 91, 3, 91, 99, 99], [90, 1, 2, 91, 4, 5, 91, 99]]]
    assert rows.targets.tolist() == [1.0]


def test_scores_come_back_from_thousandths(tmp_path: Path) -> None:
    fields = ExampleFields("stsb", "classification", ("text_a", "text_b"), (), 20)
    assert dataset(tmp_path, [[[1], [2], [76]]], fields, 1).rows([0]).targets.tolist() == [3.8]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(8, 40))
def test_texts_are_cut_as_tokenizers_cuts_them(first: int, second: int, length: int) -> None:
    words = {f"w{number}": number for number in range(100)} | {"[UNK]": 100}
    theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    theirs.enable_truncation(length - 3, strategy="longest_first")
    texts = [" ".join(f"w{number}" for number in range(count)) for count in (first, second)]
    expected = theirs.encode(*texts).ids
    cut = cut_longest_first(np.arange(first), np.arange(second), length - 3)
    assert np.concatenate(cut).tolist() == expected


@pytest.mark.parametrize(
    ("document", "fields", "labels", "said"),
    [
        ([[1], [2], [3]], LABELS, 3, r"document 0 has label 3, and model.num_labels = 3 has 0 to 2"),
        ([[1], [2], []], LABELS, 3, "1 example without a label"),
        ([[1], [2], [1]], LABELS, 2, r"3 labels: x, y, z, and model.num_labels = 2"),
        ([[1], [2], [1]], SCORE, 2, r"scores, and no labels.*Set model.num_labels = 1"),
        ([[1], [2], [2]], replace(LABELS, labels=("x", "y")), 2, r"label 2, and model.num_labels = 2 has 0 to 1"),
        ([[1], [2], [3], [2]], CHOICE, 2, "label 2"),
        ([[1], [2], [3], [0]], CHOICE, 4, "2 texts to choose from.*Set model.num_labels = 2"),
    ],
)
def test_labels_that_do_not_fit(
    document: list[list[int]], fields: ExampleFields, labels: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=said):
        dataset(tmp_path, [document], fields, labels)


def test_options_of_another_number_and_unknown_tokens_are_told_when_they_are_read(tmp_path: Path) -> None:
    made = dataset(tmp_path, [[[1], [2], [3], [0]], [[1], [2], [0]]], CHOICE, 2)
    assert len(made.rows([0]).tokens) == 1
    with pytest.raises(DataError, match=r"document 1 has 3 sequences, and an example of race has 4"):
        made.rows([1])
    with pytest.raises(DataError, match=r"document 0 has token id 100"):
        dataset(tmp_path, [[[1], [100], [0]]], LABELS, 3).rows([0])
    with pytest.raises(DataError, match=r"document 1 has token id 101 at its position 1,"):
        dataset(tmp_path, [[[1], [2], [0]], [[1], [101], [0]]], LABELS, 3).rows([1])


def test_examples_without_labels_can_be_read_where_none_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"document 2 has label 3, and model.num_labels = 3 has 0 to 2"):
        dataset(tmp_path, [[[1], [2], []], [[1], [2], [0]], [[1], [2], [3]]], LABELS, 3, labelled=False)
    some = dataset(tmp_path, [[[1], [2], []], [[1], [2], [1]]], LABELS, 3, labelled=False).rows([0, 1]).targets
    assert np.isnan(some[0]) and some[1] == 1, "where there is a label, it is read"


def test_scores_are_no_tokens(tmp_path: Path) -> None:
    """They may be larger than any id of the vocabulary."""
    assert dataset(tmp_path, [[[1], [2], [3800]]], SCORE, 1).rows([0]).targets.tolist() == [3.8]


def test_the_first_example_without_a_label_is_told_by_its_number_in_the_file(tmp_path: Path) -> None:
    file = file_of(tmp_path, [[[1], [2], [0]], [[1], [2], [0]], [[1], [2], []]], LABELS)
    with pytest.raises(DataError, match="1 example without a label, the first is document 2:"):
        ExampleDataset(file, range(1, 3), 8, vocab_size=100, reading=Reading(PAIR, LABELS.head, 3))


def test_labels_of_a_file_at_a_url_are_looked_at_when_they_are_read(tmp_path: Path) -> None:
    """Each look would be a request."""
    file_of(tmp_path, [[[1], [2], [2]], [[1], [2], [3]], [[1], [2], []]], LABELS)
    file = open_token_file(f"file://{tmp_path}/made", cache=str(tmp_path / "cache"))
    made = ExampleDataset(file, range(3), 8, vocab_size=100, reading=Reading(PAIR, LABELS.head, 3))
    assert made.rows([0]).targets.tolist() == [2]
    with pytest.raises(DataError, match=r"document 1 has label 3, and model.num_labels = 3 has 0 to 2"):
        made.rows([1])
    with pytest.raises(DataError, match="1 example without a label, the first is document 2:"):
        made.rows([2])


def test_a_choice_that_there_is_not_is_told_when_it_is_read_from_a_url(tmp_path: Path) -> None:
    """Of two options as of more."""
    file_of(tmp_path, [[[1], [2], [3], [1]], [[1], [2], [3], [2]]], CHOICE)
    file = open_token_file(f"file://{tmp_path}/made", cache=str(tmp_path / "cache"))
    made = ExampleDataset(file, range(2), 8, vocab_size=100, reading=Reading(PAIR, "choice", 2))
    assert made.rows([0]).targets.tolist() == [1]
    with pytest.raises(DataError, match=r"document 1 has label 2, and model.num_labels = 2 has 0 to 1"):
        made.rows([1])


def test_a_file_of_text_is_told_from_one_that_does_not_say_what_it_holds(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "made", smallest_dtype(100)) as writer:
        writer.add_document([1, 2, 3])
        writer.close(Sidecar("0" * 64, 100, None, 1, 3, 0, ()))
    with pytest.raises(DataError, match=r"made holds text, as its \.json says, and not examples of a task"):
        fields_of(TokenFile(tmp_path / "made"))


def with_names(*names: str) -> Tokenizer:
    """A vocabulary of these names alone, whose ids are their places."""
    words = {name: number for number, name in enumerate(names)}
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, names[-1])))


def test_control_tokens_are_found_by_their_names() -> None:
    """Whichever stands first in the vocabulary."""
    assert PairTokens.of(with_names("[SEP]", "[PAD]", "[CLS]")) == PairTokens(classify=2, separate=0, pad=1)
    assert PairTokens.of(with_names("[CLS]", "[PAD]", "[SEP]")) == PairTokens(classify=0, separate=2, pad=1)


@pytest.mark.parametrize("missing", ["[CLS]", "[SEP]", "[PAD]"])
def test_a_vocabulary_that_lacks_a_control_token_is_refused(missing: str) -> None:
    with pytest.raises(DataError, match=rf"the tokenizer has no {re.escape(missing)}, which stand around the texts"):
        PairTokens.of(with_names(*(name for name in ("[CLS]", "[SEP]", "[PAD]", "word") if name != missing)))


def test_texts_between_control_tokens_need_a_tokenizer_that_is_known(examples: Path, tmp_path: Path) -> None:
    config = load(write_config(examples, "mnli", tmp_path))
    with pytest.raises(DataError, match=r'model\.head = "classification" .* data\.tokenizer is not set: which ids'):
        example_samples_of(config, None)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("examples"))


@pytest.mark.parametrize(
    ("task", "overrides", "said"),
    [
        ("mnli", ["model.head=choice"], r"model.head = .classification., and model.head is .choice."),
        ("race", ["model.head=classification"], r"Set model.head = .choice."),
        ("mnli", ["model.num_labels=2"], "Set model.num_labels = 3"),
        ("mnli", ["data.validation={folder}/race"], "examples of race"),
        ("mnli", ["data.validation={folder}/nothing"], "nothing"),
        ("mnli", ["data.train={folder}/plain"], "no .json beside it"),
    ],
)
def test_files_that_do_not_fit_the_head(
    task: str, overrides: list[str], said: str, examples: Path, tmp_path: Path
) -> None:
    with TokenFileWriter(examples / "plain", smallest_dtype(100)) as writer:
        writer.add_document([1, 2, 3])
    config = load(write_config(examples, task, tmp_path), [each.format(folder=examples) for each in overrides])
    with pytest.raises(DataError, match=said):
        open_corpus(config)


def test_another_tokenizer(examples: Path, tmp_path: Path) -> None:
    other = vocabulary(tmp_path / "other")
    assert isinstance(other, Tokenizer)
    from colonnade.data.wordpiece import train_wordpiece

    Tokenizer(train_wordpiece(lambda: ["another text of words"], 60, min_frequency=1)).save(tmp_path / "other.json")
    config = load(write_config(examples, "mnli", tmp_path), [f"data.tokenizer={tmp_path / 'other.json'}"])
    with pytest.raises((DataError, ConfigError), match="another tokenizer"):
        open_corpus(config)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.head=pretraining"], "model.num_labels = 3 has no effect"),
        (["model.head=choice", "model.num_labels=1"], "needs 2 or more"),
        (["model.kind=gpt"], 'model.head = "classification" is for model.kind = "bert"'),
        (["data.masking.share=0.2"], "no effect with model.head"),
    ],
)
def test_keys_that_do_not_go_together(overrides: list[str], said: str, examples: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load(write_config(examples, "mnli", tmp_path), overrides)


@pytest.mark.parametrize("kind", ["gpt", "bert", "t5"])
def test_examples_with_numbers_are_no_text_to_train_on(tmp_path: Path, kind: str) -> None:
    """A label among the tokens would be read as a word."""
    write_examples(tmp_path, ["mnli"])
    file, unread = TokenFile(str(tmp_path / "mnli")), cast(Any, None)  # it is refused before these are needed
    samples: dict[str, SampleKind] = {
        "gpt": TextSamples(),
        "bert": PairSamples(unread, 1, unread),
        "t5": SpanSamples(unread, 8, 1),
    }
    with pytest.raises(DataError, match=r'holds examples of mnli.*Set model.head = "classification"'):
        samples[kind].dataset(file, range(file.num_documents), 16, vocab_size=200)


def test_passes_are_those_of_the_order(tmp_path: Path) -> None:
    """Epochs that are shuffled as one are one pass, as a language model's are."""
    tokenizer = Tokenizer.load(write_examples(tmp_path, ["mnli"], number=5) / "tokenizer.json")
    file, reading = TokenFile(str(tmp_path / "mnli")), Reading(PairTokens.of(tokenizer), "classification", 3)
    for order, epochs in ((EpochOrder(5, 1), [0, 0, 1, 2]), (AllEpochsOrder(5, 3, 1), [0, 0, 0, 0])):
        dataset = ExampleDataset(file, range(5), 16, vocab_size=tokenizer.vocab_size, reading=reading, order=order)
        passes = dataset.passes([0, 4, 5, 14])
        assert (passes.sets.tolist(), passes.epochs.tolist()) == ([0] * 4, epochs)
