"""Documents as wholes: each stands in one row from its first token on, and rows are filled up with padding.

    [ A A A A | D D D · ]   [ B B B B B | C C · ]       A … D documents, · padding

What conversations need: cut anywhere (`rows.StreamRows`, and best-fit packing where room runs out), an answer would
lose its question. Documents are put together by best fit, the longest first (Ding et al., 2024; see `packing`), among
`TOGETHER` that follow one another, so that a row's documents lie near each other in the file. What is longer than a row
is cut, truncated or left out, as `Cut.too_long` says.
"""

from __future__ import annotations

import numpy as np

from colonnade.data.packing import DocumentSpan, in_any_order, pack_whole
from colonnade.data.rows import Cut, Flags, Integers, Readable, Rows, counted_labels

TOGETHER = 4096
"""Documents that are packed together."""
PADDING = 0
"""Token id behind the documents of a row: nothing of it counts, and nothing sees it."""


class WholeRows:
    """Rows of whole documents, by number."""

    def __init__(self, text: Readable, cut: Cut) -> None:
        self._text, self._cut = text, cut
        spans, self.num_dropped = _spans(text, cut.too_long)
        packed = [
            pack_whole(spans[first : first + TOGETHER], text.seq_length) for first in range(0, len(spans), TOGETHER)
        ]
        if cut.revision > 1:
            packed = [in_any_order(rows, number) for number, rows in enumerate(packed)]
        rows = [row for together in packed for row in together]
        self.num_tokens = sum(span.length for span in spans)
        """Without padding."""
        self._spans = np.array([span for row in rows for span in row], dtype=np.int64).reshape(-1, 2)
        self._edges = np.cumsum([0, *map(len, rows)])

    def __len__(self) -> int:
        return len(self._edges) - 1

    def row(self, index: int) -> Rows:
        """One row [1, s]. The label of a document's last token is padding, and does not count."""
        parts = [self._part(*span) for span in self._spans[self._edges[index] : self._edges[index + 1]].tolist()]
        room = self._text.seq_length - sum(len(part[0]) for part in parts)
        if room:
            padding = np.full(room, PADDING, dtype=np.int64)
            parts.append((padding, padding, np.zeros(room, dtype=bool)))
        tokens, labels, counted = (np.concatenate(columns)[None] for columns in zip(*parts, strict=True))
        documents = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
        return Rows(tokens, labels, counted, documents[None])

    def _part(self, begin: int, length: int) -> tuple[Integers, Integers, Flags]:
        """Tokens, labels and what counts, [length] each, of one span."""
        behind = begin + length
        goes_on = behind < self._text.num_tokens and not len(self._text.documents(behind, behind + 1))
        both = self._text.read(begin, length + goes_on)
        tokens, labels = both[:length], both[1:]
        counted = counted_labels(self._text, begin + 1, labels, self._cut)
        if not goes_on:
            labels, counted = np.append(labels, PADDING), np.append(counted, False)
        return tokens, labels, counted


def _spans(text: Readable, too_long: str) -> tuple[list[DocumentSpan], int]:
    """What of each document is read, in the order of the text, and how many are left out."""
    if not text.num_tokens:  # of empty documents alone
        return [], 0
    s = text.seq_length
    starts = np.union1d([0], text.documents(0, text.num_tokens))
    lengths = np.diff(np.append(starts, text.num_tokens))
    kept = lengths <= s if too_long == "drop" else np.ones(len(lengths), dtype=bool)
    pairs = zip(starts[kept].tolist(), lengths[kept].tolist(), strict=True)
    if too_long != "cut":
        return [DocumentSpan(begin, min(length, s)) for begin, length in pairs], int((~kept).sum())
    cuts = [
        DocumentSpan(first, min(s, begin + length - first))
        for begin, length in pairs
        for first in range(begin, begin + length, s)
    ]
    return cuts, 0
