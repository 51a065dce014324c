"""Conversations as token ids, with what of them is answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from colonnade.data.chat_template import ChatTemplate, Message, TemplateFault
from colonnade.data.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Marked:
    """A conversation's token ids [n], and whether each is a part of an answer [n]."""

    ids: list[int]
    answered: list[bool]

    def turns(self) -> list[list[int]]:
        """The ids by turns, what is given first (it may be nothing) and then what is answered, and so on."""
        found: list[list[int]] = [[]]
        for token, answered in zip(self.ids, self.answered, strict=True):
            if answered == (len(found) % 2 == 1):
                found.append([])
            found[-1].append(token)
        return found


@dataclass(frozen=True)
class Chat:
    """A template with the tokenizer that reads what it writes."""

    template: ChatTemplate
    tokenizer: Tokenizer

    def encode(self, conversations: Sequence[tuple[Sequence[Message], Any]]) -> list[Marked | TemplateFault]:
        """Each conversation's (messages, tools) tokens, or why it has none."""
        rendered = [self._rendered(messages, tools) for messages, tools in conversations]
        whole = [each for each in rendered if not isinstance(each, TemplateFault)]
        marked = iter(self.tokenizer.encode_marked([(each.text, each.answers) for each in whole]))
        return [each if isinstance(each, TemplateFault) else Marked(*next(marked)) for each in rendered]

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """What comes before the next answer. TemplateFault where the template refuses, or a text has control tokens."""
        self._check(messages, tools)
        text = self.template.prompt(messages, tools=tools)
        return self.tokenizer.encode_marked([(text, ())])[0][0]

    @cached_property
    def end_of_turn(self) -> int | None:
        """The control token that ends an answer; the end of document where the template writes none."""
        try:
            behind = self.template.behind_answer()
        except TemplateFault:
            return self.tokenizer.end_of_document
        ids = self.tokenizer.encode_marked([(behind, ())])[0][0]
        return next((token for token in ids if token in self.tokenizer.special_ids), self.tokenizer.end_of_document)

    def _rendered(self, messages: Sequence[Message], tools: Any) -> Any:
        try:
            self._check(messages, tools)
            found = self.template.render(messages, tools=tools)
            if not any(end > start for start, end in found.answers):
                raise TemplateFault("the chat template writes nothing where the assistant answers")
            return found
        except TemplateFault as fault:
            return fault

    def _check(self, messages: Sequence[Message], tools: Any = None) -> None:
        """A text that spells a control token would end turns, or begin them, wherever a template may find it."""
        spelled = next((name for text in _texts((messages, tools)) for name in self._control if name in text), None)
        if spelled is not None:
            raise TemplateFault(
                f'a text has the control token "{spelled}" in it, which would be read as the real one. Remove it'
            )

    @cached_property
    def _control(self) -> tuple[str, ...]:
        names = self.tokenizer.names
        return tuple(names[token] for token in sorted(self.tokenizer.special_ids) if names[token])


def _texts(content: Any) -> Iterator[str]:
    """All texts in what JSON can hold, names too."""
    left = [content]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += [*each, *each.values()]
        elif isinstance(each, Sequence):
            left += each


def messages_problem(messages: object) -> str | None:
    """Why this is no conversation; None where it is one."""
    if not isinstance(messages, list) or not messages:
        return "no list of messages"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            return f"message {number} is {type(message).__name__}, where an object with role and content belongs"
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            return f"message {number} has the role {role!r}: there are {', '.join(ROLES)}"
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"message {number} ({role}) has no text in content"
        if message.get("function_call"):
            return f"message {number} ({role}) has function_call, which no chat template reads: write it as tool_calls"
    return None
