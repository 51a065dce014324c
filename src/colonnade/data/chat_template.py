"""Chat templates: a conversation to one text, and which characters of it are answers.

A template is Jinja, as tokenizer_config.json (or a file of its own) has it beside a published tokenizer. It is a
stranger's program: it runs in Jinja's sandbox, which cannot change what it is given, and sees nothing but messages and
the names of control tokens. The environment is that of transformers (utils/chat_template_utils.py), whose blocks
`{% generation %}` … `{% endgeneration %}` say what the assistant writes.

    plain     <|user|>        for tokenizers without control tokens of their own: roles are spelled out,
              Hello           and the end of document ends an answer
              <|assistant|>
              Hi!<end>
    chatml    <|im_start|>user … <|im_end|>, where the tokenizer has these
    bare      prompt and answer one behind the other, and the end of document
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.filters import do_trim
from jinja2.sandbox import ImmutableSandboxedEnvironment

from colonnade.data.tokenizer import Tokenizer
from colonnade.data.tokenizer_config import control_tokens, read_object, read_templates, read_text
from colonnade.errors import DataError
from colonnade.tokenizer_files import CONFIG, JINJA, templates_in

Message = Mapping[str, Any]
_ROLE = "{{ '<|' + message['role'] + '|>\n' }}"
_ANSWER = "{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}"
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "plain": (
            "{% for message in messages %}" + _ROLE + "{% if message['role'] == 'assistant' %}" + _ANSWER + "{{ '\n' }}"
            "{% else %}{{ message['content'] | trim + '\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
        ),
        "chatml": (
            "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
            "{% if message['role'] == 'assistant' %}"
            "{% generation %}{{ message['content'] | trim + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
            "{% else %}{{ message['content'] | trim + '<|im_end|>\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        ),
        "bare": (
            "{% for message in messages %}{% if message['role'] == 'assistant' %}" + _ANSWER + "{% else %}"
            "{{ message['content'] }}{% endif %}{% endfor %}"
        ),
    }
)
_MARK = "marked-call-"  # what no conversation has
_ANSWERED = ({"role": "user", "content": "a question"}, {"role": "assistant", "content": "its answer"})
_CHATML = ("<|im_start|>", "<|im_end|>")


class TemplateFault(Exception):
    """A template does not take a conversation, or cannot say what of it is answered; the reason is its text."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as one text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Where what the assistant writes begins and ends, in characters."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the names of the control tokens that it may write."""

    text: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    """By Jinja's name: bos_token, eos_token, …"""
    tool_use: str | None = None
    """Another text, of conversations with tools."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in a sidecar, and in tokenizer_config.json."""
        named = {"default": self.text, "tool_use": self.tool_use}
        several = [{"name": name, "template": text} for name, text in named.items()]
        return {"chat_template": self.text if self.tool_use is None else several, **self.tokens}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ChatTemplate | None:
        """The inverse, also of a published tokenizer_config.json; None where there is no template in it."""
        text, tool_use = content.get("chat_template"), None
        if isinstance(text, list):  # several by name
            named = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}
            text, tool_use = named.get("default"), named.get("tool_use")
        if not isinstance(text, str):
            return None
        return cls(text, control_tokens(content), tool_use if isinstance(tool_use, str) else None)

    def render(
        self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> Rendered:
        """One text with its answers, but those of weight 0; `add_generation_prompt`: with what comes before the next
        answer.

        TemplateFault if the template refuses, has no use for the tools, leaves calls of them out, or does not say which
        of it is answered, and that cannot be told either.
        """
        chosen = self._with_tools if tools else self
        text, answers = chosen._written(messages, tools, add_generation_prompt)
        if not chosen.marks_answers:
            answers = chosen._found(messages, tools, text)
        return Rendered(text, tuple(_trained(messages, answers)))

    def prompt(self, messages: Sequence[Message], *, tools: Any = None) -> str:
        """What comes before the next answer. TemplateFault as for `render`."""
        return (self._with_tools if tools else self)._written(messages, tools, True)[0]

    def behind_answer(self) -> str:
        """What it writes behind the last answer of a conversation; nothing where it writes no answer. TemplateFault if
        it refuses a question with its answer.
        """
        text, answer = self._generate(_ANSWERED, None, False)[0], _ANSWERED[-1]["content"]
        return text.rpartition(answer)[2] if answer in text else ""

    @cached_property
    def marks_answers(self) -> bool:
        """Whether the template says itself what is answered."""
        calls = _environment().parse(self.text).find_all(nodes.Call)
        return any(isinstance(call.node, nodes.ExtensionAttribute) for call in calls)

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template has a use for descriptions of tools."""
        return any(name.name == "tools" for name in _environment().parse(self.text).find_all(nodes.Name))

    def check(self) -> None:
        """DataError if it is no template, or marks answers where it cannot be told what place they get."""
        try:
            assert self._compiled, "made"
        except TemplateFault as fault:
            raise DataError(
                f"{fault}. Fix it, or choose another with --template: {', '.join(BUILT_IN)}, or a file."
            ) from fault
        if self._with_tools is not self:
            self._with_tools.check()
        line = _detached_mark(_environment().parse(self.text))
        if line is not None:
            raise DataError(
                f"the chat template has {{% generation %}} in line {line}, inside of a macro, a block of set, filter "
                "or call, or a recursive loop: their text is put together apart, and where it comes to stand cannot be "
                "told. Put {% generation %} and {% endgeneration %} around the place where that text is written."
            )

    @cached_property
    def _with_tools(self) -> ChatTemplate:
        """What transformers chooses where there are tools."""
        return self if self.tool_use is None else ChatTemplate(self.tool_use, self.tokens)

    @cached_property
    def _compiled(self) -> tuple[jinja2.Template, _Answers]:
        """With the tag that notes what is answered. TemplateFault where it is no template."""
        environment = _environment()
        try:
            template = environment.from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFault(f"the chat template is no Jinja: {error.message} (line {error.lineno})") from error
        except (RecursionError, SyntaxError) as error:
            raise TemplateFault(f"the chat template is nested too deeply: {error}") from error
        return template, environment.extensions[_Answers.identifier]  # type: ignore[return-value]

    def _written(
        self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """What is generated. TemplateFault where tools, or calls of them, are left out."""
        text, answers = self._generate(messages, tools, add_generation_prompt)
        if tools and not self.reads_tools:
            raise TemplateFault(
                "the chat template writes no descriptions of tools, and there are some. Remove tools, or choose "
                "another template"
            )
        self._check_calls(messages, tools, text, add_generation_prompt)
        return text, answers

    def _generate(
        self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        values = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        blocks: list[str] = []
        template, answers = self._compiled
        try:
            with answers.found(blocks) as spans:
                for block in template.generate(messages=list(messages), **values, **self.tokens):
                    blocks.append(block)
        except jinja2.TemplateError as error:
            raise TemplateFault(f"the chat template refuses it: {error.message or type(error).__name__}") from error
        except Exception as error:  # a stranger's program can raise anything
            raise TemplateFault(f"the chat template fails on it: {str(error) or type(error).__name__}") from error
        return "".join(blocks), spans

    def _check_calls(self, messages: Sequence[Message], tools: Any, written: str, add_generation_prompt: bool) -> None:
        """TemplateFault if calls of tools are left out: the text is the same without them."""
        for number in self._unmarked(messages, tools, add_generation_prompt):
            without = {key: value for key, value in messages[number].items() if key != "tool_calls"}
            others = [*messages[:number], without, *messages[number + 1 :]]
            try:
                left_out = self._generate(others, tools, add_generation_prompt)[0] == written
            except TemplateFault:
                continue  # it reads them
            if left_out:
                raise TemplateFault(
                    f"the chat template does not write the tool_calls of message {number + 1}: what is answered there "
                    "would be another text. Use a template that writes them"
                )

    def _unmarked(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> list[int]:
        """Messages whose calls of tools may be left out: with marks in their texts, none is written. So one text more
        tells of all calls that are written.
        """
        marks = {number: f"{_MARK}{number}." for number, message in enumerate(messages) if message.get("tool_calls")}
        if not marks:
            return []
        marked = [
            {**message, "tool_calls": _marked(message["tool_calls"], marks[number])} if number in marks else message
            for number, message in enumerate(messages)
        ]
        try:
            written = self._generate(marked, tools, add_generation_prompt)[0]
        except TemplateFault:  # it takes no call with a mark
            return list(marks)
        return [number for number, mark in marks.items() if mark not in written]

    def _found(self, messages: Sequence[Message], tools: Any, whole: str) -> list[tuple[int, int]]:
        """Answers by rendering the conversation turn by turn: what an assistant's turn adds behind its prompt."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._generate(messages[:number], tools, True)[0]
            behind = self._generate(messages[: number + 1], tools, False)[0]
            if not (whole.startswith(behind) and behind.startswith(before)):
                raise TemplateFault(
                    f"the chat template does not mark answers, and writes earlier turns in another way where turn "
                    f"{number + 1} is the last: where that begins and ends cannot be told. Put {{% generation %}} and "
                    "{% endgeneration %} around what the assistant writes"
                )
            spans.append((len(before), len(before) + self._until_its_end(whole[len(before) : len(behind)])))
        return spans

    def _until_its_end(self, answer: str) -> int:
        """Its length without white space behind a last control token: nobody has to learn to write that."""
        short = answer.rstrip()
        ends = (*self.tokens.values(), self._end, "|>", "</s>")
        return len(short) if short.endswith(tuple(end for end in ends if end)) else len(answer)

    @cached_property
    def _end(self) -> str:
        """What ends an answer, as a question with its answer tells; nothing where it refuses these."""
        try:
            return self.behind_answer().rstrip()
        except TemplateFault:
            return ""


def is_trained(message: Message) -> bool:
    """Whether a message of the assistant is an answer to learn, or what later ones are given (OpenAI's weight 0)."""
    return message.get("weight") != 0


def _trained(messages: Sequence[Message], answers: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The answers without those of messages of weight 0."""
    trained = [is_trained(message) for message in messages if message["role"] == "assistant"]
    if all(trained):
        return list(answers)
    if len(trained) != len(answers):
        raise TemplateFault(
            f"a message has weight 0, and the chat template marks {len(answers)} answers of {len(trained)} messages of "
            "the assistant: which one that is cannot be told. Put one pair of {% generation %} and {% endgeneration %} "
            "around all that the assistant writes in a turn"
        )
    return [span for span, kept in zip(answers, trained, strict=True) if kept]


def chosen_template(named: str | None, tokenizer: Tokenizer, path: str | Path) -> ChatTemplate:
    """The template of a name (`BUILT_IN`), of a file, or (None) that beside the tokenizer at `path`.

    DataError where there is none, or the tokenizer lacks a token of it.
    """
    there = read_object(folder_of(path) / CONFIG)
    tokens = control_tokens(there)
    end = tokenizer.end_of_document
    if "eos_token" not in tokens and end is not None:
        tokens = {**tokens, "eos_token": tokenizer.names[end]}
    if named is None:
        own = template_beside(path)
        if own is None:
            raise DataError(
                f"{path} has no chat template: there is no {JINJA} beside it, and no chat_template in a {CONFIG}. "
                f"Choose one with --template: {', '.join(BUILT_IN)}, or a file of Jinja."
            )
        found = replace(own, tokens=tokens)
    else:
        found = ChatTemplate(_text_of(named), tokens)
    found.check()
    missing = [name for name in _CHATML if named == "chatml" and tokenizer.id_of(name) not in tokenizer.special_ids]
    if missing:
        raise DataError(
            f"the template chatml writes {' and '.join(missing)}, which the tokenizer {path} has not got as control "
            "tokens. Use --template plain, or a tokenizer with them."
        )
    if named in ("plain", "bare") and "eos_token" not in tokens:
        raise DataError(
            f"the template {named} ends an answer with the end-of-document token, and the tokenizer {path} has none. "
            "Use another tokenizer, or a template of your own."
        )
    return found


def template_beside(path: str | Path) -> ChatTemplate | None:
    """The template beside a tokenizer: that of its folder; None where there is none."""
    folder = folder_of(path)
    return ChatTemplate.from_json({**read_object(folder / CONFIG), **read_templates(templates_in(folder))})


def folder_of(path: str | Path) -> Path:
    """Where what goes with a tokenizer lies: its folder, or that of its file."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def _text_of(named: str) -> str:
    if named in BUILT_IN:
        return BUILT_IN[named]
    if not Path(named).is_file():
        raise DataError(
            f'--template "{named}": there is no such template and no such file. Use {", ".join(BUILT_IN)}, or a file '
            "of Jinja."
        )
    return read_text(Path(named))


class _Answers(jinja2.ext.Extension):
    """The tag `generation`: notes where its text stands in what has been rendered."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._blocks: list[str] = []
        self._spans: list[tuple[int, int]] = []

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = str(caller())
        start = sum(map(len, self._blocks))
        self._spans.append((start, start + len(text)))
        return text

    @contextmanager
    def found(self, blocks: list[str]) -> Iterator[list[tuple[int, int]]]:
        """The spans of a rendering whose text so far is `blocks`."""
        self._blocks, self._spans = blocks, []
        yield self._spans


def _detached_mark(template: nodes.Template) -> int | None:
    """The line of a first `{% generation %}` whose text is not written at once; None where there is none."""
    outer = template.find_all((nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock, nodes.For))
    lines = (
        inner.lineno
        for each in outer
        if not _is_mark(each) and getattr(each, "recursive", True)
        for inner in each.find_all(nodes.CallBlock)
        if _is_mark(inner)
    )
    return min(lines, default=None)


def _is_mark(node: nodes.Node) -> bool:
    return isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.ExtensionAttribute)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, jinja2.ext.loopcontrols], finalize=_not_none
    )
    environment.filters["trim"] = _trim
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _marked(content: Any, mark: str) -> Any:
    """With the mark behind each text that is a value in it."""
    if isinstance(content, Mapping):
        return {key: _marked(value, mark) for key, value in content.items()}
    if isinstance(content, list):
        return [_marked(value, mark) for value in content]
    return content + mark if isinstance(content, str) else content


def _not_none(value: Any) -> Any:
    """What a template writes. A message that only calls tools has None as its content, no text "None"."""
    if value is None:
        _refuse('it would write "None" where there is no text')
    return value


def _trim(value: Any, chars: str | None = None) -> str:
    return do_trim(_not_none(value), chars)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
