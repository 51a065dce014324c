"""Rows of tables: TSV as GLUE and `datasets` write it, JSON and Parquet, each with the line that it stands on."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from colonnade.corpus.documents import Rejected
from colonnade.corpus.rows import HALF_PAIR, SURROGATE
from colonnade.errors import DataError, not_installed

OTHER_FORM = "Convert it to one of them, or rename it if it is one already."
"""What to do about a file whose name ends otherwise."""
NOT_THIS = "It may be of another format, or cut off: name the format that it has, or copy it again from its source."
"""What to do about a file that does not begin to be what its format says."""
_VALUE = re.compile(r'(?:^|\t)("(?:[^"]|"")*"|[^"\t\n]*)')


class Row(NamedTuple):
    """One row of a table."""

    path: Path
    line: int
    """Counted from 1; in a .parquet, and in a .json that is one object or list, the number of the record."""
    values: Mapping[str, Any]

    def rejected(self, reason: str) -> Rejected:
        """Why this row is no example."""
        return Rejected(str(self.path), self.line, reason)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line from 1, text without its ending) of each line that is not blank. DataError for what is no UTF-8."""
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield number, line.rstrip("\r\n")


def tsv_rows(path: Path, headless: Sequence[str] | None = None) -> Iterator[Row | Rejected]:
    """Rows of tab-separated values. The first line names the columns. Quotes mean nothing, but in what `datasets`
    exports.

    `headless`: the columns of a file whose first line names none of them; it is told from others by that.
    """
    columns: list[str] | None = None
    plain = ((number, line.split("\t")) for number, line in read_lines(path))
    for number, values in _quoted_rows(path) if _is_exported(path) else plain:
        if columns is None:
            begins_at_once = headless is not None and not set(values) & set(headless)
            columns = list(headless or []) if begins_at_once else values
            if not begins_at_once:
                continue
        if len(values) == len(columns):
            yield Row(path, number, dict(zip(columns, values, strict=True)))
        else:
            yield Rejected(str(path), number, f"{len(values)} columns, where the table has {len(columns)}")


def json_rows(path: Path) -> Iterator[Row | Rejected]:
    """Records of a .json, an object of objects or a list of them, or of a .jsonl, one a line, as `datasets` writes them
    into a .json too.
    """
    if path.suffix == ".jsonl" or _has_lines(path):
        for number, line in read_lines(path):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Rejected(str(path), number, f"no JSON ({error})")
                continue
            yield _record(path, number, record)
        return
    found = whole_json(path)
    if isinstance(found, dict) and found and not any(isinstance(each, dict) for each in found.values()):
        found = [found]  # one line
    records = found.values() if isinstance(found, dict) else found
    if not isinstance(records, list) and not isinstance(found, dict):
        raise DataError(f"{path} holds {type(found).__name__}, not an object or a list of records.")
    for number, record in enumerate(records, 1):
        yield _record(path, number, record)


def parquet_rows(path: Path) -> Iterator[Row | Rejected]:
    """Records of a Parquet file. DataError for what is none, or where no package reads it."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(not_installed(str(path), "pyarrow")) from error
    number = 0
    try:
        with path.open("rb") as raw, parquet.ParquetFile(raw) as table:
            for batch in table.iter_batches(use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    yield Row(path, number, record)
    except (importlib.import_module("pyarrow").ArrowException, ValueError, OSError) as error:
        raise DataError(f"{path}, behind record {number:,}: no Parquet ({error}). {NOT_THIS}") from error


def whole_json(path: Path) -> Any:
    """The content of a .json. DataError, with the line, for what is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno:,}: no JSON ({error.msg}). {NOT_THIS}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error}. Copy it again from its source, or convert it.") from error
    except (ValueError, RecursionError) as error:  # an integer of more digits than Python converts; too many brackets
        raise DataError(f"{path}: no JSON ({error}). {NOT_THIS}") from error


def unwritable(content: Any) -> str | None:
    """Why what JSON holds cannot be written as UTF-8; None where it can."""
    try:
        return HALF_PAIR if SURROGATE.search(json.dumps(content, ensure_ascii=False)) else None
    except RecursionError:
        return "nested too deeply"


def _record(path: Path, number: int, record: Any) -> Row | Rejected:
    if not isinstance(record, dict):
        return Rejected(str(path), number, f"{type(record).__name__} in the place of an object")
    reason = unwritable(record)
    return Row(path, number, record) if reason is None else Rejected(str(path), number, reason)


def _lines(path: Path) -> Iterator[str]:
    """With their endings. DataError for what is no UTF-8."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error}. Copy it again from its source, or convert it.") from error


def _is_exported(path: Path) -> bool:
    """Whether a table is Hugging Face's, which has a column that none of GLUE's own has, and all of it as csv writes
    it.
    """
    try:
        rows = _quoted_rows(path)
        return "idx" in next(rows, (0, []))[1] and all(rows)
    except ValueError:
        return False


def _quoted_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line from 1, values) of rows in which values are quoted that have to be; ValueError where one is otherwise."""
    row, first, is_open = "", 1, False
    for number, line in enumerate(_lines(path), 1):
        row += line
        is_open ^= line.count('"') % 2 == 1
        if is_open:
            continue
        written = row.rstrip("\r\n")
        values = _VALUE.findall(written)
        if "\t".join(values) != written or any(_needless(value) for value in values):
            raise ValueError(f"line {first} is written otherwise")
        if written:
            yield first, [value[1:-1].replace('""', '"') if value[:1] == '"' else value for value in values]
        row, first = "", number + 1
    if row:
        raise ValueError(f"the quotes of line {first} have no end")


def _needless(value: str) -> bool:
    """Whether a value is in quotes without need."""
    return value[:1] == '"' and not any(mark in value[1:-1] for mark in '\t"\r\n')


def _has_lines(path: Path) -> bool:
    """Whether a .json has one behind the other: no whole one begins with a line that is one."""
    lines = (line for _, line in read_lines(path))
    try:
        json.loads(next(lines, ""))
    except (ValueError, RecursionError):
        return False
    return any(lines)
