"""Documents between two stages: JSON lines in a compressed file a task, and the order as their number."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import zstandard
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from colonnade.atomic import written
from colonnade.corpus.progress import Progress
from colonnade.corpus.step import Setting


class Spool(PipelineStep):
    """Stores the documents of a task, numbered."""

    type, name = "colonnade", "spool"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        super().__init__()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """The same documents, `metadata["index"]` set."""
        with written(spool_path(self.setting.folder, rank)) as raw, packed(raw) as stream:
            for index, document in enumerate(data or ()):
                document.metadata["index"] = index
                stream.write(json_line({"text": document.text, "id": document.id, "metadata": document.metadata}))
                yield document


class Unspool(PipelineStep):
    """Gives the documents of a task again."""

    type, name = "colonnade", "unspool"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        super().__init__()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """The documents that were stored."""
        progress = Progress(self.setting.folder, "finish", rank)
        with spool_path(self.setting.folder, rank).open("rb") as raw:
            unpacked = zstandard.ZstdDecompressor().stream_reader(raw)
            for line in io.BufferedReader(unpacked, 1 << 20):
                progress.advance()
                yield Document(**json.loads(line, parse_constant=lambda _: None))  # earlier versions wrote NaN
        progress.close()


def spool_path(folder: Path, task: int) -> Path:
    """Where a task's documents are stored between the stages."""
    return folder / "state" / "spool" / f"{task:05d}.jsonl.zst"


def packed(raw: IO[bytes]) -> Any:
    """A stream that compresses what is written to it, and leaves `raw` open when it is closed."""
    return zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False)


def json_line(content: Any) -> bytes:
    """One line of JSON in UTF-8; with escapes only where a string is no Unicode text."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, default=str)
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(content, allow_nan=False, default=str)}\n".encode()
