"""What de-duplication keeps of each document, on disk: a folder's tasks, or what earlier runs kept (the index).

    TASK.bands       [documents · bands] of (number of the band, document), sorted
    TASK.shingles    the shingle sets of all documents, one after the other
    TASK.offsets     [documents + 1] where each set begins
    TASK.lengths     [documents] characters
    TASK.ids         ids, one JSON string a line
    TASK.id_offsets  [documents + 1] where each line begins
    GROUP.gathered   the bands of `FAN_IN` tasks in one file, sorted: what a match task reads where there are many tasks

Nothing is mapped and few files are open at a time, however many tasks there are: what is wanted is read from its place.

A document's number is (place << 32) + its position in the task. The tasks of earlier runs have the places from 0 on;
task t of this run has the place `OWN` + t, whichever other tasks there are.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colonnade.atomic import written
from colonnade.corpus.minhash import Bands
from colonnade.corpus.words import Hashes
from colonnade.errors import DataError

ENTRY = np.dtype([("band", "<u8"), ("document", "<u4")])
GATHERED = np.dtype([("band", "<u8"), ("document", "<i8")])
OWN = 1 << 30
FAN_IN = 64
"""[files] Tasks whose bands are gathered into one file."""
_OPEN_FILES = 64
_CACHE_BYTES = 64 << 20  # shingle sets that are kept
_GATHER_BYTES = 64 << 20  # bands that are sorted at a time


class Source(NamedTuple):
    """One task's signatures, and the place that its documents' numbers begin with."""

    place: int
    folder: Path
    task: int

    def path(self, name: str) -> Path:
        """Where one of its arrays is stored."""
        return signature_path(self.folder, self.task, name)


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
        lines = [f"{json.dumps(identity)}\n".encode() for identity in self._ids]
        starts = np.cumsum([0, *map(len, lines)])
        for name, values in (("offsets", self._offsets), ("lengths", self._lengths), ("id_offsets", starts)):
            _store(signature_path(self._folder, self._task, name), np.array(values, "<i8").tobytes())
        _store(signature_path(self._folder, self._task, "ids"), b"".join(lines))
        if entries is None:
            entries = np.empty(len(self._numbers) * self._bands.num_bands, ENTRY)
            if self._numbers:
                entries["band"] = np.concatenate(self._numbers)
            entries["document"] = np.repeat(np.arange(len(self._numbers)), self._bands.num_bands)
            entries = entries[np.lexsort((entries["document"], entries["band"]))]
        _store(signature_path(self._folder, self._task, "bands"), entries.tobytes())

    def abandon(self) -> None:
        """Leaves nothing behind."""
        error = RuntimeError("abandoned")
        self._open.__exit__(RuntimeError, error, None)


class SignatureIndex:
    """The signatures of earlier runs' tasks and of all tasks of this run. A few files are open at a time."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = {source.place: source for source in sources}
        self._files: OrderedDict[tuple[int, str], int] = OrderedDict()  # by place and array
        self._sets: OrderedDict[int, Hashes] = OrderedDict()
        self._set_bytes = 0

    def __enter__(self) -> SignatureIndex:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    @staticmethod
    def is_earlier(document: int) -> bool:
        """Whether an earlier run kept it."""
        return document >> 32 < OWN

    def shingles(self, document: int) -> Hashes:
        """A document's shingle set, sorted."""
        found = self._sets.get(document)
        if found is not None:
            self._sets.move_to_end(document)
            return found
        start, stop = self._numbers(document, "offsets", 2)
        found = np.frombuffer(self._read(document, "shingles", (stop - start) * 8, start * 8), "<u8")
        self._sets[document], self._set_bytes = found, self._set_bytes + found.nbytes
        while self._set_bytes > _CACHE_BYTES and len(self._sets) > 1:
            self._set_bytes -= self._sets.popitem(last=False)[1].nbytes
        return found

    def num_shingles(self, document: int) -> int:
        """How many shingles a document has."""
        start, stop = self._numbers(document, "offsets", 2)
        return stop - start

    def length(self, document: int) -> int:
        """[characters] Of a document's text."""
        return self._numbers(document, "lengths", 1)[0]

    def identity(self, document: int) -> str:
        """A document's id."""
        start, stop = self._numbers(document, "id_offsets", 2)
        return str(json.loads(self._read(document, "ids", stop - start, start)))

    def _numbers(self, document: int, name: str, count: int) -> list[int]:
        data = self._read(document, name, count * 8, (document & 0xFFFFFFFF) * 8)
        return [int(value) for value in np.frombuffer(data, "<i8")]

    def _read(self, document: int, name: str, size: int, start: int) -> bytes:
        place = document >> 32
        data = os.pread(self._opened(place, name), size, start)
        if len(data) != size:
            path = self.sources[place].path(name)
            raise DataError(f"{path} ends at byte {start + len(data):,}: {size:,} bytes from {start:,} on are wanted.")
        return data

    def _opened(self, place: int, name: str) -> int:
        if (place, name) in self._files:
            self._files.move_to_end((place, name))
        else:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            with _there(self.sources[place].path(name)) as stream:
                self._files[place, name] = os.dup(stream.fileno())
        return self._files[place, name]


