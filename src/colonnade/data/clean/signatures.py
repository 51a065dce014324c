"""What de-duplication keeps of each document, on disk: a folder's tasks, or what earlier runs kept (the index).

    TASK.bands       [documents · bands] of (number of the band, document), sorted
    TASK.shingles    the shingle sets of all documents, one after the other
    TASK.offsets     [documents + 1] where each set begins
    TASK.lengths     [documents] characters
    TASK.ids         ids, one JSON string a line

All arrays are read where they lie (memory-mapped); a match task reads only its part of each `.bands`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colonnade.data.clean.minhash import Bands
from colonnade.data.clean.tally import written
from colonnade.data.clean.words import Hashes

ENTRY = np.dtype([("band", "<u8"), ("document", "<u4")])


class SignatureWriter:
    """Stores the signatures of one task's documents, in order."""

    def __init__(self, folder: Path, task: int, bands: Bands) -> None:
        self._folder, self._task, self._bands = folder, task, bands
        self._open = ExitStack()
        self._shingles = self._open.enter_context(written(signature_path(folder, task, "shingles")))
        self._numbers: list[Hashes] = []
        self._lengths: list[int] = []
        self._offsets = [0]
        self._ids: list[str] = []

    def add(self, identity: str, length: int, shingles: Hashes) -> None:
        """One document more."""
        self._numbers.append(self._bands.of(shingles))
        self.add_known(identity, length, shingles)

    def add_known(self, identity: str, length: int, shingles: Hashes) -> None:
        """One document more whose bands are given to `close`."""
        self._shingles.write(shingles.tobytes())
        self._offsets.append(self._offsets[-1] + len(shingles))
        self._lengths.append(length)
        self._ids.append(identity)

    def close(self, entries: NDArray[Any] | None = None) -> None:
        """Writes everything, the bands last: they say that the rest is there."""
        self._open.close()
        for name, array in (("offsets", np.array(self._offsets, "<i8")), ("lengths", np.array(self._lengths, "<i8"))):
            _store(signature_path(self._folder, self._task, name), array.tobytes())
        text = "".join(f"{json.dumps(identity)}\n" for identity in self._ids)
        _store(signature_path(self._folder, self._task, "ids"), text.encode())
        if entries is None:
            entries = np.empty(len(self._numbers) * self._bands.num_bands, ENTRY)
            if self._numbers:
                entries["band"] = np.concatenate(self._numbers)
            entries["document"] = np.repeat(np.arange(len(self._numbers)), self._bands.num_bands)
            entries = entries[np.lexsort((entries["document"], entries["band"]))]
        _store(signature_path(self._folder, self._task, "bands"), entries.tobytes())

    def abandon(self) -> None:
        """Leaves nothing behind."""
        self._open.pop_all()
        self._shingles.close()


class Signatures:
    """The signatures of one task, as they lie on disk."""

    def __init__(self, folder: Path, task: int) -> None:
        self._folder, self._task = folder, task
        self.offsets = _mapped(signature_path(folder, task, "offsets"), "<i8")
        self.lengths = _mapped(signature_path(folder, task, "lengths"), "<i8")
        self._shingles = _mapped(signature_path(folder, task, "shingles"), "<u8")
        self._entries = _mapped(signature_path(folder, task, "bands"), ENTRY)

    def __len__(self) -> int:
        return len(self.lengths)

    def shingles(self, document: int) -> Hashes:
        """A document's shingle set, sorted."""
        return self._shingles[self.offsets[document] : self.offsets[document + 1]]

    def entries(self, part: int, num_parts: int) -> NDArray[Any]:
        """The (band, document) whose bands fall into one of equal parts of all numbers."""
        edges = [np.uint64(min((1 << 64) * each // num_parts, (1 << 64) - 1)) for each in (part, part + 1)]
        start, stop = np.searchsorted(self._entries["band"], edges)
        return self._entries[start : len(self._entries) if part + 1 == num_parts else stop]

    def ids(self, wanted: Collection[int]) -> dict[int, str]:
        """The ids of some documents."""
        found: dict[int, str] = {}
        if wanted:
            with signature_path(self._folder, self._task, "ids").open() as lines:
                found = {index: json.loads(line) for index, line in enumerate(lines) if index in wanted}
        return found

    def copy(self, folder: Path, task: int, documents: Sequence[int], bands: Bands) -> None:
        """Stores the signatures of some of the documents, in this order, in another folder."""
        writer = SignatureWriter(folder, task, bands)
        ids = self.ids(set(documents))
        for document in documents:
            writer.add_known(ids[document], int(self.lengths[document]), self.shingles(document))
        new = np.full(len(self), -1, np.int64)
        new[list(documents)] = np.arange(len(documents))
        entries = np.array(self._entries[new[self._entries["document"]] >= 0])
        entries["document"] = new[entries["document"]]
        writer.close(entries)


def signature_path(folder: Path, task: int, name: str) -> Path:
    """Where one array of a task is stored."""
    return folder / f"{task:05d}.{name}"


def stored_tasks(folder: Path) -> list[int]:
    """The tasks whose signatures are in a folder."""
    return sorted(int(path.stem) for path in folder.glob("*.bands"))


def _store(path: Path, content: bytes) -> None:
    with written(path) as stream:
        stream.write(content)


def _mapped(path: Path, dtype: Any) -> NDArray[Any]:
    if path.stat().st_size == 0:  # mmap refuses it
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")
