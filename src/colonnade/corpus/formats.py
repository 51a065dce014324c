"""Rows out of files: JSON lines, text, Parquet and WARC, one after the other, with the place of each (`rows`).

A file that breaks off gives its rows until there and then a Reject for the rest.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from colonnade.corpus.archives import ZIP, member
from colonnade.corpus.recipe import ReadStep
from colonnade.corpus.rows import Reject, Row, broken_off, decoded, line_rows, not_encoded, whole_text
from colonnade.corpus.streams import COMPRESSIONS, BlockStream, Damaged, HashedFile, blocks

KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".txt": "text",
    ".parquet": "parquet",
    ".warc": "warc",
    ".wet": "warc",
}
KINDS_IN_WORDS = f"{', '.join(KINDS)}, all but .parquet also followed by {', '.join(COMPRESSIONS)} or within {ZIP}"
_TALKERS = ("trafilatura", "htmldate", "courlan", "justext", "charset_normalizer", "warcio")
_BATCH_ROWS = 256
_NOT_HELD = (ArithmeticError, LookupError, NotImplementedError, ValueError)
"""What pyarrow raises for a value that Python cannot hold: a year above 9999, an unknown zone, fields of one name."""
_PIECE = 1 << 20
_GROUP_BYTES = 4 << 30


@dataclass(frozen=True)
class InputSplit:
    """What one task reads: a file, a run of lines of one, or a member of a zip file."""

    path: str
    source: str
    size: int
    """[bytes] Of the file, when the run was planned."""
    modified: int
    """[ns] When the file was last written to."""
    start: int = 0
    stop: int | None = None
    member: str = ""
    """Within a zip file."""

    @property
    def name(self) -> str:
        """For people: the path, and the member's behind it."""
        return f"{self.path}/{self.member}" if self.member else self.path

    @property
    def num_bytes(self) -> int:
        """[bytes] Of the file, or of what the member unfolds to, that belong to this input split."""
        return (self.size if self.stop is None else self.stop) - self.start


def kind_of(path: Path) -> tuple[str, str] | None:
    """(kind, compression) by a file's endings; None where they say nothing. A zip file is of kind zip."""
    suffixes = path.suffixes
    if path.suffix == ZIP:
        return "zip", ""
    compression = suffixes[-1] if suffixes and suffixes[-1] in COMPRESSIONS else ""
    suffixes = suffixes[:-1] if compression else suffixes
    kind = KINDS.get(suffixes[-1]) if suffixes else None
    return None if kind is None or (kind == "parquet" and compression) else (kind, compression)


@contextmanager
def content_of(split: InputSplit, raw: IO[bytes], read: ReadStep) -> Iterator[HashedFile]:
    """What there is to read of an input split, given its open file. Raises Damaged where a zip file cannot be used."""
    if split.member or kind_of(Path(split.path)) == ("zip", ""):
        with member(raw, split.member, max_expansion=read.max_expansion) as stream:
            yield HashedFile(stream, split.start, split.stop)
    else:
        yield HashedFile(raw, split.start, split.stop)


def rows(split: InputSplit, file: HashedFile, read: ReadStep) -> Iterator[Row | Reject]:
    """All rows of an input split; `file` stands at its start."""
    known = kind_of(Path(split.name))
    assert known is not None, "the plan has only files of known kinds"
    kind, compression = known
    if kind == "parquet":
        yield from _parquet(split, read)
        return
    content = blocks(file, compression, max_expansion=read.max_expansion)
    if kind == "warc":
        yield from _warc(content, read)
    elif kind == "text" and read.text_as == "file":
        yield from whole_text(content, read)
    else:
        yield from line_rows(content, read, as_json=kind == "lines", first=split.start == 0)


def _parquet(split: InputSplit, read: ReadStep) -> Iterator[Row | Reject]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    arrow: Any = importlib.import_module("pyarrow")
    number = 0
    try:
        # opened by Python: pyarrow takes the names that are UTF-8 alone
        with open(split.path, "rb") as raw, parquet.ParquetFile(raw) as table:
            for group in range(table.num_row_groups):
                size, count = (
                    getattr(table.metadata.row_group(group), name) for name in ("total_byte_size", "num_rows")
                )
                if size > _GROUP_BYTES:
                    yield Reject(number + 1, "too long", f"a row group of {size:,} bytes, {count:,} rows")
                    number += count
                    continue
                for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False):
                    yield from _table_rows(batch, number + 1, read)
                    number += batch.num_rows
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield Reject(number + 1, "file damaged", f"{_first_line(error)}; all rows before are read")


