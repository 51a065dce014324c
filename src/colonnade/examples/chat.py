"""Conversations and preferences between answers: what decoders are fine-tuned on.

    chat          given, answered, given, answered, …      the first sequence is given, and may be empty
    preferences   prompt, chosen, prompt, rejected          two conversations that differ in their last answer

Which tokens are answers is in the .idx itself, and the template that wrote the conversations down in the sidecar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from colonnade.corpus.documents import Rejected
from colonnade.data.chat_template import ChatTemplate, TemplateFault
from colonnade.data.conversation import Chat, Marked
from colonnade.data.sidecar import ANSWERS, PREFERENCES, ExampleFields
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.examples.conversations import (
    Conversation,
    Messages,
    NoConversation,
    Preference,
    conversation_of,
    preference_of,
)
from colonnade.examples.format import Document
from colonnade.examples.rows import OTHER_FORM, Row, json_rows

SUFFIXES = (".jsonl", ".json")
T = TypeVar("T")


@dataclass(frozen=True)
class Read(Generic[T]):
    """What a row holds, and the row."""

    row: Row
    content: T


def _read(path: Path, name: str, of: Callable[[Mapping[str, Any]], T]) -> Iterator[Read[T] | Rejected]:
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: examples of {name} are read from .jsonl and .json. {OTHER_FORM}")
    for row in json_rows(path):
        if isinstance(row, Rejected):
            yield row
            continue
        try:
            yield Read(row, of(row.values))
        except NoConversation as fault:
            yield row.rejected(str(fault))


@dataclass(frozen=True)
class ChatFormat:
    """`Format` of conversations and instructions."""

    template: ChatTemplate
    suffixes: tuple[str, ...] = SUFFIXES

    @property
    def fields(self) -> ExampleFields:
        return ExampleFields("chat", ANSWERS, ("given", "answered"), options={"chat": self.template.to_json()})

    def read(self, path: Path) -> Iterator[Read[Conversation] | Rejected]:
        return _read(path, "chat", conversation_of)

    def encode(self, examples: Sequence[Read[Conversation]], tokenizer: Tokenizer) -> Iterator[Document | Rejected]:
        chat = Chat(self.template, tokenizer)
        found = chat.encode([(each.content.messages, each.content.tools) for each in examples])
        for example, marked in zip(examples, found, strict=True):
            if isinstance(marked, TemplateFault):
                yield example.row.rejected(str(marked))
            else:
                yield Document(marked.turns(), _bytes_of(example.content.messages), has_numbers=False)


@dataclass(frozen=True)
class PreferencesFormat:
    """`Format` of pairs of answers, of which one is preferred."""

    template: ChatTemplate
    suffixes: tuple[str, ...] = SUFFIXES

    @property
    def fields(self) -> ExampleFields:
        names = ("prompt", "chosen", "prompt", "rejected")
        return ExampleFields("preferences", PREFERENCES, names, options={"chat": self.template.to_json()})

    def read(self, path: Path) -> Iterator[Read[Preference] | Rejected]:
        return _read(path, "preferences", preference_of)

    def encode(self, examples: Sequence[Read[Preference]], tokenizer: Tokenizer) -> Iterator[Document | Rejected]:
        chat = Chat(self.template, tokenizer)
        pairs = [_both(each.content) for each in examples]
        tools = [each.content.tools for each in examples]
        found = iter(
            chat.encode([(messages, known) for pair, known in zip(pairs, tools, strict=True) for messages in pair])
        )
        for example, pair in zip(examples, pairs, strict=True):
            sides = [_last_answer(next(found)) for _ in pair]
            fault = next((side for side in sides if isinstance(side, TemplateFault)), None)
            if fault is not None:
                yield example.row.rejected(str(fault))
                continue
            sequences = [each for side in sides if not isinstance(side, TemplateFault) for each in side]
            yield Document(sequences, sum(map(_bytes_of, pair)), has_numbers=False)


def _both(example: Preference) -> tuple[Messages, Messages]:
    """The two conversations."""
    chosen, rejected = (
        [*example.prompt, {"role": "assistant", "content": text}] for text in (example.chosen, example.rejected)
    )
    return chosen, rejected


def _last_answer(marked: Marked | TemplateFault) -> tuple[list[int], list[int]] | TemplateFault:
    """(all before it, the last answer with what the template writes behind it inside the answer)."""
    if isinstance(marked, TemplateFault):
        return marked
    last = len(marked.ids) - marked.answered[::-1].index(True)
    first = last
    while first > 0 and marked.answered[first - 1]:
        first -= 1
    return marked.ids[:first], marked.ids[first:last]


def _bytes_of(messages: Messages) -> int:
    return sum(len((message.get("content") or "").encode()) for message in messages)
