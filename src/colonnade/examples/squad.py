"""SQuAD: questions about a text, each answered by a run of its words, or in 2.0 by nothing.

    {"version": "v2.0", "data": [{"title": …, "paragraphs": [{"context": …, "qas": [
        {"id": …, "question": …, "answers": [{"text": …, "answer_start": …}], "is_impossible": false}]}]}]}

A document is a question with all of its text; the windows in which a model reads it are cut when samples are made
(`data/span_dataset.py`), because they depend on their length. Its numbers are the tokens of the text that answer it:
the first, and the one behind the last; 0, 0 where nothing does; none in a file without answers. Of several answers the
first is taken, as the published scripts do.

Source: Rajpurkar et al., "SQuAD", 2016; "Know What You Don't Know", 2018.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from colonnade.corpus.documents import Rejected
from colonnade.data.question_windows import Integers, Windows
from colonnade.data.sidecar import SPANS, ExampleFields
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.examples.format import Document
from colonnade.examples.rows import unwritable, whole_json


class Given(NamedTuple):
    """A right answer."""

    text: str
    start: int
    """[characters] Where it begins in the context."""


@dataclass(frozen=True)
class Question:
    """One question, as it stands in a file."""

    file: Path
    number: int
    """In the file, from 1."""
    name: str
    """Its id."""
    text: str
    context: str
    answers: tuple[Given, ...] | None
    """Right answers; none: it has no answer; None: the file does not say."""
    unsaid: str = field(default="", compare=False)
    """How the file could say it, where its list of answers is empty."""

    def rejected(self, reason: str) -> Rejected:
        """Why it is no example."""
        return Rejected(str(self.file), self.number, f'question "{self.name}": {reason}')


@dataclass(frozen=True)
class SquadFormat:
    """`Format` of SQuAD 1.1 and 2.0."""

    windows: Windows = field(default_factory=Windows)
    suffixes: tuple[str, ...] = (".json",)

    @property
    def fields(self) -> ExampleFields:
        options = {"doc_stride": self.windows.doc_stride, "max_query_length": self.windows.max_query_length}
        return ExampleFields("squad", SPANS, ("question", "context"), options=options)

    def read(self, path: Path) -> Iterator[Question | Rejected]:
        return questions_of(path)

    def encode(self, examples: Sequence[Question], tokenizer: Tokenizer) -> Iterator[Document | Rejected]:
        questions = tokenizer.encode_batch([each.text for each in examples])
        contexts = list(dict.fromkeys(each.context for each in examples))  # several questions have one
        encoded = dict(zip(contexts, tokenizer.encode_places(contexts), strict=True))
        for example, question in zip(examples, questions, strict=True):
            ids, places = encoded[example.context]
            numbers = _numbers(example, places, tokenizer.vocab_size) if ids else "its context has no token"
            if isinstance(numbers, str):
                yield example.rejected(numbers)
                continue
            text_bytes = len(example.text.encode()) + len(example.context.encode())
            sequences = [question[: self.windows.max_query_length], ids, numbers]
            yield Document(sequences, text_bytes, unlabelled=example.unsaid)


def _numbers(example: Question, places: Integers, vocab_size: int) -> tuple[int, ...] | str:
    """The tokens that answer, or why there are none that can be stored."""
    if example.answers is None:
        return ()
    if not example.answers:
        return (0, 0)
    for text, start in example.answers:
        if start < 0 or example.context[start : start + len(text)] != text:
            there = example.context[max(start, 0) : max(start + len(text), 0)]
            return f'its answer "{text}" is not in its context at character {start:,}, where "{there}" stands'
    text, start = example.answers[0]
    found = tokens_of(places, start, start + len(text))
    if not found:
        return f'its answer "{text}" has no token'
    if found.stop >= vocab_size:
        ends = f'its answer "{text}" ends with token {found.stop:,} of its context'
        return f"{ends}, and a token file of {vocab_size:,} ids stores numbers below that"
    return found.start, found.stop


def tokens_of(places: Integers, start: int, stop: int) -> range:
    """The tokens that have characters `start … stop`, wholly or in part, given those [n, 2] of each."""
    return range(
        int(np.searchsorted(places[:, 1], start, side="right")), int(np.searchsorted(places[:, 0], stop, side="left"))
    )


def questions_of(path: Path) -> Iterator[Question | Rejected]:
    """The questions of a file, in order. DataError where it is no SQuAD, with the place that is not."""
    content = whole_json(path)
    found = list(_asked(path, content))
    has_answers = any(asked.get("answers") for _, asked in found)
    says_none = has_answers and _is_2(content)
    for number, (context, asked) in enumerate(found, 1):
        question = _question(path, number, context, asked, empty=() if says_none else None)
        if isinstance(question, Question) and question.answers is None and asked.get("answers") == [] and has_answers:
            question = replace(question, unsaid=_SAY_NONE)
        yield question


_SAY_NONE = 'where an empty list of answers says that there is none, write `"version": "v2.0"` into the file'


def _asked(path: Path, content: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The questions as they are written, each behind its context."""
    for place, article in _items(path, content, "data", "the file"):
        for at, paragraph in _items(path, article, "paragraphs", place):
            context = paragraph.get("context")
            if not isinstance(context, str):
                raise DataError(f"{path}: {at} has no text in context. A file of SQuAD is a JSON object: {_SHAPE}.")
            yield from ((context, asked) for _, asked in _items(path, paragraph, "qas", at))


