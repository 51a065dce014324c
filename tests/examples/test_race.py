"""Questions of RACE: both layouts, where an option stands in a question, and answers that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colonnade.corpus.documents import Rejected
from colonnade.errors import DataError
from colonnade.examples.format import Texts
from colonnade.examples.formats import FORMATS

OPTIONS = ["a dog", "a film", "a book", "a hill"]


def found(folder: Path, suffix: str, *asked: tuple[str, Any], passage: str = "A dog ran. ") -> list[Texts | Rejected]:
    """What is read of questions about one passage, each with its answer."""
    path = folder / f"rows{suffix}"
    if suffix == ".jsonl":
        rows = [{"article": passage, "question": each, "options": OPTIONS, "answer": answer} for each, answer in asked]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        questions, answers = ([each[place] for each in asked] for place in range(2))
        columns = {"questions": questions, "options": [OPTIONS] * len(asked), "answers": answers}
        path.write_text(json.dumps({"article": passage, **columns}))
    return list(FORMATS["race"].read(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_an_option_stands_in_the_gap_of_its_question_or_behind_it(suffix: str, tmp_path: Path) -> None:
    asked = (("It was _ .", "A"), ("What ran? ", "D"), ("What ran?", None), ("It was _ and _", "B"))
    gap, behind, unlabelled, gaps = found(tmp_path, suffix, *asked)
    filled, answered = ([text.format(option) for option in OPTIONS] for text in ("It was {} .", "What ran? {}"))
    assert gap == Texts(("A dog ran.", *filled), (0,))
    assert behind == Texts(("A dog ran.", *answered), (3,))
    assert unlabelled == Texts(("A dog ran.", *answered), ())
    assert gaps == Texts(("A dog ran.", *(f"It was {option} and {option}" for option in OPTIONS)), (1,))


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_half_a_surrogate_pair_is_told(suffix: str, tmp_path: Path) -> None:
    good, bad = found(tmp_path, suffix, ("What ran?", "B"), ("What \ud800?", "B"))
    assert isinstance(good, Texts) and isinstance(bad, Rejected) and bad.line == 2
    assert bad.reason.endswith("half a surrogate pair")


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_half_a_surrogate_pair_in_the_passage_is_told_with_each_question(suffix: str, tmp_path: Path) -> None:
    bad = found(tmp_path, suffix, ("What ran?", "B"), ("What else?", "B"), passage="A dog \ud800 ran.")
    assert [isinstance(each, Rejected) and each.reason.endswith("half a surrogate pair") for each in bad] == [True] * 2


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
@pytest.mark.parametrize("answer", ["", "BC", "E", "b", 1])
def test_an_answer_that_is_not_one_of_the_letters_is_told(answer: Any, suffix: str, tmp_path: Path) -> None:
    good, bad = found(tmp_path, suffix, ("What ran?", "B"), ("What ran?", answer))
    assert isinstance(good, Texts) and good.numbers == (1,)
    assert isinstance(bad, Rejected) and bad.line == 2
    assert bad.reason.endswith(f'answer "{answer}" is none of A, B, C, D')


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"article": " \n"}, "no text in article"),
        ({"article": None}, "no text in article"),
        ({"question": None}, "its question is no text"),
        ({"question": 7}, "its question is no text"),
        ({"options": "abcd"}, "its options are no list of texts"),
        ({"options": [*OPTIONS[:3], 4]}, "its options are no list of texts"),
        ({"options": OPTIONS[:3]}, "3 options, and every question of RACE has 4"),
        ({"options": [*OPTIONS, "a cat"]}, "5 options, and every question of RACE has 4"),
    ],
)
def test_a_question_that_is_none_is_told(suffix: str, change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path, row = tmp_path / f"rows{suffix}", {"article": "A dog.", "question": "What?", "options": OPTIONS, **change}
    content = (
        row
        if suffix == ".jsonl"
        else {"article": row["article"]}
        | {
            name: [row.get(name[:-1], row.get(name)), *more]
            for name, more in (("questions", ["Who?"]), ("options", [OPTIONS]), ("answers", ["A"]))
        }
    )
    path.write_text(json.dumps(content) + "\n")
    bad, *others = FORMATS["race"].read(path)
    assert isinstance(bad, Rejected) and (bad.file, bad.line) == (str(path), 1) and bad.reason.endswith(reason)
    assert (
        suffix == ".jsonl"
        or "article" in change
        or others == [Texts(("A dog.", *(f"Who? {option}" for option in OPTIONS)), (0,))]
    )


def test_white_space_around_texts_is_no_part_of_them(tmp_path: Path) -> None:
    row = {"article": "\nA dog. ", "question": " It _\t", "options": [" ran ", "sat\n", "ate", " slept"], "answer": "D"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (found,) = FORMATS["race"].read(tmp_path / "rows.jsonl")
    assert found == Texts(("A dog.", "It ran", "It sat", "It ate", "It slept"), (3,))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"article": "a", "questions": ["b"], "options": [], "answers": ["A"]}', "are not three lists of one length"),
        ('{"article": "a", "questions": ["b"], "options": [[]], "answers": "A"}', "are not three lists of one length"),
        ('{"data": [{"paragraphs": []}]}', "are not three lists of one length"),
        ("[]", "a file of RACE is one JSON object"),
    ],
)
def test_a_file_of_another_format_is_told_to_be_perhaps_one(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text(content)
    with pytest.raises(DataError, match=rf"{said}\. It may be of another format, or cut off: name the format"):
        list(FORMATS["race"].read(tmp_path / "dev.json"))
