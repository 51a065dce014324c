"""The list of rows that could not be used, beside the token file that was made of the others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from colonnade.atomic import partial_path, put_on_disk
from colonnade.corpus.documents import Rejected
from colonnade.data.sidecar import sidecar_path
from colonnade.errors import DataError, names

_EXAMPLES = 10


def rejected_path(prefix: str | Path) -> Path:
    """Where the rejected lines of a prefix are listed, one JSON object a line: file, line, reason."""
    return Path(f"{prefix}.rejected.jsonl")


def check_inputs(prefix: str | Path, inputs: Iterable[Path]) -> None:
    """Raises DataError if one of the inputs is a file that is written beside the token file."""
    written = [own for own in (sidecar_path(prefix), rejected_path(prefix)) if own.exists()]
    for path in inputs:
        for own in written:
            if path.samefile(own):
                raise DataError(f"--output {prefix} writes {own}, which is read here. Choose another output.")


class RejectedList:
    """The list of rejected lines on disk, under a temporary name until the token file is whole; no list if none was."""

    def __init__(self, prefix: str) -> None:
        self.count, self.examples = 0, list[Rejected]()
        self._path = rejected_path(prefix)
        self._partial = partial_path(self._path)
        self._stream: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def add(self, lines: Iterable[Rejected]) -> None:
        """Append some; the first few are kept in `examples`."""
        with names(self._path):
            for line in lines:
                self._stream = self._stream or self._partial.open("w", encoding="utf-8")
                self._stream.write(json.dumps({"file": line.file, "line": line.line, "reason": line.reason}) + "\n")
                self.count += 1
                if self.count <= _EXAMPLES:
                    self.examples.append(line)

    def put_on_disk(self) -> None:
        """All that was added: before the token file has its names, while nothing of it need be left."""
        if self._stream is not None:
            with names(self._path):
                put_on_disk(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._partial.unlink(missing_ok=True)
        if self._stream is not None:
            with suppress(OSError) if kind is not None else names(self._path):  # a full disk may refuse the rest of it
                self._stream.close()
        if kind is None and self.count:
            self._partial.replace(self._path)
        elif kind is None:
            self._path.unlink(missing_ok=True)
