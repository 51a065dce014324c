"""Prompts from a file: lines of text, or JSON objects. Takes no torch."""

import json
from pathlib import Path

from colonnade.errors import DataError

KEY = "prompt"


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: of a .jsonl the "prompt" of each line, else each line as it is. Blank lines are none.

    DataError names the first line that is no prompt.
    """
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Name a file with a prompt a line.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start:,}). Convert it, or name another file.") from None
    given = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not given:
        raise DataError(f"{path} holds no prompt: it has no text. Write one a line.")
    return [_in_json(path, *each) if path.suffix == ".jsonl" else each[1] for each in given]


def _in_json(path: Path, number: int, line: str) -> str:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f'{path}, line {number}: not JSON. Write {{"{KEY}": "some text"}}.') from None
    found = content.get(KEY) if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise DataError(f'{path}, line {number}: no text under "{KEY}". Write {{"{KEY}": "some text"}}.')
    return found