def _table_rows(batch: Any, first: int, read: ReadStep) -> Iterator[Row | Reject]:
    """The rows of a part of a table, by number; one value after the other where there are some that are not sound."""
    try:
        found = batch.to_pylist()
    except _NOT_HELD:
        pass
    else:
        yield from (Row(number, values) for number, values in enumerate(found, first))
        return
    for number, values in enumerate(zip(*batch.columns, strict=True), first):
        try:
            yield Row(number, {name: _value(each, read) for name, each in zip(batch.schema.names, values, strict=True)})
        except UnicodeDecodeError as error:
            yield not_encoded(error, number, "utf-8")


def _value(stored: Any, read: ReadStep) -> Any:
    """A value of a table as Python has it, None where Python has none. Raises UnicodeDecodeError for a damaged text."""
    try:
        return stored.as_py()
    except UnicodeDecodeError as error:
        if read.damaged == "reject":
            raise
        is_text = not importlib.import_module("pyarrow").types.is_nested(stored.type)
        return error.object.decode("utf-8", "replace") if is_text else None
    except _NOT_HELD:
        return None


def _warc(content: Iterator[bytes], read: ReadStep) -> Iterator[Row | Reject]:
    archive: Any = _library("warcio.archiveiterator")
    failed: Any = importlib.import_module("warcio.exceptions").ArchiveLoadFailed
    number = 0
    try:
        # Not buffered: a buffer that is being filled when the content breaks off is lost, with whole records in it.
        # What servers said is parsed in `_page`: here, a file that ends before it would be taken for a whole one.
        for record in archive.ArchiveIterator(BlockStream(content), no_record_parse=True):
            row = _page(record, number + 1, read) if record.rec_type in ("response", "conversion") else None
            if row := _cut_short(record, number + 1) or row:
                yield row
            number += 1
    except Damaged as error:
        yield broken_off(error, number + 1, "all records before are read")
    except (failed, EOFError, ValueError, OSError) as error:
        yield Reject(number + 1, "file damaged", f"{_first_line(error)}; all records before are read")


def _cut_short(record: Any, number: int) -> Reject | None:
    """What is said of a WARC record, which is read to its end here, that the file has not whole."""
    while record.raw_stream.read(_PIECE):
        pass
    if record.length is None:
        return Reject(number, "file damaged", "a record without Content-Length; all records before are read")
    if missing := record.raw_stream.limit:
        have = f"a record of {record.length - missing:,} bytes instead of {record.length:,}"
        return Reject(number, "file cut short", have)
    return None


def _page(record: Any, number: int, read: ReadStep) -> Row | Reject:
    """The text of a WARC record: as it is, or what trafilatura finds to be the main text of a page."""
    if record.rec_type == "response":
        record.http_headers = _http_headers(record)
    headers = record.rec_headers
    body = record.content_stream().read(read.max_bytes + 1)
    if len(body) > read.max_bytes:
        return Reject(number, "too long", f"a record of more than read.max_bytes = {read.max_bytes:,} bytes")
    text: str | None
    if record.rec_type == "conversion":
        try:
            text = decoded(body, read)
        except UnicodeDecodeError as error:
            return not_encoded(error, number, read.encoding)
    else:
        if refused := _no_page(record.http_headers):
            return Reject(number, "not a page", refused)
        text = _library("trafilatura").extract(body)
        if not text:
            return Reject(number, "no main text", "trafilatura finds none in the page")
    known = {"id": headers.get_header("WARC-Record-ID"), "url": headers.get_header("WARC-Target-URI")}
    named = {read.id_key: known["id"], read.url_key: known["url"], "date": headers.get_header("WARC-Date")}
    return Row(number, {read.key: text, **{key: value for key, value in named.items() if value}})


def _no_page(http_headers: Any) -> str:
    """Why a response is no page, by what the server said; nothing where it is one."""
    kind = (http_headers and http_headers.get_header("Content-Type")) or ""
    if "html" not in kind.lower():
        return f"a response of type {kind or 'unknown'}"
    status = http_headers.get_statuscode()
    return "" if status == "200" else f"status {status or 'unknown'}"


def _http_headers(record: Any) -> Any:
    """What the server said before the body, at which the record then stands; None where there is nothing."""
    try:
        return _library("warcio.statusandheaders").StatusAndHeadersParser([], verify=False).parse(record.raw_stream)
    except EOFError:
        return None


def _library(name: str) -> Any:
    """A library whose log lines, about single pages, stay off the screen; handlers of the user's own still get them."""
    for logger in _TALKERS:
        if not logging.getLogger(logger).handlers:
            logging.getLogger(logger).addHandler(logging.NullHandler())
    return importlib.import_module(name)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
