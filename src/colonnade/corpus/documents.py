"""Documents out of files of text: .txt and .jsonl, compressed or not, in chunks that can be worked on apart.

    .txt             one file is one document
    .jsonl .ndjson   one JSON object per line, the document under a key ("text")
    … .gz .bz2 .xz .zst   any of them, compressed

What is a document, and what is said of what is none, is decided in `rows`, and how bytes come out of files in
`streams`, as for cleaning: both have the same documents of the same files. Here no document is too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

from colonnade.corpus.folders import inputs_in, named_twice
from colonnade.corpus.formats import KINDS, kind_of
from colonnade.corpus.recipe import ReadStep
from colonnade.corpus.rows import (
    EMPTY,
    LINES_READ,
    TEXT_LEFT_OUT,
    TEXT_READ,
    Reject,
    Row,
    broken_off,
    line_rows,
    of_any_length,
    text_of,
    unreadable,
    whole_text,
)
from colonnade.corpus.streams import COMPRESSIONS, Damaged, HashedFile, blocks, until_foreign
from colonnade.errors import DataError
from colonnade.storage import as_given, not_here

_READ = ("text", "lines")  # kinds of files that are read here
_CHUNK = 1 << 20


class Place(NamedTuple):
    """How far some files have been read: those before number `file`, counted from 0, and `chunks` of that one."""

    file: int = 0
    chunks: int = 0


BEGIN = Place()
"""Nothing has been read."""


@dataclass(frozen=True)
class Chunk:
    """A part of a file: whole lines, or all of a .txt."""

    path: Path
    kind: str
    first_line: int
    """Counted from 1."""
    data: bytes
    read_bytes: int
    """How much of the file, as it is stored, was read for this chunk."""
    damage: str = ""
    """Why the file's rest, behind this chunk, cannot be read."""
    refused: bool = False
    """Whether the system did not give that rest: it may give it another time, and content that is damaged stays so."""
    end: Place = BEGIN
    """How far the files have been read with this chunk."""

    @property
    def num_lines(self) -> int:
        """Of its data; in a text, which is one document, lines are not told apart."""
        if self.kind == "text":
            return 0
        return self.data.count(b"\n") + (not self.data.endswith(b"\n") and bool(self.data))


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
    """The files that are meant, and what is left aside in their folders. Raises DataError where there is none, or where
    one is named twice.
    """
    files: list[Path] = []
    aside: Counter[str] = Counter()
    named = [Path(each) for each in inputs]
    for path in named:
        if path.is_dir():
            inside = inputs_in(path)
            found = [entry.path for entry in inside if not entry.aside and _kind(entry.path) is not None]
            if not found:
                raise DataError(f"{path} is a folder without documents: no {_known()} in it.")
            files += found
            aside.update(e.aside or e.path.suffix or "none" for e in inside if e.aside or _kind(e.path) is None)
        elif not path.is_file():
            what = "is neither a file nor a folder." if path.exists() else f"does not exist.{not_here(path)}"
            raise DataError(f"{as_given(path)} {what} Name files of documents ({_known()}), or a folder of them.")
        elif _kind(path) is None:
            raise DataError(_not_read(path))
        else:
            files.append(path)
    if not files:
        raise DataError(f"no input is named. Name files of documents ({_known()}), or a folder of them.")
    for twice in named_twice([str(path) for path in named]):
        raise DataError(f"the inputs name {twice}")
    return Found(files, dict(sorted(aside.items())))


def chunks(paths: Sequence[Path], behind: Place = BEGIN) -> Iterator[Chunk]:
    """All files, one after the other, in chunks of about a megabyte; what stands behind a place, where one is given.

    Where the system does not give what stands before that place in its file, that is told in a chunk without data.
    """
    for number, path in enumerate(paths[behind.file :], behind.file):
        done = behind.chunks if number == behind.file else 0
        for count, chunk in enumerate(_chunks_of(path), 1):
            if count > done:
                yield replace(chunk, end=Place(number, count))
            elif chunk.refused:
                yield replace(chunk, data=b"", end=Place(number, count))


