"""First step: the documents of one task's splits, and an account of every line that is none."""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Iterator
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from colonnade.corpus.formats import InputSplit, content_of, rows
from colonnade.corpus.progress import Progress
from colonnade.corpus.recipe import ReadStep
from colonnade.corpus.rows import SURROGATE, Reject, Row, broken_off, text_of, unreadable
from colonnade.corpus.step import Setting, utf8_length
from colonnade.corpus.streams import Damaged
from colonnade.corpus.tally import Account
from colonnade.corpus.tasks import stored_task


class Read(PipelineStep):
    """Gives documents; rejects go into the account of the step `read`."""

    type, name = "colonnade", "read"

    def __init__(self, read: ReadStep, setting: Setting) -> None:
        self.read, self.setting = read, setting
        super().__init__()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """The documents of the task `rank`."""
        account = Account(self.setting.folder, "read", rank, samples=self.setting.samples)
        progress = Progress(self.setting.folder, "documents", rank)
        account.tally.metadata[f"{rank:05d}"] = splits = list[dict[str, Any]]()
        for split in stored_task(self.setting.folder, rank):
            entry = _entry(split)
            splits.append(entry)
            yield from self._split(split, entry, account, progress)
        progress.close()
        account.close()

    def _split(
        self, split: InputSplit, entry: dict[str, Any], account: Account, progress: Progress
    ) -> Iterator[Document]:
        try:
            with open(split.path, "rb") as raw, content_of(split, raw, self.read) as file:
                for row in rows(split, file, self.read):
                    document = self._document(row, split)
                    if isinstance(document, Document):
                        entry["documents"] += 1
                        account.tally.left.add(document.metadata["bytes"])
                        progress.advance(file.num_bytes)
                        yield document
                    else:
                        entry["rejected"] += 1
                        self._reject(document, split, account)
                entry["sha256"] = file.finish()
                progress.add_bytes(file.num_bytes)
                if changed := _changed(raw.fileno(), split):
                    self._reject(Reject(0, "file changed while it was read", changed), split, account)
        except Damaged as error:
            self._reject(broken_off(error, 0), split, account)
        except OSError as error:
            if error.filename != split.path:  # the disk of the result, not this file
                raise
            self._reject(unreadable(error), split, account)

    def _document(self, row: Row | Reject, split: InputSplit) -> Document | Reject:
        if isinstance(row, Reject):
            return row
        text = text_of(row, self.read)
        if isinstance(text, Reject):
            return text
        values = {key: value for key, value in row.values.items() if key != self.read.key}
        try:
            return self._named(row.line, text, values, split)
        except RecursionError:
            return Reject(row.line, "not JSON", "nested too deeply")

    def _named(self, line: int, text: str, values: dict[str, Any], split: InputSplit) -> Document:
        where = f"{line}" if not split.start else f"{split.start}+{line}"
        keys = (self.read.id_key, self.read.url_key, self.read.title_key)  # two of them may be one
        identity, url, title = (_clean(values.get(key)) for key in keys)
        about = {
            "source": split.source,
            "file": split.name,
            "line": line,
            "offset": split.start,
            "url": url,
            "title": title,
            "bytes": utf8_length(text),
            "tokens": None,
            "extra": _as_json({key: value for key, value in values.items() if key not in keys}),
        }
        if identity is None:
            about["origin"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return Document(text=text, id=identity or _unicode(f"{split.name}:{where}"), metadata=about)

    def _reject(self, reject: Reject, split: InputSplit, account: Account) -> None:
        self.stat_update("dropped", f"dropped_{reject.reason}")
        where = {"file": split.name, "line": reject.line, **({"offset": split.start} if split.start else {})}
        account.drop(reject.reason, place=where, detail=reject.detail)


def _entry(split: InputSplit) -> dict[str, Any]:
    return {
        "path": split.name,
        "source": split.source,
        "start": split.start,
        "bytes": split.num_bytes,
        "documents": 0,
        "rejected": 0,
        "sha256": None,
    }


def _changed(descriptor: int, split: InputSplit) -> str:
    now = os.fstat(descriptor)
    if (now.st_size, now.st_mtime_ns) == (split.size, split.modified):
        return ""
    return f"{split.size:,} bytes when the run was planned, {now.st_size:,} now; what was read of it is kept"


def _clean(value: Any) -> str | None:
    """A value as text that can be written; None where there is none."""
    if isinstance(value, bytes):
        value = _text_or_bytes(value)
    value = _as_json(value)
    return None if value is None or value == "" else str(value)


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _as_json(value: Any) -> Any:
    """A value with what JSON has, for parsers less lenient than Python's."""
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_as_json(key): _as_json(within) for key, within in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(within) for within in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return value


def _unicode(text: str) -> str:
    """A text that can be written; what is half of a surrogate pair is replaced."""
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)
