"""Last step: every document into the file of its part, and the hash of each file."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import zstandard
from datatrove.data import Document

from colonnade.atomic import written
from colonnade.corpus.recipe import Recipe
from colonnade.corpus.spool import json_line
from colonnade.corpus.step import Setting, Step
from colonnade.corpus.tally import Account, Amount

_BATCH_ROWS, _BATCH_CHARACTERS = 512, 256 << 20


class Sink(Protocol):
    """Something that rows are written to."""

    def write(self, row: dict[str, Any]) -> None:
        """One row more."""


class Write(Step):
    """Writes a task's documents to PART/TASK.jsonl.zst (or the like), under temporary names until all are whole."""

    def __init__(self, recipe: Recipe, setting: Setting) -> None:
        self.parts, self.seed = recipe.parts, recipe.split.seed if recipe.split else 0
        self.how = recipe.write
        self._rank = 0
        self._sinks: dict[str, Sink] = {}
        self._amounts: dict[str, Amount] = {}
        self._open = ExitStack()
        super().__init__("write", setting)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """The documents, written; the files get their names behind the last one."""
        self._rank, self._sinks, self._amounts = rank, {}, {}
        with ExitStack() as self._open:
            yield from super().run(data, rank, world_size)

    def examine(self, document: Document, account: Account) -> None:
        """Writes one document."""
        about = document.metadata
        part = part_of(about.get("origin", document.id), self.parts, seed=self.seed)
        if part not in self._sinks:
            self._sinks[part] = self._open.enter_context(self._opened(part))
            self._amounts[part] = Amount()
        self._sinks[part].write(row_of(document, metadata=self.how.metadata))
        self._amounts[part].add(about["bytes"], about["tokens"])

    def finish(self, account: Account) -> None:
        """Closes the files, and tells their hashes."""
        self._sinks = {}
        self._open.close()
        entries = []
        for part, amount in sorted(self._amounts.items()):
            path = self._path(part)
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            name = str(path.relative_to(self.setting.folder))
            entries.append(
                {"path": name, "part": part, **amount.as_json(), "size": path.stat().st_size, "sha256": digest}
            )
        account.tally.metadata[f"{self._rank:05d}"] = entries

    def _path(self, part: str) -> Path:
        ending = ".parquet" if self.how.format == "parquet" else ".jsonl"
        if self.how.format == "jsonl" and self.how.compression != "none":
            ending += f".{self.how.compression}"
        return self.setting.folder / part / f"{self._rank:05d}{ending}"

    @contextmanager
    def _opened(self, part: str) -> Iterator[Sink]:
        with written(self._path(part)) as raw:
            opened = _parquet if self.how.format == "parquet" else _lines
            with opened(raw, self.how.compression) as sink:
                yield sink


def part_of(identity: str, parts: Mapping[str, float], *, seed: int) -> str:
    """The part of a document, by a hash of its id, or of what stands for it: the same in every run, whatever the other
    documents are."""
    digest = hashlib.blake2b(f"{seed}\0{identity}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    place = int.from_bytes(digest, "little") / 2**64
    for name, share in parts.items():
        place -= share
        if place < 0:
            return name
    return name


def row_of(document: Document, *, metadata: bool) -> dict[str, Any]:
    """What is written of a document: text and id, and what is known of it."""
    about = document.metadata
    row = {"text": document.text, "id": document.id}
    row |= {key: about[key] for key in ("source", "url", "title", "language", "tokens") if about.get(key) is not None}
    if metadata and about["extra"]:
        row["metadata"] = about["extra"]
    return row


class _Lines:
    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write

    def write(self, row: dict[str, Any]) -> None:
        self._write(json_line(row))


class _Table:
    """Rows of a Parquet file, a batch at a time; `metadata` as JSON text."""

    _TYPES = {"tokens": "int64"}

    def __init__(self, raw: IO[bytes], compression: str) -> None:
        self._arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
        keys = ("text", "id", "source", "url", "title", "language", "tokens", "metadata")
        self._schema = self._arrow.schema([(key, self._TYPES.get(key, "string")) for key in keys])
        kind = {"none": "none", "gz": "gzip", "zst": "zstd"}[compression]
        self._writer = parquet.ParquetWriter(raw, self._schema, compression=kind)
        self._rows, self._characters = list[dict[str, Any]](), 0

    def write(self, row: dict[str, Any]) -> None:
        if "metadata" in row:
            row = {**row, "metadata": json.dumps(row["metadata"], allow_nan=False, default=str)}
        self._rows.append(row)
        self._characters += len(row["text"]) + len(row.get("metadata", ""))
        if len(self._rows) >= _BATCH_ROWS or self._characters >= _BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._characters = [], 0

    def close(self) -> None:
        self.flush()
        self._writer.close()


@contextmanager
def _lines(raw: IO[bytes], compression: str) -> Iterator[Sink]:
    if compression == "none":
        yield _Lines(raw.write)
    elif compression == "gz":
        with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
            yield _Lines(packed.write)
    else:
        with zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False) as packed:
            yield _Lines(packed.write)


@contextmanager
def _parquet(raw: IO[bytes], compression: str) -> Iterator[Sink]:
    table = _Table(raw, compression)
    yield table
    table.close()
