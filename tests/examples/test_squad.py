"""SQuAD's files: questions, the tokens that answer them, windows, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.corpus.documents import Rejected
from colonnade.data.indexed import TokenFile
from colonnade.data.question_windows import CONTROL_TOKENS, Windows, most_context
from colonnade.data.sidecar import read_sidecar
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.errors import DataError
from colonnade.examples.formats import FORMATS, format_of
from colonnade.examples.make import make_examples
from colonnade.examples.squad import Question, may_have_none, questions_of, tokens_of
from tests.commands import here

CONTEXT = "The dog ran over\u00a0the h\u00edll; the book was good."  # í is a letter with an accent, of one character


def asked(question: str, *answers: tuple[str, int], name: str = "q1", **more: Any) -> dict[str, Any]:
    given = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": question, "answers": given, **more}


def squad_file(folder: Path, *qas: Mapping[str, Any], context: str = CONTEXT, version: str = "1.1") -> Path:
    content = {"version": version, "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]}
    path = folder / "squad.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("version", "is_2"),
    [("v2.0", True), ("2.0", True), ("2", True), ("1.1", False), ("2016-01-01", False), ("v20", False), ("", False)],
)
def test_a_file_of_2_is_known_by_its_version_or_its_questions(version: str, is_2: bool, tmp_path: Path) -> None:
    assert may_have_none(squad_file(tmp_path, asked("what ran?", ("dog", 4)), version=version)) == is_2
    assert may_have_none(squad_file(tmp_path, asked("what ran?", is_impossible=False), version=version))


@pytest.mark.parametrize(
    ("version", "more", "empty"),
    [
        ("v2.0", [("dog", 4)], ()),
        ("v2.0", [], None),
        ("1.1", [("dog", 4)], None),
    ],
)
def test_a_file_of_2_with_answers_says_by_an_empty_list_that_there_is_none(
    version: str, more: list[tuple[str, int]], empty: tuple[()] | None, tmp_path: Path
) -> None:
    """As the official script reads it, which looks at `answers` alone. Where all lists are empty it is a test set."""
    path = squad_file(tmp_path, asked("a film?", name="q0"), asked("what ran?", *more), version=version)
    first, second = questions_of(path)
    assert isinstance(first, Question) and first.answers == empty
    assert isinstance(second, Question) and second.answers == (tuple(more) or empty)
    assert ('write `"version": "v2.0"` into the file' in first.unsaid) == (version == "1.1")


def answered(prefix: Path, tokenizer: Tokenizer) -> list[str | None]:
    """The tokens that answer each question, as text."""
    file, found = TokenFile(prefix), list[str | None]()
    for document in range(file.num_documents):
        _, context, numbers = file.sequences(document)
        found.append(tokenizer.decode(context[numbers[0] : numbers[1]].tolist()) if len(numbers) else None)
    return found


def test_answers_become_tokens_of_their_context(tmp_path: Path, words: Tokenizer) -> None:
    path = squad_file(
        tmp_path,
        asked("what ran?", ("dog", 4)),
        asked("where?", ("the híll", 17), ("híll", 21)),  # the first counts
        asked("how was the book?", ("was good", 36)),
        asked("what?", ("o", 5)),  # a part of a token: the token
        asked("a film?", is_impossible=True, plausible_answers=[{"text": "book", "answer_start": 31}]),
        asked("a hill?", ("book", 31), is_impossible=True),
        {"id": "q6", "question": "of a test set?"},
        {"id": "q7", "question": "of another?", "answers": []},
        {"id": "q8", "question": "of 2.0?", "answers": [], "is_impossible": False},
    )
    report = make_examples(FORMATS["squad"], [path], tmp_path / "out", words)
    assert answered(tmp_path / "out", words) == ["dog", "the hill", "was good", "dog", "", "", None, None, ""]
    assert (report.examples, report.unlabelled, report.rejected) == (9, 2, 0)
    told = 'where an empty list of answers says that there is none, write `"version": "v2.0"` into the file'
    assert f"2 examples without a label ({told}): nothing can be trained" in report.summary()
    question, context, _ = TokenFile(tmp_path / "out").sequences(0)
    assert question.tolist() == words.encode("what ran?") and context.tolist() == words.encode(CONTEXT)
    sidecar = read_sidecar(TokenFile(tmp_path / "out"))
    assert sidecar is not None and sidecar.examples == FORMATS["squad"].fields
    assert sidecar.examples.options == {"doc_stride": 128, "max_query_length": 64}
    questions = [each for each in questions_of(path) if isinstance(each, Question)]
    assert sidecar.text_bytes == sum(len(each.text.encode()) + len(CONTEXT.encode()) for each in questions)


def test_an_id_may_be_a_number(tmp_path: Path) -> None:
    (found,) = questions_of(squad_file(tmp_path, {**asked("what ran?", ("dog", 4)), "id": 7}))
    assert isinstance(found, Question) and found.name == "7"


def test_a_folder_stands_for_the_files_in_it(tmp_path: Path, words: Tokenizer) -> None:
    """At any depth; what else has their ending is none."""
    (tmp_path / "all" / "more.json").mkdir(parents=True)
    for folder in (tmp_path / "all", tmp_path / "all" / "more.json"):
        squad_file(folder, asked("what ran?", ("dog", 4)))
    assert make_examples(FORMATS["squad"], [tmp_path / "all"], tmp_path / "out", words).examples == 2
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"none is a folder without \.json in it\. Name another"):
        make_examples(FORMATS["squad"], [tmp_path / "none"], tmp_path / "more", words)


def test_the_files_of_a_folder_come_by_name_whatever_the_disk_says(
    tmp_path: Path, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "bca":
        squad_file(tmp_path, asked(f"what {name}?", ("dog", 4))).rename(tmp_path / f"{name}.json")
    files = [tmp_path / f"{name}.json" for name in "bca"]
    monkeypatch.setattr(Path, "rglob", lambda folder, pattern: files)
    make_examples(FORMATS["squad"], [tmp_path], tmp_path / "out" / "all", words)
    sidecar = read_sidecar(TokenFile(tmp_path / "out" / "all"))
    assert sidecar is not None and sidecar.sources == tuple(map(str, sorted(files)))


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (
            asked("what?", ("cat", 4)),
            'question "q1": its answer "cat" is not in its context at character 4, where "dog"',
        ),
        (asked("what?", ("dog", 4), ("cat", 4)), 'its answer "cat" is not in its context at character 4'),
        (asked("what?", ("dog", 400)), 'is not in its context at character 400, where "" stands'),
        (asked("what?", ("dog", -3)), "is not in its context at character -3"),
        (asked("what?", (" ", 3)), 'its answer " " has no token'),
        (asked("what?") | {"answers": "dog"}, "its answers are no list of objects with text and answer_start"),
        (asked("what?") | {"answers": [{"text": "dog"}]}, "its answers are no list of objects"),
        (asked("what?") | {"answers": [{"answer_start": 4}]}, "its answers are no list of objects"),
        (asked("what?") | {"answers": [{"text": "h", "answer_start": True}]}, "its answers are no list of objects"),
        (asked("wh\ud800?", ("dog", 4)), "question 1: half a surrogate pair"),
        (asked("what?", ("dog", 4), name="\ud800"), "question 1: half a surrogate pair"),
        ({"question": "what?", "answers": []}, "question 1 has no id and text, but question, answers"),
    ],
)
def test_refuses_answers_that_are_none(question: dict[str, Any], reason: str, tmp_path: Path, words: Tokenizer) -> None:
    path = squad_file(tmp_path, question, asked("what ran?", ("dog", 4), name="q2"))
    report = make_examples(FORMATS["squad"], [path], tmp_path / "out", words)
    assert (report.examples, report.rejected) == (1, 1)
    assert report.longest == len(words.encode("what ran?")) + len(words.encode(CONTEXT)), "of text alone"
    assert report.first[0].file == str(path) and report.first[0].line == 1 and reason in report.first[0].reason


def test_an_answer_whose_place_is_no_number_of_a_token_file_is_left_out(tmp_path: Path, words: Tokenizer) -> None:
    """They are stored as tokens: below the size of the vocabulary. The other questions of the file stay."""
    size = words.vocab_size
    path = squad_file(
        tmp_path,
        asked("what?", ("dog", 4 * (size - 2)), name="q1"),
        asked("what?", ("dog", 4 * (size - 1)), name="q2"),
        context=" ".join(["dog"] * size),
    )
    report = make_examples(FORMATS["squad"], [path], tmp_path / "out", words)
    assert TokenFile(tmp_path / "out").sequences(0)[2].tolist() == [size - 2, size - 1]
    reason = (
        f'question "q2": its answer "dog" ends with token {size:,} of its context, and a token file of {size:,} ids'
    )
    assert (report.examples, report.rejected) == (1, 1)
    assert report.first[0] == Rejected(str(path), 2, f"{reason} stores numbers below that")


def test_each_question_that_is_refused_is_told_by_its_number(tmp_path: Path) -> None:
    """In the file, whatever paragraph it stands in."""
    good, bad = asked("what ran?", ("dog", 4)), asked("what?") | {"answers": "dog"}
    paragraphs = [{"context": CONTEXT, "qas": qas} for qas in ([good, bad], [], [bad, {}])]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs[:2]}, {"paragraphs": paragraphs[2:]}]}))
    _, *others = questions_of(path)
    assert all(isinstance(each, Rejected) for each in others)
    assert [each.line for each in others if isinstance(each, Rejected)] == [2, 3, 4]
    assert isinstance(others[-1], Rejected) and others[-1].reason == "question 4 has no id and text, but nothing"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [', "line 1: no JSON"),
        (
            '{"article": "a"}\n{"article": "b"}\n',
            "line 2: no JSON (Extra data). It may be of another format, or cut off: ",
        ),
        ('{"data": ' + "[" * 100_000 + "]" * 100_000 + "}", "no JSON (maximum recursion depth exceeded"),
        ('{"data": ' + "1" * 5000 + "}", "no JSON (Exceeds the limit"),
        (
            '{"data": ' + "1" * 5000 + "}",
            "). It may be of another format, or cut off: name the format that it has, or ",
        ),
        ("[]", "the file has no list of objects data"),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [3]}]}]}',
            "data[0].paragraphs[0] has no list of objects qas",
        ),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', "data[0].paragraphs[0] has no text in context"),
        ('{"data": []}', "no example of squad"),
    ],
)
def test_files_that_are_no_squad_are_refused(content: str, message: str, tmp_path: Path, words: Tokenizer) -> None:
    path = tmp_path / "dev.json"
    path.write_text(content)
    with pytest.raises(DataError) as refused:
        make_examples(FORMATS["squad"], [path], tmp_path / "out", words)
    assert message in str(refused.value) and str(path) in str(refused.value)
    assert not list(tmp_path.glob("out*"))


def test_an_output_that_would_replace_its_input_is_refused(
    tmp_path: Path, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The .json beside a token file is not the .json that is read, by whichever path each is named."""
    path = squad_file(tmp_path, asked("what ran?", ("dog", 4)))
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    for output in (tmp_path / "squad", Path("squad")):
        with pytest.raises(DataError, match=r"writes .*squad.json, which is read here"):
            make_examples(FORMATS["squad"], [path], output, words, overwrite=True)
        assert path.read_bytes() == before


