"""Near-duplicates: who they are (match, group), and dropping them.

    sign    each document's shingles and bands                              with the stage `documents`
    match   documents that agree in a band ── exact Jaccard ──▶ pairs       a task each for a part of all bands
    group   pairs ── union-find ──▶ groups ──▶ who stays                    one task
    remove  the others are dropped                                          with the stage `finish`

Precision is exact: every pair is compared shingle by shingle before it counts. Recall is that of the bands
(`minhash.recall`). A document's number is (place of its task << 32) + its place in the task; the index of earlier runs
comes first, so that of two equals the earlier run's stays.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from numpy.typing import NDArray

from colonnade.data.clean.minhash import Bands, jaccard
from colonnade.data.clean.recipe import DeduplicateStep
from colonnade.data.clean.signatures import Signatures, SignatureWriter, stored_tasks
from colonnade.data.clean.step import Drop, Setting, Step
from colonnade.data.clean.tally import Account, written
from colonnade.data.clean.words import WordHashes, shingles_of

PAIR = np.dtype([("first", "<i8"), ("second", "<i8"), ("similarity", "<f8")])
INDEX_FACTS = "index.json"
_SHOWN = 40  # groups whose members are listed in the manifest


class Corpus(NamedTuple):
    """All signatures that are compared: those of earlier runs, then those of this one's tasks."""

    parts: list[Signatures]
    num_earlier: int

    def shingles(self, document: int) -> Any:
        """The shingle set of a document."""
        return self.parts[document >> 32].shingles(document & 0xFFFFFFFF)

    def is_earlier(self, document: int) -> bool:
        """Whether an earlier run kept it."""
        return document >> 32 < self.num_earlier


class Groups:
    """Union-find: sets that only ever grow together, each named by its least member."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def find(self, member: int) -> int:
        """The name of the set that a member is in."""
        root = member
        while (above := self._parent.get(root, root)) != root:
            root = above
        while (above := self._parent.get(member, member)) != root:
            self._parent[member], member = root, above
        return root

    def join(self, first: int, second: int) -> None:
        """Makes one set of two."""
        low, high = sorted((self.find(first), self.find(second)))
        self._parent.setdefault(low, low)
        self._parent[high] = low

    def sets(self) -> list[list[int]]:
        """All sets of more than one member, members rising, in the order of their least."""
        found: dict[int, list[int]] = {}
        for member in sorted(self._parent):
            found.setdefault(self.find(member), []).append(member)
        return [members for _, members in sorted(found.items()) if len(members) > 1]


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


class Match(PipelineStep):
    """Compares documents that agree in a band of this task's part, and stores the pairs that are similar enough."""

    type, name = "colonnade", "match"

    def __init__(self, how: DeduplicateStep, index: Sequence[str], setting: Setting) -> None:
        self.how, self.index, self.setting = how, tuple(index), setting
        super().__init__()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Gives nothing."""
        corpus = open_corpus(self.setting.folder, self.how, self.index)
        pairs, compared = similar_pairs(corpus, rank, world_size, similarity=self.how.similarity)
        with written(pairs_path(self.setting.folder, rank)) as stream:
            stream.write(np.array(pairs, PAIR).tobytes())
        with written(pairs_path(self.setting.folder, rank).with_suffix(".json")) as stream:
            stream.write(json.dumps({"compared": compared}).encode())
        yield from ()


class Group(PipelineStep):
    """Decides for all groups of near-duplicates which document stays."""

    type, name = "colonnade", "group"

    def __init__(self, how: DeduplicateStep, index: Sequence[str], setting: Setting) -> None:
        self.how, self.index, self.setting = how, tuple(index), setting
        super().__init__()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Gives nothing."""
        folder = self.setting.folder
        corpus = open_corpus(folder, self.how, self.index)
        pairs = read_pairs(folder)
        groups = grouped(pairs)
        stays = {member: keeper(members, corpus, self.how.keep) for members in groups for member in members}
        names = names_of(set(stays) | set(stays.values()), corpus)
        for task, part in enumerate(range(corpus.num_earlier, len(corpus.parts))):
            drops = {
                member & 0xFFFFFFFF: [names[stay], corpus.is_earlier(stay)]
                for member, stay in stays.items()
                if member >> 32 == part and member != stay
            }
            with written(drops_path(folder, task)) as stream:
                stream.write(json.dumps(drops).encode())
        with written(folder / "state" / "groups.json") as stream:
            shown = [[names[member] for member in members[:8]] for members in groups[:_SHOWN]]
            similar = len(np.unique(pairs[["first", "second"]]))
            stream.write(json.dumps({"sizes": _sizes(groups), "groups": shown, "similar": similar}).encode())
        yield from ()


class RemoveDuplicates(Step):
    """Drops the documents that `Group` has decided about."""

    def __init__(self, setting: Setting) -> None:
        self._drops: dict[str, tuple[str, bool]] = {}
        super().__init__("deduplicate", setting)

    def prepare(self, rank: int) -> None:
        """Reads what is to be dropped."""
        self._drops = json.loads(drops_path(self.setting.folder, rank).read_bytes())

    def examine(self, document: Document, account: Account) -> Drop | None:
        """Drops a document whose group has a better one."""
        found = self._drops.get(str(document.metadata["index"]))
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
        folder = Path(self.how.index) / f"{self.identity[:16]}.partial"
        bands = Bands(self.how.bands, self.how.rows)
        Signatures(sign_folder(self.setting.folder), rank).copy(folder, rank, sorted(kept), bands)


