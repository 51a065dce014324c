"""Near-duplicates: who they are (match, group), and dropping them.

    sign    each document's shingles and bands                                with the stage `documents`
    gather  the bands of 64 tasks in one file                                 where there are more than 64 tasks
    match   documents that agree in a band ── exact Jaccard ──▶ pairs         a task each for a range of all bands
    group   pairs ── connected components ──▶ who stays, who is dropped       one task, which sees duplicates only
    remove  what is dropped of a task's documents                             with the stage `finish`

Precision is exact: every pair is compared shingle by shingle before it counts. Recall is that of the bands
(`minhash.recall`). Documents are numbered by the task that they are of (`signatures`), and a stage whose predecessor
lacks a task does not start (`needs`): which documents are dropped depends on no order in which tasks end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from numpy.typing import NDArray

from colonnade.atomic import remove_partial, written
from colonnade.corpus.components import DROP, PAIR, connecting, decided
from colonnade.corpus.matching import similar_pairs
from colonnade.corpus.minhash import Bands
from colonnade.corpus.recipe import DeduplicateStep
from colonnade.corpus.signatures import (
    FAN_IN,
    OWN,
    SignatureIndex,
    SignatureWriter,
    Source,
    band_files,
    copy_signatures,
    gather,
    gathered_path,
)
from colonnade.corpus.step import Drop, Setting, Step
from colonnade.corpus.tally import Account
from colonnade.corpus.words import WordHashes, shingles_of
from colonnade.errors import DataError

INDEX_METADATA = "index.json"
PARTIAL = ".partial"
"""Ends the name of a part of the index that a run is still making."""
_SHOWN = 40  # groups whose members are listed in the manifest
_SHOWN_MEMBERS = 8
_PAIRS = 1 << 22  # 160 MB of them are held at least


class Sign(PipelineStep):
    """Stores what de-duplication needs of each document; documents pass unchanged."""

    type, name = "colonnade", "sign"

    def __init__(self, how: DeduplicateStep, setting: Setting) -> None:
        self.how, self.setting = how, setting
        super().__init__()

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """The documents of a task."""
        writer = SignatureWriter(sign_folder(self.setting.folder), rank, Bands(self.how.bands, self.how.rows))
        hashes = WordHashes()
        try:
            for document in data or ():
                writer.add(document.id, len(document.text), shingles_of(document.text, self.how.shingle, hashes))
                yield document
        except BaseException:
            writer.abandon()
            raise
        writer.close()


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how."""

    how: DeduplicateStep
    index: tuple[str, ...]
    """Parts of the index: what earlier runs kept."""
    folder: Path
    """The folder of the result."""
    num_tasks: int
    """Of this run."""

    def sources(self) -> list[Source]:
        """All signatures: those of earlier runs, then those of this run's tasks."""
        folder = sign_folder(self.folder)
        own = (Source(OWN + task, folder, task) for task in range(self.num_tasks))
        return [*earlier_sources(self.how, self.index), *own]


class Compare(PipelineStep):
    """A step that sees the signatures of earlier runs and of all tasks of this one."""

    type = "colonnade"

    def __init__(self, name: str, comparison: Comparison) -> None:
        self.name, self.comparison = name, comparison
        super().__init__()


class Gather(Compare):
    """Sorts the bands of some tasks into one file."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Gives nothing."""
        sources = self.comparison.sources()[rank * FAN_IN : (rank + 1) * FAN_IN]
        gather(sources, gathered_path(sign_folder(self.comparison.folder), rank))
        yield from ()


class Match(Compare):
    """Compares documents that agree in a band of this task's part, and stores the pairs that are similar enough."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Gives nothing."""
        sources = self.comparison.sources()
        files = band_files(sources, sign_folder(self.comparison.folder))
        with SignatureIndex(sources) as index:
            pairs, compared = similar_pairs(index, files, rank, world_size, similarity=self.comparison.how.similarity)
            rows = [(*pair, index.length(pair[0]), index.length(pair[1])) for pair in pairs]
        with written(pairs_path(self.comparison.folder, rank).with_suffix(".json")) as stream:
            stream.write(json.dumps({"compared": compared}).encode())
        with written(pairs_path(self.comparison.folder, rank)) as stream:
            stream.write(np.array(rows, PAIR).tobytes())
        yield from ()


class Group(Compare):
    """Decides for all groups of near-duplicates which document stays."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Gives nothing."""
        folder = self.comparison.folder
        found = decided(read_pairs(folder, self.comparison.num_tasks), keep=self.comparison.how.keep)
        with written(drops_path(folder)) as stream:
            stream.write(found.drops().tobytes())
        with SignatureIndex(self.comparison.sources()) as index:
            shown = [
                [index.identity(member) for member in members] for members in found.first_groups(_SHOWN, _SHOWN_MEMBERS)
            ]
        with written(folder / "state" / "groups.json") as stream:
            content = {"sizes": found.sizes(), "groups": shown, "similar": len(found.members)}
            stream.write(json.dumps(content).encode())
        yield from ()


