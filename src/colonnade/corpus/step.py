"""A step of the pipeline: documents in, documents out, an account of the difference. datatrove runs it.

What a document carries, in its `metadata`:

    source, file, line     where it is from
    url, title             if known
    bytes, tokens          of its text; tokens None until they are counted
    language               if identified
    origin                 decides the part in place of the id: of a document without one, a hash of its text as it was
                           read; of a piece, what decides that of the whole document
    extra                  the input's other keys
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from colonnade.corpus.tally import Account

MakeCounter = Callable[[], Callable[[str], int]]
"""Makes, in the process that counts, what counts the tokens of a text."""


@dataclass(frozen=True)
class Drop:
    """Why a document is dropped: one of few reasons, and what is particular to it."""

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Setting:
    """What every step of a run is given."""

    folder: Path
    """The folder of the result."""
    samples: int
    """Samples of what was dropped, for each reason and task."""


class Step(PipelineStep):
    """A step that looks at one document at a time."""

    type = "colonnade"

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.setting = name, setting
        super().__init__()

    @abstractmethod
    def examine(self, document: Document, account: Account) -> Drop | Iterable[Document] | None:
        """None: the document goes on, perhaps changed. A Drop: it does not. Documents: they go on in its place."""

    def prepare(self, rank: int) -> None:
        """Called once in each task, before the first document: load models here."""

    def finish(self, account: Account) -> None:
        """Called once in each task, behind the last document."""

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """The documents of a task that are left."""
        self.prepare(rank)
        account = Account(self.setting.folder, self.name, rank, samples=self.setting.samples)
        for document in data or ():
            yield from self._passed(document, account)
        self.finish(account)
        account.close()

    def _passed(self, document: Document, account: Account) -> Iterator[Document]:
        about, before = document.metadata, document.text
        with self.track_time():
            verdict = self.examine(document, account)
        sizes = {"num_bytes": about["bytes"], "tokens": about["tokens"]}  # tokens may have been counted just now
        account.tally.entered.add(**sizes)
        if isinstance(verdict, Drop):
            self.stat_update("dropped", f"dropped_{verdict.reason}")
            account.drop(verdict.reason, place=place(document), text=before, detail=verdict.detail, **sizes)
            return
        for each in (document,) if verdict is None else verdict:
            if each.text is not before:
                each.metadata["bytes"] = utf8_length(each.text)
            self.stat_update("forwarded")
            account.tally.left.add(each.metadata["bytes"], each.metadata["tokens"])
            yield each


def place(document: Document) -> dict[str, Any]:
    """What names a document in a list of dropped ones."""
    about = document.metadata
    return {"id": document.id, "file": about["file"], "line": about["line"]}


def utf8_length(text: str) -> int:
    """[bytes] Of a text; half a surrogate pair counts as three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