def publish(how: DeduplicateStep, identity: str) -> None:
    """Gives this run's part of the index its name. Does nothing the second time."""
    assert how.index is not None, "only with an index"
    partial, final = (Path(how.index) / f"{identity[:16]}{ending}" for ending in (".partial", ""))
    if partial.exists() and final.exists():
        shutil.rmtree(partial)
    elif partial.exists():
        (partial / INDEX_FACTS).write_text(json.dumps(index_facts(how)))
        partial.rename(final)


def index_facts(how: DeduplicateStep) -> dict[str, int]:
    """What signatures have to agree in to be compared."""
    return {"shingle": how.shingle, "bands": how.bands, "rows": how.rows}


def similar_pairs(
    corpus: Corpus, part: int, num_parts: int, *, similarity: float
) -> tuple[list[tuple[int, int, float]], int]:
    """The verified pairs among documents that agree in a band of this part, as many as connect them; and how many
    pairs were compared. Pairs that others have connected already are not compared."""
    groups, known, pairs = Groups(), set[tuple[int, int]](), list[tuple[int, int, float]]()
    for bucket in buckets(corpus, part, num_parts):
        heads: list[list[int]] = []  # members of the bucket, by group
        for document in bucket:
            for members in heads:
                if groups.find(members[0]) == groups.find(document):
                    continue
                for member in members:
                    if (member, document) in known or (corpus.is_earlier(member) and corpus.is_earlier(document)):
                        continue
                    known.add((member, document))
                    if (found := _similarity(corpus, member, document, similarity)) >= similarity:
                        pairs.append((member, document, found))
                        groups.join(member, document)
                        break
            heads = _regrouped(heads, document, groups)
    return pairs, len(known)


def buckets(corpus: Corpus, part: int, num_parts: int) -> Iterator[list[int]]:
    """Documents that agree in a band, rising, of which at least one is this run's."""
    entries = [each.entries(part, num_parts) for each in corpus.parts]
    bands = np.concatenate([each["band"] for each in entries] or [np.empty(0, np.uint64)])
    documents = np.concatenate(
        [each["document"].astype(np.int64) + (place << 32) for place, each in enumerate(entries)]
        or [np.empty(0, np.int64)]
    )
    order = np.lexsort((documents, bands))
    bands, documents = bands[order], documents[order]
    edges = np.flatnonzero(np.r_[True, bands[1:] != bands[:-1], True]) if len(bands) else np.zeros(1, np.int64)
    for start, length in zip(edges[:-1], np.diff(edges), strict=True):
        if length > 1 and not corpus.is_earlier(int(documents[start + length - 1])):
            yield [int(each) for each in documents[start : start + length]]


def grouped(pairs: NDArray[Any]) -> list[list[int]]:
    """Documents that pairs connect, however far."""
    groups = Groups()
    for first, second in zip(pairs["first"].tolist(), pairs["second"].tolist(), strict=True):
        groups.join(first, second)
    return groups.sets()


def keeper(members: Sequence[int], corpus: Corpus, rule: str) -> int:
    """Which of a group stays: an earlier run's; else the first, or the first of the longest."""
    if rule == "first" or corpus.is_earlier(members[0]):
        return members[0]
    return max(members, key=lambda member: (corpus.parts[member >> 32].lengths[member & 0xFFFFFFFF], -member))


def names_of(documents: set[int], corpus: Corpus) -> dict[int, str]:
    """The ids of documents."""
    wanted: dict[int, set[int]] = {}
    for document in documents:
        wanted.setdefault(document >> 32, set()).add(document & 0xFFFFFFFF)
    return {
        (part << 32) + place: identity
        for part, places in sorted(wanted.items())
        for place, identity in corpus.parts[part].ids(places).items()
    }


def open_corpus(folder: Path, how: DeduplicateStep, index: Sequence[str]) -> Corpus:
    """The signatures of the index's parts and of all tasks of this run."""
    earlier = [Path(str(how.index)) / name for name in index]
    own = sign_folder(folder)
    found = [Signatures(place, task) for place in earlier for task in stored_tasks(place)]
    return Corpus(found + [Signatures(own, task) for task in stored_tasks(own)], len(found))


def read_pairs(folder: Path) -> NDArray[Any]:
    """The pairs of all match tasks."""
    found = [np.fromfile(path, PAIR) for path in sorted((folder / "state" / "pairs").glob("*.pairs"))]
    return np.concatenate(found) if found else np.empty(0, PAIR)


def sign_folder(folder: Path) -> Path:
    """Where a run keeps its signatures."""
    return folder / "state" / "signatures"


def pairs_path(folder: Path, task: int) -> Path:
    """Where a match task stores its pairs."""
    return folder / "state" / "pairs" / f"{task:05d}.pairs"


def drops_path(folder: Path, task: int) -> Path:
    """Where it says which documents of a task are dropped."""
    return folder / "state" / "drops" / f"{task:05d}.json"


def _similarity(corpus: Corpus, first: int, second: int, least: float) -> float:
    one, other = corpus.shingles(first), corpus.shingles(second)
    if min(len(one), len(other)) < least * max(len(one), len(other)):  # they cannot be
        return 0.0
    return jaccard(one, other)


def _regrouped(heads: list[list[int]], document: int, groups: Groups) -> list[list[int]]:
    """The bucket's groups with one document more, which may have joined some of them."""
    own = groups.find(document)
    joined = [document]
    others: list[list[int]] = []
    for members in heads:
        if groups.find(members[0]) == own:
            joined = members + joined
        else:
            others.append(members)
    return [*others, joined]


def _sizes(groups: Sequence[Sequence[int]]) -> dict[str, int]:
    found: dict[int, int] = {}
    for members in groups:
        found[len(members)] = found.get(len(members), 0) + 1
    return {str(size): count for size, count in sorted(found.items())}
