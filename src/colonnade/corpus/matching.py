"""Which documents that agree in a band are near-duplicates: every pair that counts is compared shingle by shingle.

    bucket of few documents     all pairs, but those that others have connected already
    bucket of many              one of each set of shingles: pairs that share rare ones, at most MOST for each

Many documents agree in a band without being alike: pages of one template. To compare all pairs of n pages takes n²
time and finds nothing. Two sets of Jaccard similarity t or more share one of their |x| − ⌈t·|x|⌉ + 1 rarest members,
whatever is taken for rare (the prefix filter: Chaudhuri, Ganti, Kaushik, "A Primitive Operator for Similarity Joins in
Data Cleaning", 2006; Bayardo, Ma, Srikant, "Scaling Up All Pairs Similarity Search", 2007), and what all pages of a
template share is not rare. So in a bucket of more than ALL_PAIRS documents a document is compared only with those that
share one of these shingles; and of those that share one, with the first and the NEIGHBOURS before it, by size. Time and
memory are then linear in the documents. Where a rare shingle is one of up to NEIGHBOURS + 1 documents and a document
has no more than MOST such partners, that loses nothing, as long as the bucket is no more than a block of some millions
of shingles. A larger one is taken by size, in blocks that overlap by half: what is further apart than that may be lost,
unless it is equal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from colonnade.corpus.minhash import jaccard
from colonnade.corpus.signatures import BandFile, SignatureIndex, sorted_entries
from colonnade.corpus.words import Hashes

ALL_PAIRS = 64
"""[documents] Of a bucket, up to which all of its pairs are compared."""
NEIGHBOURS = 8
"""[documents] With which a document of a larger bucket is compared for each shingle."""
MOST = 64
"""[documents] With which it is compared in all: those that share the most."""
_BLOCK = 1 << 22  # shingles of a large bucket that are looked at together, at most
_COUNTERS = 1 << 20  # in which shingles are counted, by their hash
_KNOWN = 1 << 20  # pairs that are remembered not to be similar

Pairs = list[tuple[int, int, float]]


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
        return [members for members in found.values() if len(members) > 1]


class Matcher:
    """Finds the pairs that connect the near-duplicates of some buckets."""

    def __init__(self, index: SignatureIndex, similarity: float) -> None:
        self.pairs: Pairs = []
        self.num_compared = 0
        self._index, self._similarity = index, similarity
        self._groups, self._known = Groups(), set[tuple[int, int]]()

    def add(self, bucket: Sequence[int]) -> None:
        """Documents that agree in a band, rising."""
        if len(bucket) > ALL_PAIRS:
            bucket = self._unequal(bucket)
        if len(bucket) <= ALL_PAIRS:
            self._all_pairs(bucket)
            return
        for block in self._blocks(bucket):
            for first, second in likely_pairs([self._index.shingles(each) for each in block], self._similarity):
                self._connect(*sorted((block[first], block[second])))

    def _unequal(self, bucket: Sequence[int]) -> list[int]:
        """The first document of each set of shingles, with which the others are connected."""
        first = dict[bytes, int]()
        for document in bucket:
            shingles = hashlib.blake2b(self._index.shingles(document).tobytes(), digest_size=16)
            if (same := first.setdefault(shingles.digest(), document)) != document:
                self._connect(same, document)
        return list(first.values())

    def _connect(self, first: int, second: int) -> None:
        if self._groups.find(first) != self._groups.find(second):
            self._compare(first, second)

    def _all_pairs(self, bucket: Sequence[int]) -> None:
        heads: list[list[int]] = []  # members of the bucket, by group
        for document in bucket:
            for members in heads:
                if self._groups.find(members[0]) != self._groups.find(document):
                    any(self._compare(member, document) for member in members)
            heads = _regrouped(heads, document, self._groups)

    def _compare(self, first: int, second: int) -> bool:
        """Whether two documents are similar; if so, they are connected."""
        if (first, second) in self._known or self._index.is_earlier(second):  # then the first one is, too
            return False
        self.num_compared += 1
        one, other = self._index.shingles(first), self._index.shingles(second)
        found = 0.0
        if min(len(one), len(other)) >= least(self._similarity, max(len(one), len(other))):  # else they cannot be
            found = jaccard(one, other)
        if found >= self._similarity:
            self.pairs.append((first, second, found))
            self._groups.join(first, second)
            return True
        if len(self._known) >= _KNOWN:  # to forget costs time only
            self._known.clear()
        self._known.add((first, second))
        return False

    def _blocks(self, bucket: Sequence[int]) -> Iterator[list[int]]:
        """A bucket by the size of its documents, in blocks that overlap by half."""
        sizes = np.array([self._index.num_shingles(document) for document in bucket])
        order = np.argsort(sizes, kind="stable")
        half = np.cumsum(sizes[order]) // (_BLOCK // 2)
        edges = [0, *(np.flatnonzero(np.diff(half)) + 1).tolist(), len(bucket)]
        for start, stop in zip(edges, edges[2:] or edges[1:], strict=False):
            yield [bucket[place] for place in order[start:stop].tolist()]


def similar_pairs(
    index: SignatureIndex, files: Sequence[BandFile], part: int, num_parts: int, *, similarity: float
) -> tuple[Pairs, int]:
    """The verified pairs among documents that agree in a band of this part, as many as connect them; and how many
    pairs were compared. Pairs that others have connected already are not compared."""
    matcher = Matcher(index, similarity)
    for bucket in buckets(files, part, num_parts):
        matcher.add(bucket)
    return matcher.pairs, matcher.num_compared


def least(similarity: float, count: int) -> int:
    """How many of so many shingles others have to share. As floats, 0.56 of 25 are 14.000000000000002, and not 15."""
    return math.ceil(round(similarity * count, 6))


def likely_pairs(sets: Sequence[Hashes], similarity: float) -> list[tuple[int, int]]:
    """Places of sets (each sorted, none equal to another) that share rare members, the later one rising, those that
    share the most first.
    """
    counts = np.zeros(_COUNTERS, np.int64)
    for members in sets:
        counts[members % np.uint64(_COUNTERS)] += 1
    rare = list[Hashes]()
    for members in sets:
        order = np.argsort(counts[members % np.uint64(_COUNTERS)], kind="stable")
        rare.append(members[order[: len(members) - least(similarity, len(members)) + 1]])
    if not rare:
        return []
    places = np.repeat(np.arange(len(sets)), [len(each) for each in rare])
    return _sharing(np.concatenate(rare), places, len(sets))


def _sharing(members: Hashes, places: NDArray[np.int64], num_sets: int) -> list[tuple[int, int]]:
    """Pairs of places that have a member in common: neighbours and the first, at most MOST for each."""
    order = np.lexsort((places, members))
    members, places = members[order], places[order]
    starts = np.flatnonzero(np.r_[True, members[1:] != members[:-1]])
    heads = np.repeat(places[starts], np.diff(np.r_[starts, len(members)]))
    found = [heads * num_sets + places]
    for distance in range(1, min(NEIGHBOURS + 1, len(members))):
        same = members[distance:] == members[:-distance]
        found.append((places[:-distance] * num_sets + places[distance:])[same])
    keys, shared = np.unique(np.concatenate(found), return_counts=True)
    first, second = keys // num_sets, keys % num_sets
    order = np.lexsort((first, -shared, second))
    order = order[first[order] != second[order]]
    second = second[order]
    rank = np.arange(len(order)) - np.searchsorted(second, second)
    chosen = order[rank < MOST]
    return [(int(key // num_sets), int(key % num_sets)) for key in keys[chosen]]


def buckets(files: Sequence[BandFile], part: int, num_parts: int) -> Iterator[list[int]]:
    """Documents that agree in a band, rising, of which at least one is this run's."""
    entries = sorted_entries(files, part, num_parts)
    bands, documents = entries["band"], entries["document"]
    edges = np.flatnonzero(np.r_[True, bands[1:] != bands[:-1], True]) if len(bands) else np.zeros(1, np.int64)
    for start, stop in pairwise(edges.tolist()):
        if stop - start > 1 and not SignatureIndex.is_earlier(int(documents[stop - 1])):
            yield [int(each) for each in documents[start:stop]]


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
