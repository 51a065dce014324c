"""Documents out of files of text: .txt and .jsonl, compressed or not, in pieces that can be worked on apart.

    .txt             one file is one document
    .jsonl .ndjson   one JSON object a line, the document under a key ("text")
    … .gz .bz2 .xz .zst   any of them, compressed

A line that is no document (not UTF-8, not JSON, without the key, its value no text) is rejected with its place and the
reason, and the rest goes on. A file that cannot be read to its end stops everything: its rest would be lost silently.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from colonnade.errors import DataError

KINDS = {".txt": "text", ".jsonl": "lines", ".ndjson": "lines"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
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


@dataclass(frozen=True)
class Rejected:
    """A line that is no document."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line:,}: {self.reason}"


def expand(inputs: Iterable[str | Path]) -> list[Path]:
    """The files that are meant: a folder stands for every file of documents in it, by name."""
    files: list[Path] = []
    for path in map(Path, inputs):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) is not None)
            if not found:
                raise DataError(f"{path} is a folder without documents: no {_known()} in it.")
            files += found
        elif not path.is_file():
            raise DataError(f"{path} does not exist. Name files of documents ({_known()}), or a folder of them.")
        elif _kind(path) is None:
            raise DataError(
                f"{path} has an ending that says nothing about documents. Known are {_known()}: rename it to what it "
                "holds."
            )
        else:
            files.append(path)
    if not files:
        raise DataError(f"no input is named. Name files of documents ({_known()}), or a folder of them.")
    return files


def chunks(paths: Sequence[Path]) -> Iterator[Chunk]:
    """All files, one after the other, in pieces of about a megabyte."""
    for path in paths:
        try:
            yield from _chunks_of(path)
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise DataError(
                f"{path} cannot be read to its end: {error}. It is damaged, cut short, or not what its ending says. "
                "Copy it again, or leave it out."
            ) from error


def parse(chunk: Chunk, key: str) -> Iterator[str | Rejected]:
    """The documents of a piece, and what is none."""
    if chunk.kind == "text":
        yield _text_of(chunk)
        return
    for line, data in enumerate(chunk.data.split(b"\n"), chunk.first_line):
        if data and not data.isspace():
            try:
                yield _document(data, key)
            except ValueError as error:
                yield Rejected(str(chunk.path), line, str(error))


def read_documents(inputs: Iterable[str | Path], *, key: str = "text") -> Iterator[str]:
    """Every document of the inputs; rejected lines are left out."""
    for chunk in chunks(expand(inputs)):
        yield from (document for document in parse(chunk, key) if isinstance(document, str))


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
    with path.open("rb") as raw, _decompressed(raw, path) as stream:
        if kind == "text":
            yield Chunk(path, kind, 1, stream.read().removeprefix(_UTF8_MARK), raw.tell())
            return
        line, before = 1, 0
        for data in _whole_lines(stream):
            yield Chunk(path, kind, line, data.removeprefix(_UTF8_MARK) if line == 1 else data, raw.tell() - before)
            line, before = line + data.count(b"\n"), raw.tell()


def _whole_lines(stream: IO[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    while block := stream.read(_CHUNK):
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*parts, block[:end]])
            parts = []
        parts.append(block[end:])
    if rest := b"".join(parts):
        yield rest


def _decompressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    match path.suffix:
        case ".gz":
            return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst":
            return _zstandard(raw, path)
        case _:
            return raw


def _zstandard(raw: IO[bytes], path: Path) -> IO[bytes]:
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise DataError(
            f"{path} is compressed with Zstandard, and the package `zstandard` is not installed. Run `pip install "
            "zstandard`, or decompress the file first."
        ) from None
    reader: IO[bytes] = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return reader


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
