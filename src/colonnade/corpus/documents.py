"""Documents out of files of text: .txt and .jsonl, compressed or not, in pieces that can be worked on apart.

    .txt             one file is one document
    .jsonl .ndjson   one JSON object a line, the document under a key ("text")
    … .gz .bz2 .xz .zst   any of them, compressed

A line that is no document (not UTF-8, not JSON, without the key, its value no text) is rejected with its place and the
reason, and the rest goes on. So is the rest of a file that is damaged or cut short; what is before is kept. Bytes come
out of files as in cleaning (`clean/streams.py`), so that both have the same documents of the same files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from colonnade.corpus.folders import entries
from colonnade.corpus.streams import COMPRESSIONS, Damaged, HashedFile, blocks, until_foreign
from colonnade.errors import DataError

KINDS = {".txt": "text", ".jsonl": "lines", ".ndjson": "lines"}
_CHUNK = 1 << 20
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """A piece of a file: whole lines, or all of a .txt."""

    path: Path
    kind: str
    first_line: int
    """Counted from 1."""
    data: bytes
    read_bytes: int
    """How much of the file, as it is stored, was read for this piece."""
    damage: str = ""
    """Why the file's rest, behind this piece, cannot be read."""


@dataclass(frozen=True)
class Rejected:
    """A line that is no document."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line:,}: {self.reason}"


@dataclass(frozen=True)
class Found:
    """The files that are meant, and what stands beside them in the folders."""

    files: list[Path]
    left_aside: dict[str, int]
    """Files of other kinds, by ending; fifos, broken links and the like, by what they are."""


def expand(inputs: Iterable[str | Path]) -> list[Path]:
    """The files that are meant: a folder stands for every file of documents in it, by name."""
    return look_at(inputs).files


def look_at(inputs: Iterable[str | Path]) -> Found:
    """The files that are meant, and what is left aside in their folders. Raises DataError where there is none."""
    files: list[Path] = []
    aside: Counter[str] = Counter()
    for path in map(Path, inputs):
        if path.is_dir():
            inside = entries(path)
            found = [entry.path for entry in inside if not entry.aside and _kind(entry.path) is not None]
            if not found:
                raise DataError(f"{path} is a folder without documents: no {_known()} in it.")
            files += found
            aside.update(e.aside or e.path.suffix or "none" for e in inside if e.aside or _kind(e.path) is None)
        elif not path.is_file():
            what = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise DataError(f"{path} {what}. Name files of documents ({_known()}), or a folder of them.")
        elif _kind(path) is None:
            raise DataError(
                f"{path} has an ending that says nothing about documents. Known are {_known()}: rename it to what it "
                "holds."
            )
        else:
            files.append(path)
    if not files:
        raise DataError(f"no input is named. Name files of documents ({_known()}), or a folder of them.")
    return Found(files, dict(sorted(aside.items())))


def chunks(paths: Sequence[Path]) -> Iterator[Chunk]:
    """All files, one after the other, in pieces of about a megabyte. Raises DataError where one cannot be opened."""
    for path in paths:
        try:
            yield from _chunks_of(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}. Mend that, or leave it out.") from error


def parse(chunk: Chunk, key: str) -> Iterator[str | Rejected]:
    """The documents of a piece, and what is none."""
    if chunk.kind == "text":
        if chunk.data or not chunk.damage:
            yield _text_of(chunk)
    else:
        for line, data in enumerate(chunk.data.split(b"\n"), chunk.first_line):
            if data and not data.isspace():
                try:
                    yield _document(data, key)
                except ValueError as error:
                    yield Rejected(str(chunk.path), line, str(error))
    if chunk.damage:
        yield Rejected(str(chunk.path), chunk.first_line + chunk.data.count(b"\n"), chunk.damage)


def read_documents(
    inputs: Iterable[str | Path], *, key: str = "text", rejected: list[Rejected] | None = None
) -> Iterator[str]:
    """Every document of the inputs; what is none is left out, and put into `rejected`."""
    for chunk in chunks(expand(inputs)):
        for document in parse(chunk, key):
            if isinstance(document, str):
                yield document
            elif rejected is not None:
                rejected.append(document)


def _document(data: bytes, key: str) -> str:
    try:
        row: Any = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {data[error.start]:#04x} at column {error.start + 1:,})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno:,})") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {_json_type(row)} where an object with the key {key!r} is expected")
    if key not in row:
        raise ValueError(f"no key {key!r}; its keys are {', '.join(map(repr, list(row)[:8])) or 'none'}")
    return _checked(row[key], key)


def _checked(text: Any, key: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is a JSON {_json_type(text)}, not a string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{key!r} holds half of a surrogate pair, which is no Unicode text") from None
    return text


def _text_of(chunk: Chunk) -> str | Rejected:
    try:
        return chunk.data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = chunk.data.count(b"\n", 0, error.start) + 1
        column = error.start - chunk.data.rfind(b"\n", 0, error.start)
        reason = f"not UTF-8 (byte {chunk.data[error.start]:#04x} at column {column:,}); the whole file is left out"
        return Rejected(str(chunk.path), line, reason)


def _chunks_of(path: Path) -> Iterator[Chunk]:
    kind = _kind(path)
    assert kind is not None, "expand() lets only known endings through"
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    with path.open("rb") as raw:
        content = blocks(HashedFile(raw, hashed=False), compression)
        yield from (_text_chunk if kind == "text" else _line_chunks)(path, kind, content, raw)


def _text_chunk(path: Path, kind: str, content: Iterator[bytes], raw: IO[bytes]) -> Iterator[Chunk]:
    damage: list[Damaged] = []
    try:
        data = b"".join(until_foreign(content, damage)).removeprefix(_UTF8_MARK)
    except Damaged as error:
        yield Chunk(path, kind, 1, b"", raw.tell(), f"{error}; it is one document, and left out")
        return
    yield Chunk(path, kind, 1, data, raw.tell(), f"{damage[0]}; all before is read" if damage else "")


def _line_chunks(path: Path, kind: str, content: Iterator[bytes], raw: IO[bytes]) -> Iterator[Chunk]:
    line, read = 1, 0
    for data, damage in _whole_lines(content):
        told, now = f"{damage}; all lines before are read" if damage else "", raw.tell()
        yield Chunk(path, kind, line, data.removeprefix(_UTF8_MARK) if line == 1 else data, now - read, told)
        line, read = line + data.count(b"\n"), now


def _whole_lines(content: Iterator[bytes]) -> Iterator[tuple[bytes, str]]:
    """Lines in pieces of about a megabyte; with the last piece, why the rest cannot be read. A line that breaks off
    there is left out; the last one of a whole file is not."""
    parts, size, damage = list[bytes](), 0, list[Damaged]()
    try:
        for block in until_foreign(content, damage):
            size += len(block)
            parts.append(block)
            if size >= _CHUNK and b"\n" in block:
                end = block.rfind(b"\n") + 1
                yield b"".join([*parts[:-1], block[:end]]), ""
                parts = [block[end:]]
                size = len(parts[0])
    except Damaged as error:
        rest = b"".join(parts)
        yield rest[: rest.rfind(b"\n") + 1], str(error)
        return
    rest = b"".join(parts)
    if rest or damage:
        yield rest, str(damage[0]) if damage else ""


def _kind(path: Path) -> str | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes = suffixes[:-1]
    return KINDS.get(suffixes[-1]) if suffixes else None


def _known() -> str:
    return f"{', '.join(KINDS)}, also followed by {', '.join(COMPRESSIONS)}"


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