class RemoveDuplicates(Step):
    """Drops the documents that `Group` has decided about."""

    def __init__(self, comparison: Comparison, setting: Setting) -> None:
        self._comparison = comparison
        self._drops: dict[int, tuple[str, bool]] = {}
        super().__init__("deduplicate", setting)

    def prepare(self, rank: int) -> None:
        """Reads what is to be dropped of this task."""
        drops = sorted(drops_of(self.setting.folder, rank).tolist(), key=lambda drop: drop[1])
        with SignatureIndex(self._comparison.sources()) as index:
            self._drops = {
                document & 0xFFFFFFFF: (index.identity(stays), index.is_earlier(stays)) for document, stays in drops
            }

    def examine(self, document: Document, account: Account) -> Drop | None:
        """Drops a document whose group has a better one."""
        found = self._drops.get(document.metadata["index"])
        if found is None:
            return None
        name, earlier = found
        return Drop("near-duplicate of what an earlier run kept" if earlier else "near-duplicate", f"of {name}")


class Remember(PipelineStep):
    """Adds the signatures of the documents that this run keeps to the index."""

    type, name = "colonnade", "remember"

    def __init__(self, how: DeduplicateStep, identity: str, setting: Setting) -> None:
        self.how, self.identity, self.setting = how, identity, setting
        super().__init__()

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """The documents of a task."""
        kept = set[int]()
        for document in data or ():
            kept.add(document.metadata["index"])
            yield document
        assert self.how.index is not None, "only with an index"
        folder = index_part(self.how.index, self.identity, PARTIAL)
        bands = Bands(self.how.bands, self.how.rows)
        copy_signatures(Source(OWN + rank, sign_folder(self.setting.folder), rank), folder, sorted(kept), bands)


def publish(how: DeduplicateStep, identity: str, num_tasks: int) -> None:
    """Gives this run's part of the index its name. Does nothing the second time."""
    assert how.index is not None, "only with an index"
    partial, final = (index_part(how.index, identity, ending) for ending in (PARTIAL, ""))
    if partial.exists() and final.exists():
        shutil.rmtree(partial)
    elif partial.exists():
        remove_partial(partial)
        (partial / INDEX_METADATA).write_text(json.dumps({**index_metadata(how), "tasks": num_tasks}))
        partial.rename(final)


def index_part(index: str, identity: str, ending: str = "") -> Path:
    """Where a run's part of the index is, by the run's identity."""
    return Path(index) / f"{identity[:16]}{ending}"


def index_metadata(how: DeduplicateStep) -> dict[str, int]:
    """What signatures have to agree in to be compared."""
    return {"shingle": how.shingle, "bands": how.bands, "rows": how.rows}


def read_index_metadata(part: Path) -> dict[str, Any]:
    """What a part of the index says of itself. Raises DataError where it cannot be read."""
    try:
        found: Any = json.loads((part / INDEX_METADATA).read_bytes())
        if not isinstance(found, dict) or type(found.get("tasks")) is not int:
            raise ValueError("no JSON object with a number of tasks")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{part}, a part of deduplicate.index, cannot be read ({error}). Put it back as it was; or remove it, and "
            "begin in a new write.folder."
        ) from error
    return found


def earlier_sources(how: DeduplicateStep, index: Sequence[str]) -> list[Source]:
    """The signatures of what earlier runs kept, in the order of the index's parts."""
    found: list[tuple[Path, int]] = []
    for name in index:
        folder = Path(str(how.index)) / name
        found += [(folder, task) for task in range(read_index_metadata(folder)["tasks"])]
    return [Source(place, folder, task) for place, (folder, task) in enumerate(found)]


def read_pairs(folder: Path, num_tasks: int) -> NDArray[Any]:
    """PAIRs of all match tasks, as many as connect the same documents. Raises DataError, with the tasks' numbers, where
    some are missing.

    Two documents that are much alike agree in most bands, and each task that has one of these stores the pair: so they
    are reduced as they are read, and what is held grows with the documents.
    """
    paths = [pairs_path(folder, task) for task in range(num_tasks)]
    if missing := [path.stem for path in paths if not path.exists()]:
        raise DataError(f"the pairs of {len(missing)} match tasks are missing: {', '.join(missing[:10])}.")
    kept, waiting, num_waiting = np.empty(0, PAIR), list[NDArray[Any]](), 0
    for path in paths:
        waiting.append(np.fromfile(path, PAIR))
        num_waiting += len(waiting[-1])
        if num_waiting > max(_PAIRS, len(kept)):
            kept, waiting, num_waiting = connecting(np.concatenate([kept, *waiting])), [], 0
    return np.concatenate([kept, *waiting])


def drops_of(folder: Path, task: int) -> NDArray[Any]:
    """DROP: what is dropped of one task's documents."""
    path, edges = drops_path(folder), [(OWN + each) << 32 for each in (task, task + 1)]
    if path.stat().st_size == 0:  # mmap refuses it
        return np.empty(0, DROP)
    drops = np.memmap(path, DROP, mode="r")
    start, stop = (_first_at(drops, edge) for edge in edges)
    return np.array(drops[start:stop])


def _first_at(drops: NDArray[Any], edge: int) -> int:
    low, high = 0, len(drops)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if drops[middle]["document"] < edge else (low, middle)
    return low


def sign_folder(folder: Path) -> Path:
    """Where a run keeps its signatures."""
    return folder / "state" / "signatures"


def pairs_path(folder: Path, task: int) -> Path:
    """Where a match task stores its pairs."""
    return folder / "state" / "pairs" / f"{task:05d}.pairs"


def drops_path(folder: Path) -> Path:
    """Where it says which documents are dropped, by their number."""
    return folder / "state" / "drops.bin"
