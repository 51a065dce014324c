"""Lines and texts to rows, and rows to documents: one rule for what is a document, for tokenizing and for cleaning.

A row is a mapping with the text and what is known of it; a `Reject` says what is none, where, and why: a line that is
not in the encoding, not a JSON object, without the key, its value no text, half of a surrogate pair, empty or too long,
and the rest of a file that is damaged, cut short, or cannot be read. What stands before that is kept.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from colonnade.corpus.recipe import ReadStep
from colonnade.corpus.streams import Damaged, Line, lines, until_foreign

EMPTY = "empty"
LINES_READ = "all lines before are read"
TEXT_READ = "all before is read"
TEXT_LEFT_OUT = "it is one document, and left out"
SURROGATE = re.compile("[\ud800-\udfff]")
HALF_PAIR = "half a surrogate pair"
_UTF8_MARK = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """One document as it was stored."""

    line: int
    """Line, or record, counted from 1 within the input split."""
    values: dict[str, Any]


class Reject(NamedTuple):
    """What is no document: the reason is one of few, the detail is particular."""

    line: int
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


def of_any_length(key: str) -> ReadStep:
    """How documents are read where nothing is cleaned: those under a key, and none is too long."""
    return ReadStep.model_construct(paths=[], key=key, max_bytes=sys.maxsize - 1)  # one more byte is asked for


def line_rows(content: Iterator[bytes], read: ReadStep, *, as_json: bool, first: bool) -> Iterator[Row | Reject]:
    """The rows of content with a document on each line: a JSON object, or text. `first`: it is a file's beginning."""
    number = 0
    try:
        for line in lines(content, max_bytes=read.max_bytes):
            number = line.number
            yield from _row(line, read, as_json=as_json, first=first and number == 1)
    except Damaged as error:
        yield broken_off(error, number + 1, LINES_READ)


def whole_text(content: Iterator[bytes], read: ReadStep) -> Iterator[Row | Reject]:
    """The row of content that is one document, and what is wrong with it."""
    parts, size, damage = list[bytes](), 0, list[Damaged]()
    try:
        for block in until_foreign(content, damage):
            size += len(block)
            if size <= read.max_bytes:
                parts.append(block)
    except Damaged as error:
        yield broken_off(error, 1, TEXT_LEFT_OUT)
        return
    if size > read.max_bytes:
        yield Reject(1, "too long", f"{size:,} bytes, read.max_bytes = {read.max_bytes:,}")
        return
    data = b"".join(parts).removeprefix(_UTF8_MARK)
    try:
        yield Row(1, {read.key: decoded(data, read)})
    except UnicodeDecodeError as error:
        line, column = data.count(b"\n", 0, error.start) + 1, error.start - data.rfind(b"\n", 0, error.start)
        found = _not_encoded(error, line, column, read.encoding)
        yield found._replace(detail=f"{found.detail}; {TEXT_LEFT_OUT}")
    if damage:
        yield broken_off(damage[0], 1, TEXT_READ)


def text_of(row: Row, read: ReadStep) -> str | Reject:
    """The text of a row, or why it is no document."""
    if read.key not in row.values:
        there = ", ".join(map(repr, list(row.values)[:8])) or "none"
        return Reject(row.line, f"no key {read.key!r}", f"its keys are {there}")
    text = row.values[read.key]
    if not isinstance(text, str):
        return Reject(row.line, f"{read.key!r} is no text", f"it is {_kind_of_value(text)}")
    if not text or text.isspace():
        return Reject(row.line, EMPTY)
    if not text.isascii() and SURROGATE.search(text):
        if read.damaged == "reject":
            return Reject(row.line, HALF_PAIR)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def decoded(data: bytes, read: ReadStep) -> str:
    """The text of bytes. Raises UnicodeDecodeError where they are not in the encoding and may not be replaced."""
    return data.decode(read.encoding, errors="strict" if read.damaged == "reject" else "replace")


def broken_off(error: Damaged, line: int, kept: str = "") -> Reject:
    """What is said of a file's rest that cannot be read, and of what stands before it."""
    kind = _kind_of_damage(error)
    message = str(error).removeprefix(kind).removeprefix(": ")
    return Reject(line, f"file {kind}", "; ".join(part for part in (message, kept) if part))


def unreadable(error: OSError) -> Reject:
    """What is said of a file that the system does not give."""
    return Reject(1, "file cannot be read", str(error.strerror or error))


def _kind_of_damage(error: Damaged) -> str:
    """In a word or two, for the reason."""
    known = ("cut short", "empty", "cannot be read", "needs too much memory")
    return next((kind for kind in known if str(error).startswith(kind)), "damaged")


def not_encoded(error: UnicodeDecodeError, line: int, encoding: str) -> Reject:
    """What is said of bytes that are not in the encoding, by their place in a line, record or value."""
    return _not_encoded(error, line, error.start + 1, encoding)


def _row(line: Line, read: ReadStep, *, as_json: bool, first: bool) -> Iterator[Row | Reject]:
    if line.data is None:
        yield Reject(line.number, "too long", f"{line.size:,} bytes, read.max_bytes = {read.max_bytes:,}")
        return
    data = line.data.removeprefix(_UTF8_MARK) if first else line.data
    if not data or data.isspace():
        return
    try:
        text = decoded(data, read)
        yield Row(line.number, _json_object(text) if as_json else {read.key: text.strip()})
    except UnicodeDecodeError as error:
        yield not_encoded(error, line.number, read.encoding)
    except _NoObjectError as error:
        yield Reject(line.number, *error.args)


class _NoObjectError(Exception):
    """A line is no JSON object: the reason, and the detail."""


def _json_object(text: str) -> dict[str, Any]:
    try:
        row: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise _NoObjectError("not JSON", f"{error.msg} at column {error.colno:,}") from None
    except RecursionError:
        raise _NoObjectError("not JSON", "nested too deeply") from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise _NoObjectError("not JSON", str(error)) from None
    if not isinstance(row, dict):
        raise _NoObjectError("not a JSON object", f"it is {_kind_of_value(row)}")
    return row


def _not_encoded(error: UnicodeDecodeError, line: int, column: int, encoding: str) -> Reject:
    place = f"byte {error.object[error.start]:#04x} at column {column:,}"
    return Reject(line, f"not {encoding.upper()}", place)


def _kind_of_value(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
