"""Rows of tables: TSV as GLUE writes it, JSON and Parquet, each with the line that it stands on."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from colonnade.corpus.documents import Rejected
from colonnade.corpus.rows import HALF_PAIR, SURROGATE
from colonnade.errors import DataError

OTHER_FORM = "Convert it to one of them, or rename it if it is one already."
"""What to do about a file whose name ends otherwise."""
NOT_THIS = "It may be of another format, or cut off: name the format that it has, or copy it again from its source."
"""What to do about a file that does not begin to be what its format says."""


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
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error}. Copy it again from its source, or convert it.") from error


def tsv_rows(path: Path, headless: Sequence[str] | None = None) -> Iterator[Row | Rejected]:
    """Rows of tab-separated values, in which quotes mean nothing. The first line names the columns.

    `headless`: the columns of a file whose first line names none of them; it is told from others by that.
    """
    columns: list[str] | None = None
    for number, line in read_lines(path):
        values = line.split("\t")
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
    """Records of a .json, an object of objects or a list of them, or of a .jsonl, one a line."""
    if path.suffix == ".jsonl":
        for number, line in read_lines(path):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Rejected(str(path), number, f"no JSON ({error})")
                continue
            yield _record(path, number, record)
        return
    found = whole_json(path)
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
        raise DataError(f"{path} is read by pyarrow, which is not installed. Run `pip install pyarrow`.") from error
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
