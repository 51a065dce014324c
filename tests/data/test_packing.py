"""Best-fit packing: every token once, every sample full, few documents cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data.packing import DocumentSpan, pack


@given(st.integers(1, 30), st.integers(1, 12), st.data())
def test_samples_are_full_and_hold_every_token_once(capacity: int, num_bins: int, data: st.DataObject) -> None:
    total = capacity * num_bins
    starts = sorted({0, *data.draw(st.lists(st.integers(0, total - 1), max_size=20))})
    bins = pack(starts, capacity, num_bins)
    assert [sum(span.length for span in spans) for spans in bins] == [capacity] * num_bins
    tokens = sorted(token for spans in bins for begin, length in spans for token in range(begin, begin + length))
    assert tokens == list(range(total))
    document_of = np.searchsorted(starts, np.arange(total), side="right")
    for spans in bins:
        assert spans == sorted(spans)
        assert all(len(set(document_of[begin : begin + length])) == 1 for begin, length in spans)


def test_documents_that_fit_are_whole() -> None:
    assert pack([0, 6, 10, 13, 17], 10, 2) == [
        [DocumentSpan(0, 6), DocumentSpan(6, 4)],
        [DocumentSpan(10, 3), DocumentSpan(13, 4), DocumentSpan(17, 3)],
    ]


def test_long_documents_fill_samples_and_leave_a_rest() -> None:
    assert pack([0, 25], 10, 3) == [
        [DocumentSpan(0, 10)],
        [DocumentSpan(10, 10)],
        [DocumentSpan(20, 5), DocumentSpan(25, 5)],
    ]


def test_a_document_that_fits_nowhere_goes_into_the_largest_rooms() -> None:
    """Nines and sevens leave rooms of 1, 1, 3 and 3; the first four is cut once, not twice."""
    bins = pack([0, 9, 18, 25, 32, 36], 10, 4)
    assert sorted(begin for spans in bins for begin, _ in spans if 32 <= begin < 36) == [32, 35]


def test_far_fewer_documents_are_cut_than_in_a_stream() -> None:
    lengths = (
        np.random.default_rng(0).lognormal(5.8, 1.0, 4_000).astype(int) + 1
    )  # 330 tokens in the median, as web pages
    ends = np.cumsum(lengths)
    capacity, num_bins = 1_024, 128
    starts = [0, *ends[ends < capacity * num_bins].tolist()]
    packed = pack(starts, capacity, num_bins)
    whole = {span for spans in packed for span in spans}
    fitting = [(start, end) for start, end in pairwise(starts) if end - start <= capacity]
    cut_packed = sum(DocumentSpan(start, end - start) not in whole for start, end in fitting)
    cut_stream = sum(start // capacity != (end - 1) // capacity for start, end in fitting)
    assert cut_packed < 0.1 * cut_stream
