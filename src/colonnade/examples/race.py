"""RACE: a passage, questions about it, and four options each, one of which is right (Lai et al., 2017).

    middle/*.txt, high/*.txt   the official layout: a JSON object a file, with article, questions, options, answers
    .jsonl                     a question a line: article, question, options, answer

An example's fields are the passage and, for each option, the question with it: in the place of a gap ("_"), or behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from colonnade.corpus.documents import Rejected
from colonnade.data.sidecar import ExampleFields
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.examples.format import Document, Texts, encode_texts
from colonnade.examples.rows import NOT_THIS, json_rows, unwritable, whole_json

OPTIONS = 4
_LETTERS = "ABCD"


class RaceFormat:
    """`Format` of RACE."""

    suffixes = (".txt", ".jsonl")

    @property
    def fields(self) -> ExampleFields:
        options = tuple(f"option {letter}" for letter in _LETTERS)
        return ExampleFields("race", "choice", ("passage", *options))

    def read(self, path: Path) -> Iterator[Texts | Rejected]:
        if path.suffix == ".jsonl":
            for row in json_rows(path):
                if isinstance(row, Rejected):
                    yield row
                else:
                    found = _example(row.values, *(row.values.get(key) for key in ("question", "options", "answer")))
                    yield row.rejected(found) if isinstance(found, str) else found
            return
        content = whole_json(path)
        if not isinstance(content, dict):
            raise DataError(f"{path} holds {type(content).__name__}, and a file of RACE is one JSON object. {NOT_THIS}")
        columns = [content.get(key) for key in ("questions", "options", "answers")]
        if not all(isinstance(column, list) and len(column) == len(columns[0] or []) for column in columns):
            raise DataError(f"{path}: questions, options and answers are not three lists of one length. {NOT_THIS}")
        for number, each in enumerate(zip(*(column or [] for column in columns), strict=True), 1):
            found = unwritable([content.get("article"), *each]) or _example(content, *each)
            yield Rejected(str(path), number, f"question {number}: {found}") if isinstance(found, str) else found

    def encode(self, examples: Sequence[Texts], tokenizer: Tokenizer) -> Iterable[Document]:
        return encode_texts(examples, tokenizer)


def _example(content: Mapping[str, Any], question: Any, options: Any, answer: Any) -> Texts | str:
    """An example, or why it is none."""
    passage = content.get("article")
    if not isinstance(passage, str) or not passage.strip():
        return "no text in article"
    if not isinstance(question, str):
        return "its question is no text"
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        return "its options are no list of texts"
    if len(options) != OPTIONS:
        return f"{len(options)} options, and every question of RACE has {OPTIONS}"
    if answer is not None and (not isinstance(answer, str) or answer not in _LETTERS or len(answer) != 1):
        return f'answer "{answer}" is none of {", ".join(_LETTERS)}'
    texts = (passage.strip(), *(_with_option(question.strip(), option.strip()) for option in options))
    return Texts(texts, () if answer is None else (_LETTERS.index(answer),))


def _with_option(question: str, option: str) -> str:
    return question.replace("_", option) if "_" in question else f"{question} {option}"