def test_a_context_without_tokens_is_left_out(tmp_path: Path, words: Tokenizer) -> None:
    path = squad_file(tmp_path, asked("what?", is_impossible=True), context=" \n")
    with pytest.raises(DataError, match="its context has no token"):
        make_examples(FORMATS["squad"], [path], tmp_path / "out", words)


def test_the_command_takes_how_windows_are_cut(tmp_path: Path, words: Tokenizer) -> None:
    path = squad_file(tmp_path, asked("what ran over the hill yesterday?", ("dog", 4)))
    words.save(tmp_path / "tokenizer.json")
    made = ["data", "examples", "squad", path, "--output", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer.json"]
    answer = here(*made, "--doc-stride", "4", "--max-query-length", "3")
    assert answer.status == 0, answer
    file = TokenFile(tmp_path / "out")
    assert [len(each) for each in file.sequences(0)] == [3, len(words.encode(CONTEXT)), 2]
    sidecar = read_sidecar(file)
    assert sidecar is not None and sidecar.examples is not None
    assert sidecar.examples.options == {"doc_stride": 4, "max_query_length": 3}
    answer = here(*made, "--overwrite", "--doc-stride", "0")
    assert answer.status == 2 and "--doc-stride 0 leaves nothing to read" in answer.err
    with pytest.raises(DataError, match=r"--doc-stride: for questions about texts \(squad\), not for race"):
        format_of("race", words, windows={"doc_stride": 3})


def test_a_tokenizer_that_no_model_of_questions_has_is_told(tmp_path: Path, words: Tokenizer) -> None:
    """Only a BERT reads these examples; its control tokens stand around them."""
    path, bytes_alone = squad_file(tmp_path, asked("what ran?", ("dog", 4))), train_bpe([CONTEXT], 270)
    told = make_examples(FORMATS["squad"], [path], tmp_path / "bpe", bytes_alone).summary()
    assert "note: the tokenizer has no [CLS], [SEP], [PAD], which stand around the texts" in told
    assert "note:" not in make_examples(FORMATS["squad"], [path], tmp_path / "words", words).summary()


def test_windows_begin_a_stride_apart_and_end_with_the_text() -> None:
    """Room of 10 - 3 - 2 = 5 tokens."""
    assert Windows(2).ranges(2, 9, 10) == [range(5), range(2, 7), range(4, 9)]
    assert Windows(2).ranges(2, 8, 10) == [range(5), range(2, 7), range(4, 8)]
    assert Windows(128).ranges(2, 11, 10) == [range(5), range(5, 10), range(10, 11)]  # no token is left out
    assert Windows(2).ranges(2, 5, 10) == [range(5)]
    assert Windows(2).ranges(7, 5, 10) == []  # the question leaves no room


def test_answers_begin_where_most_text_is_around_them() -> None:
    """As run_squad.py's example: of "bought" in a window's end, at a window's beginning and in a middle, the middle."""
    windows = [range(5), range(3, 8), range(6, 9)]
    # token           0  1  2  3  4  5  6  7  8
    # in window 0     0  1  2  1  0              + 0.05
    # in window 1              0  1  2  1  0     + 0.05
    # in window 2                       0  1  0  + 0.03
    first, second, third = (each.tolist() for each in most_context(windows))
    assert first == [True, True, True, True, False]
    assert second == [False, True, True, True, False]
    assert third == [False, True, True]


@given(question=st.integers(0, 20), text=st.integers(1, 200), length=st.integers(4, 60), stride=st.integers(1, 70))
def test_windows_cover_the_text(question: int, text: int, length: int, stride: int) -> None:
    windows = Windows(stride)
    found = windows.ranges(question, text, length)
    assert len(found) == windows.counts(np.array([question]), np.array([text]), length)[0]
    if question + CONTROL_TOKENS >= length:
        assert not found
        return
    assert sorted({token for window in found for token in window}) == list(range(text))
    assert all(question + len(window) + CONTROL_TOKENS <= length for window in found)
    assert not any(set(window) <= set(found[0]) for window in found[1:]), "a window without a new token"
    begins = np.zeros(text, dtype=int)
    for window, begin in zip(found, most_context(found), strict=True):
        begins[window.start : window.stop] += begin
    assert (begins == 1).all()


def test_tokens_of_characters() -> None:
    places = np.array([[0, 3], [4, 6], [6, 8], [9, 12]])
    assert [tokens_of(places, *span) for span in ((0, 3), (4, 8), (5, 7), (3, 4), (7, 12))] == [
        range(1),
        range(1, 3),
        range(1, 3),
        range(1, 1),
        range(2, 4),
    ]


@pytest.mark.parametrize(
    ("name", "number", "impossible"), [("cs224n-dev-v2.0", 6078, 3168), ("xquad-en-v1.1", 1190, 0)]
)
def test_real_answers_come_back_from_their_tokens(
    name: str, number: int, impossible: int, shared: Path, tmp_path: Path
) -> None:
    """Text of the context at the characters of the tokens is the answer, or holds it where a token is longer."""
    tokenizer = Tokenizer.load(shared / "bert-vocab" / "vocab.txt")
    questions: Sequence[Any] = list(questions_of(shared / "squad" / f"{name}.json"))[: 1500 if number > 1500 else None]
    documents = list(FORMATS["squad"].encode(questions, tokenizer))
    longer = 0
    places = {each.context: None for each in questions}
    places = dict(zip(places, (found for _, found in tokenizer.encode_places(list(places))), strict=True))
    for question, document in zip(questions, documents, strict=True):
        first, stop = document.sequences[-1]
        if not question.answers:
            assert (first, stop) == (0, 0)
            continue
        at = places[question.context]
        said = question.context[at[first, 0] : at[stop - 1, 1]]
        assert question.answers[0].text.strip() in said
        longer += said != question.answers[0].text
    assert longer <= 0.02 * len(questions)
    assert len(list(questions_of(shared / "squad" / f"{name}.json"))) == number
