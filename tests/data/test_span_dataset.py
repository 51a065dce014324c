"""Questions as samples: windows, what answers point at, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colonnade.data.curriculum import Curriculum
from colonnade.data.example_dataset import PairTokens
from colonnade.data.indexed import TokenFile
from colonnade.data.sampler import AllEpochsOrder
from colonnade.data.sidecar import SPANS, ExampleFields, Sidecar
from colonnade.data.span_dataset import SpanDataset, SpanSamples, windows_of
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError
from tests.tasks.examples import write_examples
from tests.tasks.questions import write_questions


def opened(folder: Path, length: int, *, documents: range | None = None, vocab_size: int = 200) -> SpanDataset:
    tokenizer, file = Tokenizer.load(folder / "tokenizer.json"), TokenFile(folder / "squad")
    documents = documents or range(file.num_documents)
    return SpanDataset(file, documents, length, vocab_size=vocab_size, tokens=PairTokens.of(tokenizer))


@pytest.mark.parametrize("length", [10, 16, 64])
def test_every_answer_is_in_a_window_and_points_at_its_words(length: int, tmp_path: Path) -> None:
    """At three lengths of one file; of 64 every text is whole in one window."""
    folder = write_questions(tmp_path)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    asked = [
        each for text in json.loads((folder / "dev.json").read_text())["data"][0]["paragraphs"] for each in text["qas"]
    ]
    data = opened(folder, length)
    rows, found = data.rows(range(len(data))), dict[int, set[str]]()
    documents = np.searchsorted(data._first, np.arange(len(data)), side="right") - 1
    assert length < 64 or len(data) == len(asked)
    for row, document in enumerate(documents.tolist()):
        tokens, (first, last) = rows.tokens[row], rows.answers[row]
        assert tokens[0] == tokenizer.id_of("[CLS]") and tokens[rows.real[row].sum() - 1] == tokenizer.id_of("[SEP]")
        question = tokens[1 : np.flatnonzero(tokens == tokenizer.id_of("[SEP]"))[0]].tolist()
        assert question == tokenizer.encode(asked[document]["question"])[:3]
        if (first, last) != (0, 0):
            assert rows.types[row, first : last + 1].all(), "an answer is in the text"
            found.setdefault(document, set()).add(tokenizer.decode(tokens[first : last + 1].tolist()))
    for document, question in enumerate(asked):
        expected = {each["text"] for each in question["answers"]}
        got = found.get(document, set())
        assert got == expected or (length == 10 and not got), "an answer may be cut where windows are short"
    assert length > 10 or found


def test_an_answer_outside_of_the_window_points_at_the_first_position(tmp_path: Path) -> None:
    data = opened(write_questions(tmp_path), 10)
    answers = data.rows(range(len(data))).answers
    nothing = (answers == 0).all(1)
    assert 0 < nothing.sum() < len(data) and ((answers > 0).all(1) == ~nothing).all()


def test_parts_and_orders_of_a_file(tmp_path: Path) -> None:
    folder = write_questions(tmp_path)
    whole, first, second = (
        opened(folder, 10),
        opened(folder, 10, documents=range(4)),
        opened(folder, 10, documents=range(4, 11)),
    )
    assert len(first) + len(second) == len(whole)
    both = np.concatenate([first.rows(range(len(first))).tokens, second.rows(range(len(second))).tokens])
    np.testing.assert_array_equal(both, whole.rows(range(len(whole))).tokens)
    assert whole.passes([0, len(whole)]).epochs.tolist() == [0, 1]


def test_windows_come_in_the_order_that_is_given(tmp_path: Path) -> None:
    folder = write_questions(tmp_path)
    plain, tokens = opened(folder, 10), PairTokens.of(Tokenizer.load(folder / "tokenizer.json"))
    order = AllEpochsOrder(len(plain), 2, seed=3)
    mixed = SpanDataset(plain.file, plain.documents, 10, vocab_size=200, tokens=tokens, order=order)
    expected = plain.rows(order.samples(np.arange(20))).tokens
    np.testing.assert_array_equal(mixed.rows(range(20)).tokens, expected)
    assert mixed.passes([2 * len(plain) - 1]).epochs.tolist() == [0]


def test_phases_cut_windows_at_their_own_length(tmp_path: Path) -> None:
    folder = write_questions(tmp_path)
    made = SpanSamples(PairTokens.of(Tokenizer.load(folder / "tokenizer.json")))
    data = made.training(lambda length: opened(folder, length), Curriculum([0, 64], [16, 32], [2, 2]))
    assert data.rows([0]).tokens.shape == (1, 16) and data.rows([4]).tokens.shape == (1, 32)


def test_what_is_refused(tmp_path: Path) -> None:
    folder = write_questions(tmp_path)
    with pytest.raises(
        DataError, match=r"question of \d tokens?, and a sequence of 5 leaves no room .* curriculum\.seq_length\) of 7"
    ):
        opened(folder, 5)
    with pytest.raises(DataError, match=r"document .* has token id"):
        rows = opened(folder, 16, vocab_size=8)
        rows.rows(range(len(rows)))
    write_examples(folder, ("mnli",))
    with pytest.raises(
        DataError, match=r'examples of mnli, for model.head = "classification", and model.head is "spans"'
    ):
        windows_of(TokenFile(folder / "mnli"))


def test_the_length_that_is_advised_is_enough_for_the_longest_question(tmp_path: Path) -> None:
    """Not for the first that is too long alone."""
    folder = write_questions(tmp_path)
    file = TokenFile(folder / "squad")
    lengths = np.array([file.lengths[start] for start in file.boundaries[:-1]])
    first = int(np.flatnonzero(np.diff(lengths) > 0)[0])  # which the next one exceeds
    pair = range(first, first + 2)
    with pytest.raises(DataError, match=r"leaves no room") as refused:
        opened(folder, int(lengths[first]) + 3, documents=pair)
    advised = int(re.findall(r"(\d+) or more", str(refused.value))[0])
    assert len(opened(folder, advised, documents=pair)) > 0
    with pytest.raises(DataError, match=r"leaves no room"):
        opened(folder, advised - 1, documents=pair)


def test_windows_that_would_never_end_are_refused(tmp_path: Path) -> None:
    """Where the file that says how they are cut was written by hand."""
    folder = write_questions(tmp_path)
    content = json.loads((folder / "squad.json").read_text())
    content["examples"]["options"]["doc_stride"] = 0
    (folder / "squad.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="--doc-stride 0 leaves nothing to read"):
        opened(folder, 10)


def test_questions_without_a_word_on_their_answer_are_refused(tmp_path: Path) -> None:
    folder = write_questions(tmp_path)
    content = json.loads((folder / "dev.json").read_text())
    del content["data"][0]["paragraphs"][1]["qas"][0]["answers"]
    (folder / "dev.json").write_text(json.dumps(content))
    from colonnade.examples.formats import FORMATS
    from colonnade.examples.make import make_examples

    make_examples(
        FORMATS["squad"],
        [folder / "dev.json"],
        folder / "squad",
        Tokenizer.load(folder / "tokenizer.json"),
        overwrite=True,
    )
    with pytest.raises(DataError, match=r"has 1 question without an answer .* the first is document 1"):
        opened(folder, 16)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    folder = write_questions(tmp_path)
    file = TokenFile(folder / "squad")
    numbers = np.fromfile(folder / "squad.bin", dtype=file.dtype)
    numbers[file.document_start(1) - 1] = 150  # behind the text
    numbers.tofile(folder / "squad.bin")
    data = opened(folder, 16)
    with pytest.raises(DataError, match="document 0 is answered by tokens"):
        data.rows([0])


def made(
    folder: Path,
    *documents: tuple[int, int, Sequence[int]],
    first: int = 0,
    head: str = SPANS,
    options: dict[str, Any] | None = None,
    vocab_size: int = 100,
) -> SpanDataset:
    """Of documents with so many tokens of question and of text, and these numbers; opened from the `first` on."""
    fields = ExampleFields("made", head, ("question", "context"), options=options or {})
    with TokenFileWriter(folder / "made", np.dtype("<i4")) as writer:
        for question, text, numbers in documents:
            writer.add_document([*range(question), *[7] * text, *numbers], lengths=[question, text, len(numbers)])
        writer.close(Sidecar("0" * 64, 100, None, len(documents), writer.num_tokens, 0, (), examples=fields))
    tokens = PairTokens(classify=90, separate=91, pad=99)
    file = TokenFile(folder / "made")
    return SpanDataset(file, range(first, len(documents)), 8, vocab_size=vocab_size, tokens=tokens)


def test_an_answer_may_be_a_text_from_its_first_token_to_its_last(tmp_path: Path) -> None:
    rows = made(tmp_path, (2, 3, (0, 3)), (2, 3, (0, 1)), (2, 3, (2, 3)), (2, 3, (0, 0))).rows(range(4))
    assert rows.answers.tolist() == [[4, 6], [4, 4], [6, 6], [0, 0]]


def test_the_places_of_an_answer_are_no_tokens(tmp_path: Path) -> None:
    """They may be larger than any id of the vocabulary."""
    data = made(tmp_path, (2, 200, (150, 151)), options={"doc_stride": 1})
    answers = data.rows(range(len(data))).answers
    assert (answers > 0).all(axis=1).sum() == 3, "of windows of three tokens, those that hold the token"


def test_a_text_with_a_token_that_the_vocabulary_has_not_is_refused_behind_a_question_without_one(
    tmp_path: Path,
) -> None:
    """The text is of sevens."""
    assert len(made(tmp_path, (2, 3, (0, 1)), vocab_size=8).rows([0]).tokens) == 1
    with pytest.raises(DataError, match="document 0 has token id 7 at its position 2, but the vocabulary has 7 ids"):
        made(tmp_path, (2, 3, (0, 1)), vocab_size=7).rows([0])


@pytest.mark.parametrize("numbers", [(2, 1), (-1, 1), (0, 4)])
def test_answers_that_no_text_has_are_refused(tmp_path: Path, numbers: tuple[int, int]) -> None:
    with pytest.raises(DataError, match=f"document 0 is answered by tokens {numbers[0]} to {numbers[1]} of 3"):
        made(tmp_path, (2, 3, numbers)).rows([0])


def test_the_first_document_that_cannot_be_used_is_told_by_its_number_in_the_file(tmp_path: Path) -> None:
    sound = (2, 3, (0, 1))
    with pytest.raises(DataError, match=r"has 1 question without an answer .* the first is document 2:"):
        made(tmp_path, sound, sound, (2, 3, (1,)), first=1)
    with pytest.raises(DataError, match="document 2 has a question of 5 tokens, and a sequence of 8 leaves no room"):
        made(tmp_path, sound, sound, (5, 3, (0, 1)), first=1)
    made(tmp_path, sound, sound)
    with TokenFileWriter(tmp_path / "made", np.dtype("<i4")) as writer:
        for lengths in ([2, 3, 2], [2, 3, 2], [2, 5]):
            writer.add_document([0] * 7, lengths=lengths)
        fields = ExampleFields("made", SPANS, ("question", "context"))
        writer.close(Sidecar("0" * 64, 100, None, 3, 21, 0, (), examples=fields))
    tokens = PairTokens(classify=90, separate=91, pad=99)
    with pytest.raises(DataError, match="document 2 is no question: it has 2 sequences, and not question, context and"):
        SpanDataset(TokenFile(tmp_path / "made"), range(1, 3), 8, vocab_size=100, tokens=tokens)


def test_files_that_do_not_say_how_windows_are_cut_are_refused(tmp_path: Path) -> None:
    for options in ({"doc_stride": "many"}, {"stride": 3}, {"doc_stride": None}, {"doc_stride": float("inf")}):
        with pytest.raises(DataError, match=r"made\.json does not say how windows are cut"):
            made(tmp_path, (2, 3, (0, 1)), options=options)
    with pytest.raises(DataError, match=r'for model\.head = "choice", and model\.head is "spans"'):
        made(tmp_path, (2, 3, (0, 1)), head="choice")
