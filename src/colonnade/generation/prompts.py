"""Prompts from a file: lines of text, or JSON objects. Takes no torch."""

import json
from collections.abc import Sequence
from pathlib import Path

from colonnade.errors import DataError
from colonnade.examples.conversations import Conversation, NoConversation, question_of

KEY = "prompt"
_CONVERSATION = '{"messages": [{"role": "user", "content": "some text"}]}'


def read_prompts(path: Path, key: str = KEY) -> list[str]:
    """The prompts of a file: of a .jsonl what each line has under `key`, else each line as it is. Blank lines are none.

    DataError names the first line that is no prompt.
    """
    return [_in_json(path, key, *each) if path.suffix == ".jsonl" else each[1] for each in _lines(path, key)]


def _lines(path: Path, key: str) -> list[tuple[int, str]]:
    """(line from 1, text) of all lines that are not blank."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(
                f"{path} is no plain file, and its {key}s are read more than once, and by every rank: a pipe has them "
                "once. Write them to a file, and name that."
            )
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Name a file with a {key} a line.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start:,}). Convert it, or name another file.") from None
    given = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not given:
        raise DataError(f"{path} holds no {key}: it has no text. Write one a line.")
    return given


def control_note(spelled: Sequence[Sequence[str]], what: str = KEY) -> str | None:
    """What to tell of texts that spell control tokens (their names in each text), which are read as other text."""
    found = [(number, names) for number, names in enumerate(spelled, 1) if names]
    if not found:
        return None
    (number, names), others = found[0], f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
    return (
        f"{what} {number:,}{others} spells {', '.join(names)}, read as text like any other: --control-tokens reads "
        "names of control tokens as these."
    )


def read_conversations(path: Path) -> list[Conversation]:
    """The conversation of each line of a .jsonl, {"messages": [...]}, which ends before the answer that is to be
    written. Beside messages it may have what a record of training has: system, history and tools.

    DataError names the first line that has none.
    """
    return [_conversation(path, number, text) for number, text in _lines(path, "conversation")]


def _conversation(path: Path, number: int, line: str) -> Conversation:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{path}, line {number}: not JSON. Write {_CONVERSATION}.") from None
    try:
        return question_of(content if isinstance(content, dict) else {})
    except NoConversation as problem:
        raise DataError(f"{path}, line {number}: {problem}. Write {_CONVERSATION}.") from None


def _in_json(path: Path, key: str, number: int, line: str) -> str:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f'{path}, line {number}: not JSON. Write {{"{key}": "some text"}}.') from None
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise DataError(f'{path}, line {number}: no text under "{key}". Write {{"{key}": "some text"}}.')
    return found