def parse(chunk: Chunk, key: str) -> Iterator[str | Rejected]:
    """The documents of a chunk, and what is none. Of documents without text "" is given."""
    read = of_any_length(key)
    for row in _rows(chunk, read):
        text = text_of(row, read) if isinstance(row, Row) else row
        if isinstance(text, str):
            yield text
        elif text.reason == EMPTY:
            yield ""
        else:
            yield Rejected(str(chunk.path), chunk.first_line - 1 + text.line, str(text))
    if chunk.damage:
        yield Rejected(str(chunk.path), chunk.first_line + chunk.num_lines, chunk.damage)


def _rows(chunk: Chunk, read: ReadStep) -> Iterator[Row | Reject]:
    if chunk.kind == "lines":
        return line_rows(iter([chunk.data]), read, as_json=True, first=chunk.first_line == 1)
    return whole_text(iter([chunk.data]), read) if chunk.data or not chunk.damage else iter(())


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


def _chunks_of(path: Path) -> Iterator[Chunk]:
    kind = _kind(path)
    assert kind is not None, "expand() lets only known endings through"
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    try:
        raw = path.open("rb")
    except OSError as error:
        yield Chunk(path, kind, 1, b"", 0, str(unreadable(error)), refused=True)
        return
    with raw:
        content = blocks(HashedFile(raw, hashed=False), compression)
        yield from (_text_chunk if kind == "text" else _line_chunks)(path, kind, content, raw)


def _text_chunk(path: Path, kind: str, content: Iterator[bytes], raw: IO[bytes]) -> Iterator[Chunk]:
    damage: list[Damaged] = []
    try:
        data = b"".join(until_foreign(content, damage))
    except Damaged as error:
        yield Chunk(path, kind, 1, b"", raw.tell(), str(broken_off(error, 1, TEXT_LEFT_OUT)), error.refused)
        return
    yield Chunk(path, kind, 1, data, raw.tell(), str(broken_off(damage[0], 1, TEXT_READ)) if damage else "")


def _line_chunks(path: Path, kind: str, content: Iterator[bytes], raw: IO[bytes]) -> Iterator[Chunk]:
    line, read = 1, 0
    for data, damage in _whole_lines(content):
        message, now = str(broken_off(damage, line, LINES_READ)) if damage else "", raw.tell()
        yield Chunk(path, kind, line, data, now - read, message, damage is not None and damage.refused)
        line, read = line + data.count(b"\n"), now


def _whole_lines(content: Iterator[bytes]) -> Iterator[tuple[bytes, Damaged | None]]:
    """Lines in chunks of about a megabyte; with the last chunk, why the rest cannot be read. A line that breaks off
    there is left out; the last one of a whole file is not."""
    parts, size, damage = list[bytes](), 0, list[Damaged]()
    try:
        for block in until_foreign(content, damage):
            size += len(block)
            parts.append(block)
            if size >= _CHUNK and b"\n" in block:
                end = block.rfind(b"\n") + 1
                yield b"".join([*parts[:-1], block[:end]]), None
                parts = [block[end:]]
                size = len(parts[0])
    except Damaged as error:
        rest = b"".join(parts)
        yield rest[: rest.rfind(b"\n") + 1], error
        return
    rest = b"".join(parts)
    if rest or damage:
        yield rest, damage[0] if damage else None


def _kind(path: Path) -> str | None:
    kind = kind_of(path)
    return kind[0] if kind is not None and kind[0] in _READ else None


def _not_read(path: Path) -> str:
    if kind_of(path) is not None:
        return (
            f"{path} is of a kind that `colonnade data clean` reads: clean it, and name the folder of .jsonl that this "
            f"writes. Known here are {_known()}."
        )
    return f"{path} has an ending that says nothing about documents. Known are {_known()}: rename it to what it holds."


def _known() -> str:
    endings = (ending for ending, kind in KINDS.items() if kind in _READ)
    return f"{', '.join(endings)}, also followed by {', '.join(COMPRESSIONS)}"