class BandFile(NamedTuple):
    """A sorted file of bands: one task's, or those that were gathered from several."""

    path: Path
    dtype: np.dtype[Any]
    base: int
    """What is added to its numbers of documents."""

    def entries(self, part: int, num_parts: int) -> NDArray[Any]:
        """GATHERED: the (band, document) whose bands fall into one of equal parts of all numbers. DataError where the
        file ends meanwhile.
        """
        with _there(self.path) as stream:
            count = os.fstat(stream.fileno()).st_size // self.dtype.itemsize
            start, stop = (self._place(stream.fileno(), each, num_parts, count) for each in (part, part + 1))
            # all of it: one os.pread gives at most 2 GiB
            stored = np.fromfile(stream, self.dtype, stop - start, offset=start * self.dtype.itemsize)
        if len(stored) != stop - start:
            raise DataError(f"{self.path} ends behind entry {start + len(stored):,}, where {stop:,} are wanted.")
        found = np.empty(len(stored), GATHERED)
        found["band"], found["document"] = stored["band"], stored["document"].astype(np.int64) + self.base
        return found

    def _place(self, descriptor: int, part: int, num_parts: int, count: int) -> int:
        """The first entry of a part: by halving, some twenty reads of eight bytes."""
        edge, low, high = (1 << 64) * part // num_parts, 0, count
        while low < high:
            middle = (low + high) // 2
            band = int.from_bytes(os.pread(descriptor, 8, middle * self.dtype.itemsize), "little")
            low, high = (middle + 1, high) if band < edge else (low, middle)
        return low


def band_files(sources: Sequence[Source], gathered: Path) -> list[BandFile]:
    """What match tasks read: the tasks' own files, or, where there are more than FAN_IN, those that were gathered."""
    if num_gathered(len(sources)):
        return [BandFile(gathered_path(gathered, rank), GATHERED, 0) for rank in range(num_gathered(len(sources)))]
    return [BandFile(source.path("bands"), ENTRY, source.place << 32) for source in sources]


def num_gathered(num_sources: int) -> int:
    """How many files of gathered bands there are; 0 where tasks are few enough to be read one by one."""
    return 0 if num_sources <= FAN_IN else -(-num_sources // FAN_IN)


def gather(sources: Sequence[Source], path: Path) -> None:
    """Sorts the bands of some tasks into one file, a part of all numbers at a time."""
    files = [BandFile(source.path("bands"), ENTRY, source.place << 32) for source in sources]
    num_parts = 1 + sum(file.path.stat().st_size for file in files) // _GATHER_BYTES
    with written(path) as stream:
        for part in range(num_parts):
            stream.write(sorted_entries(files, part, num_parts).tobytes())


def sorted_entries(files: Sequence[BandFile], part: int, num_parts: int) -> NDArray[Any]:
    """GATHERED: what all files have in one part, by band and then by document."""
    entries = np.concatenate([np.empty(0, GATHERED), *(file.entries(part, num_parts) for file in files)])
    return entries[np.lexsort((entries["document"], entries["band"]))]


def copy_signatures(source: Source, folder: Path, documents: Sequence[int], bands: Bands) -> None:
    """Stores the signatures of some documents of a task (their positions), in this order, in another folder."""
    writer = SignatureWriter(folder, source.task, bands)
    try:
        with SignatureIndex([source]) as index:
            for document in ((source.place << 32) + position for position in documents):
                writer.add_known(index.identity(document), index.length(document), index.shingles(document))
        stored = np.fromfile(source.path("bands"), ENTRY)
        new = np.full(source.path("lengths").stat().st_size // 8, -1, np.int64)
        new[list(documents)] = np.arange(len(documents))
        entries = stored[new[stored["document"]] >= 0]
        entries["document"] = new[entries["document"]]
        writer.close(entries)
    except BaseException:
        writer.abandon()
        raise


def signature_path(folder: Path, task: int, name: str) -> Path:
    """Where one array of a task is stored."""
    return folder / f"{task:05d}.{name}"


def gathered_path(folder: Path, rank: int) -> Path:
    """Where gathered bands are stored."""
    return folder / f"{rank:05d}.gathered"


def _there(path: Path) -> IO[bytes]:
    """A file, opened. Raises DataError where it is missing."""
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: without a task's signatures duplicates would stay, and others be taken for them. "
            "Put it back. Of a run's own, remove the folder of the result and start again; of a part of "
            "deduplicate.index, remove that part, and begin in a new write.folder."
        ) from None


def _store(path: Path, content: bytes) -> None:
    with written(path) as stream:
        stream.write(content)
