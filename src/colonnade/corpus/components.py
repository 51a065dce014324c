"""Pairs of near-duplicates to groups, and which document of each group stays: on arrays, with no loop over documents.

Connected components by hooking and pointer jumping (Shiloach and Vishkin, "An O(log n) Parallel Connectivity
Algorithm", 1982). Memory is some 130 bytes for each document that has a near-duplicate; the others are not seen.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colonnade.corpus.signatures import OWN

PAIR = np.dtype(
    [
        ("first", "<i8"),
        ("second", "<i8"),
        ("similarity", "<f8"),
        ("first_length", "<i8"),  # characters
        ("second_length", "<i8"),
    ]
)
DROP = np.dtype([("document", "<i8"), ("stays", "<i8")])

Numbers = NDArray[np.int64]


class Decided(NamedTuple):
    """What becomes of all documents that have a near-duplicate."""

    members: Numbers
    """[documents] Their numbers, rising."""
    group: Numbers
    """[documents] Which group each is in, by the place of the group's least member in `members`."""
    stays: Numbers
    """[documents] The number of the document that stays of each one's group."""

    def drops(self) -> NDArray[np.void]:
        """DROP, by document: this run's documents that do not stay."""
        gone = (self.members != self.stays) & (self.members >> 32 >= OWN)
        found = np.empty(int(gone.sum()), DROP)
        found["document"], found["stays"] = self.members[gone], self.stays[gone]
        return found

    def sizes(self) -> dict[str, int]:
        """How many groups there are of each size."""
        _, sizes = np.unique(self.group, return_counts=True)
        return {str(size): int(count) for size, count in zip(*np.unique(sizes, return_counts=True), strict=True)}

    def first_groups(self, count: int, members: int) -> list[list[int]]:
        """The first groups, by their least member, and the first members of each."""
        return [
            [int(each) for each in self.members[self.group == name][:members]] for name in np.unique(self.group)[:count]
        ]


class Grouped(NamedTuple):
    """Documents that have a near-duplicate."""

    members: Numbers
    """[documents] Their numbers, rising."""
    lengths: Numbers
    """[documents] Characters of each."""
    group: Numbers
    """[documents] The place in `members` of the least member of each one's group."""


def grouped(pairs: NDArray[np.void]) -> Grouped:
    """The documents that PAIRs connect, however far."""
    ends = np.concatenate([pairs["first"], pairs["second"]])
    members, places = np.unique(ends, return_inverse=True)
    first, second = np.split(places, 2)
    lengths = np.zeros(len(members), np.int64)
    lengths[first], lengths[second] = pairs["first_length"], pairs["second_length"]
    return Grouped(members, lengths, components(first, second, len(members)))


def connecting(pairs: NDArray[np.void]) -> NDArray[np.void]:
    """The fewest PAIRs that connect the same documents: each with the least of its group. None has a similarity."""
    members, lengths, group = grouped(pairs)
    others = np.flatnonzero(group != np.arange(len(members)))
    found = np.zeros(len(others), PAIR)
    found["first"], found["second"] = members[group[others]], members[others]
    found["first_length"], found["second_length"] = lengths[group[others]], lengths[others]
    return found


def decided(pairs: NDArray[np.void], *, keep: str) -> Decided:
    """Groups of the documents that PAIRs connect, however far. What stays: an earlier run's document; else the first,
    or with keep = "longest" the first of the longest."""
    members, lengths, group = grouped(pairs)
    best = group.copy()  # the least member
    if keep == "longest" and len(members):
        order = np.lexsort((np.arange(len(members)), -lengths, group))
        heads = np.flatnonzero(np.r_[True, group[order][1:] != group[order][:-1]])
        longest = np.empty(len(members), np.int64)
        longest[group[order][heads]] = order[heads]
        best = np.where(members[group] >> 32 < OWN, group, longest[group])
    return Decided(members, group, members[best])


def components(first: Numbers, second: Numbers, count: int) -> Numbers:
    """[count] The least number that each of the numbers below `count` is connected to."""
    parent = np.arange(count)
    while len(first):
        one, other = parent[first], parent[second]
        apart = one != other
        first, second, one, other = first[apart], second[apart], one[apart], other[apart]
        np.minimum.at(parent, np.maximum(one, other), np.minimum(one, other))
        while not np.array_equal(above := parent[parent], parent):
            parent = above
    return parent
