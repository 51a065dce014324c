"""Prompts from a file: what is wrong with it is told by file and line."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colonnade.errors import DataError
from colonnade.examples.conversations import Conversation
from colonnade.generation.prompts import read_conversations, read_prompts

DEEP = "[" * 100_000


def test_prompts_may_stand_under_another_key(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "no", "question": "yes"}\n \t\n{"question": ""}\n')
    assert read_prompts(file, "question") == ["yes", ""]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no question: it has no text. Write one a line."),
        ("\n  \r\n\t", "holds no question: it has no text. Write one a line."),
        ('\n\n{"question": 3}', r'asked\.jsonl, line 3: no text under "question"\. Write {"question": "some text"}\.'),
        ('{"question": "a"}\n\n{"prompt": "b"}', r'line 3: no text under "question"'),
        ('["question"]', 'line 1: no text under "question"'),
        ('{"question": "a"}\n{"question', r'line 2: not JSON\. Write {"question": "some text"}\.'),
        (DEEP, "line 1: not JSON"),
    ],
    ids=["empty", "blank", "a number", "another key", "a list", "half a line", "deep"],
)
def test_a_file_without_prompts_is_one_message(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=said):
        read_prompts(file, "question")


@pytest.mark.parametrize(("reads", "what"), [(read_prompts, "prompts"), (read_conversations, "conversations")])
def test_a_pipe_is_refused(tmp_path: Path, reads: Callable[[Path], object], what: str) -> None:
    """Whoever reads it second, another rank say, would find nothing."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=rf"pipe is no plain file, and its {what} are read more than once"):
        reads(tmp_path / "pipe")


def test_a_pipe_that_a_shell_has_a_name_for_is_refused() -> None:
    """As /dev/stdin, or what bash makes of <(...): a link."""
    reader, writer = os.pipe()
    os.write(writer, b"Once upon a time\n")
    os.close(writer)
    try:
        with pytest.raises(DataError, match=rf"/dev/fd/{reader} is no plain file, and its prompts are read more than"):
            read_prompts(Path(f"/dev/fd/{reader}"))
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    "content", ["nonsense", DEEP, "3", '"messages"', '{"messages": {}}'], ids=lambda text: text[:9]
)
def test_a_line_that_is_no_conversation_is_told_by_its_number(tmp_path: Path, content: str) -> None:
    file = tmp_path / "asked.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "Who?"}]})
    file.write_text(f"{good}\n\n{content}\n")
    with pytest.raises(DataError, match=r"asked\.jsonl, line 3: .*Write {.messages.: "):
        read_conversations(file)


@pytest.mark.parametrize("roles", ["user", "user assistant user", "system user", "system user assistant user"])
def test_a_conversation_ends_with_what_is_to_be_answered(tmp_path: Path, roles: str) -> None:
    file = tmp_path / "asked.jsonl"
    messages = [{"role": role, "content": f"{role} {place}"} for place, role in enumerate(roles.split())]
    file.write_text(json.dumps({"messages": messages}))
    assert read_conversations(file) == [Conversation(messages)]
    file.write_text(json.dumps({"messages": [*messages, {"role": "assistant", "content": "Me."}]}))
    with pytest.raises(DataError, match="line 1: its last message is the assistant's: there is nothing to answer"):
        read_conversations(file)


TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def test_what_a_record_of_training_may_have_beside_its_messages_is_read(tmp_path: Path) -> None:
    file, asked = tmp_path / "asked.jsonl", {"role": "user", "content": "Who?"}
    before = [("system", "Be short."), ("user", "Hello?"), ("assistant", "Hello.")]
    said = {"messages": [asked], "tools": TOOLS, "system": before[0][1], "history": [["Hello?", "Hello."]]}
    nothing = {"messages": [asked], "tools": None, "system": None, "history": []}
    file.write_text(f"{json.dumps(said)}\n{json.dumps(nothing)}\n")
    messages = [*({"role": role, "content": content} for role, content in before), asked]
    assert read_conversations(file) == [Conversation(messages, TOOLS), Conversation([asked])]
    file.write_text(json.dumps({"messages": [asked], "tools": "weather()"}))
    with pytest.raises(DataError, match=r"asked\.jsonl, line 1: tools is a text that is no JSON\. Write {"):
        read_conversations(file)


@pytest.mark.parametrize(("read", "what"), [(read_prompts, "prompt"), (read_conversations, "conversation")])
def test_a_file_that_cannot_be_read_is_one_message(tmp_path: Path, read: Callable[[Path], Any], what: str) -> None:
    with pytest.raises(DataError, match=f"none.jsonl cannot be read: No such file .* Name a file with a {what} a line"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"a\xe9": 1}')
    with pytest.raises(DataError, match=r"latin\.jsonl is not UTF-8 \(byte 3\)"):
        read(tmp_path / "latin.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=f"holds no {what}: "):
        read(tmp_path / "empty.jsonl")