_SHAPE = '{"data": [{"paragraphs": [{"context": …, "qas": […]}]}]}'


def may_have_none(path: Path) -> bool:
    """Whether a file is one of 2.0, whose questions may have no answer."""
    content = whole_json(path)
    asked = (q for article in content["data"] for text in article["paragraphs"] for q in text["qas"])
    return _is_2(content) or any("is_impossible" in q for q in asked)


def _is_2(content: Any) -> bool:
    """Whether a file says that it is one of 2.0, and not of a date like 2016-01-01."""
    return re.match(r"v?2(\.|$)", str(content.get("version", ""))) is not None


def _items(path: Path, content: Any, key: str, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a list, with where each stands."""
    items = content.get(key) if isinstance(content, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise DataError(f"{path}: {place} has no list of objects {key}. A file of SQuAD is a JSON object: {_SHAPE}.")
    return (
        (f"{key}[{index}]" if place == "the file" else f"{place}.{key}[{index}]", item)
        for index, item in enumerate(items)
    )


def _question(
    path: Path, number: int, context: str, asked: Mapping[str, Any], empty: tuple[Given, ...] | None
) -> Question | Rejected:
    reason = unwritable([context, asked])
    if reason is not None:
        return Rejected(str(path), number, f"question {number:,}: {reason}")
    name, text = asked.get("id"), asked.get("question")
    if not isinstance(name, str | int) or not isinstance(text, str):
        return Rejected(
            str(path), number, f"question {number:,} has no id and text, but {', '.join(asked) or 'nothing'}"
        )
    answers = _answers(asked, empty)
    found = Question(path, number, str(name), text, context, None if isinstance(answers, str) else answers)
    return found.rejected(answers) if isinstance(answers, str) else found


def _answers(asked: Mapping[str, Any], empty: tuple[Given, ...] | None) -> tuple[Given, ...] | str | None:
    """Its right answers, or what is wrong with them. `empty`: what an empty list says where nothing else does."""
    if asked.get("is_impossible") is True:
        return ()
    answers = asked.get("answers")
    if answers is None:
        return None  # a test set
    if answers == [] and "is_impossible" not in asked:
        return empty
    if not isinstance(answers, list) or not all(
        isinstance(each, dict) and isinstance(each.get("text"), str) and type(each.get("answer_start")) is int
        for each in answers
    ):
        return "its answers are no list of objects with text and answer_start"
    return tuple(Given(each["text"], each["answer_start"]) for each in answers)
