"""Best-fit packing: documents put together so that samples are full and few documents are cut.

After Ding et al., "Fewer Truncations Improve Language Modeling" (2024): the longest document first, each into the
sample with the least room that still holds it. There the number of samples follows from the documents, so that all of
them have to be packed before the first sample is known. Here a window of consecutive tokens, as long as a number of
samples, is packed into just that many: a document that finds no room as a whole is cut to fill what room is left. So no
token is lost, nothing is padded, and any sample can be had by looking at its own window alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from colonnade.data.sampler import permute


class DocumentSpan(NamedTuple):
    """Tokens `begin … begin + length` of a window."""

    begin: int
    length: int


def pack(starts: Sequence[int], capacity: int, num_bins: int) -> list[list[DocumentSpan]]:
    """The spans of each of `num_bins` samples of `capacity` tokens, in the order of the text.

    `starts`: where documents begin in the window's `capacity · num_bins` tokens; 0 is the first.
    """
    assert starts and starts[0] == 0, "a window begins with a document, or with the rest of one"
    bins: list[list[DocumentSpan]] = [[] for _ in range(num_bins)]
    rooms = [(capacity, number) for number in range(num_bins)]  # sorted
    unplaced: list[DocumentSpan] = []
    for span in sorted(_spans(starts, capacity, capacity * num_bins), key=_longest_first):
        place = bisect_left(rooms, (span.length, -1))
        if place == len(rooms):
            unplaced.append(span)
        else:
            _put(span, rooms.pop(place), bins, rooms)
    for span in unplaced:
        _fill_with(span, bins, rooms)
    assert not rooms, "the tokens of a window fill its samples"
    return [sorted(spans) for spans in bins]


def pack_whole(spans: Sequence[DocumentSpan], capacity: int) -> list[list[DocumentSpan]]:
    """Spans that are no longer than `capacity` as wholes, in as few samples as best fit finds: the samples in the order
    in which the text begins them, each one's spans in the order of the text.
    """
    bins: list[list[DocumentSpan]] = []
    rooms: list[tuple[int, int]] = []  # sorted
    for span in sorted(spans, key=_longest_first):
        place = bisect_left(rooms, (span.length, -1))
        if place == len(rooms):
            bins.append([])
            _put(span, (capacity, len(bins) - 1), bins, rooms)
        else:
            _put(span, rooms.pop(place), bins, rooms)
    return sorted(sorted(each) for each in bins)


def in_any_order(bins: Sequence[list[DocumentSpan]], window: int) -> list[list[DocumentSpan]]:
    """The samples of a window by a permutation of its own, so that the first ones are of all lengths of documents:
    packing begins those of the longest, or of the earliest, first.
    """
    return [bins[place] for place in permute(np.arange(len(bins)), len(bins), key=(window,)).tolist()]


def _spans(starts: Sequence[int], capacity: int, total: int) -> list[DocumentSpan]:
    """Documents, those that are longer than a sample in spans of a sample each and a rest."""
    ends = [*starts[1:], total]
    return [
        DocumentSpan(begin, min(capacity, end - begin))
        for start, end in zip(starts, ends, strict=True)
        for begin in range(start, end, capacity)
    ]


def _longest_first(span: DocumentSpan) -> tuple[int, int]:
    return -span.length, span.begin


def _put(
    span: DocumentSpan, room: tuple[int, int], bins: list[list[DocumentSpan]], rooms: list[tuple[int, int]]
) -> None:
    left, number = room
    bins[number].append(span)
    if left > span.length:
        insort(rooms, (left - span.length, number))


def _fill_with(span: DocumentSpan, bins: list[list[DocumentSpan]], rooms: list[tuple[int, int]]) -> None:
    """Cut a span into the largest rooms there are: into as few spans as possible."""
    while span.length:
        room = rooms.pop()
        filled = DocumentSpan(span.begin, min(span.length, room[0]))
        _put(filled, room, bins, rooms)
        span = DocumentSpan(span.begin + filled.length, span.length - filled.length)
