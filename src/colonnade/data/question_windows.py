"""How a question's long text is read: in windows that overlap.

    text          t t t t t t t t t t
    windows       ─────────┤                each [CLS] question [SEP] text [SEP], of one length
                      ─────────┤            the next one begins `doc_stride` tokens further on
                           ─────┤           the last one has the end of the text

A token is in several windows. Answers begin with it only in the one where it has most text around it.

Source: Devlin et al., "BERT", 2019: run_squad.py, whose `doc_stride` is counted like this too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import DataError

Integers = NDArray[np.int64]
CONTROL_TOKENS = 3
"""[CLS], and [SEP] behind the question and behind the text."""


@dataclass(frozen=True)
class Windows:
    """How windows are cut."""

    doc_stride: int = 128
    """[tokens] From the beginning of one to that of the next."""
    max_query_length: int = 64
    """[tokens] Of a question; what is longer loses its end."""

    def check(self) -> None:
        """DataError for what cannot be."""
        for name, value in (("doc-stride", self.doc_stride), ("max-query-length", self.max_query_length)):
            if value < 1:
                raise DataError(f"--{name} {value} leaves nothing to read. Use 1 or more.")

    def counts(self, questions: Integers, texts: Integers, length: int) -> Integers:
        """Windows [n] of `length` tokens, of questions and texts of so many tokens, [n] each.

        0 where the question leaves no room for text.
        """
        room = length - CONTROL_TOKENS - questions
        step = np.clip(room, 1, self.doc_stride)
        further = -(-np.maximum(texts - room, 0) // step)
        return np.where(room < 1, 0, 1 + further)

    def ranges(self, question: int, text: int, length: int) -> list[range]:
        """The tokens of the text that each window has. None where the question leaves no room for any."""
        number = int(self.counts(np.array(question), np.array(text), length))
        room = length - CONTROL_TOKENS - question
        step = min(room, self.doc_stride)
        return [range(index * step, min(index * step + room, text)) for index in range(number)]


def most_context(windows: Sequence[range]) -> list[NDArray[np.bool_]]:
    """Of each window, for each of its tokens, whether no other window has more text around it: the smaller of what
    there is on both sides, and of equals the longer window, then the first.
    """
    size = max((window.stop for window in windows), default=0)
    best, most = np.full(size, -1), np.full(size, -np.inf)
    for number, window in enumerate(windows):
        inside = np.arange(window.start, window.stop)
        around = np.minimum(inside - window.start, window.stop - 1 - inside) + 0.01 * len(window)
        more = inside[around > most[inside]]
        best[more], most[more] = number, around[more - window.start]
    return [best[window.start : window.stop] == number for number, window in enumerate(windows)]
