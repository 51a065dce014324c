"""Sliding windows: each token once, with its context, as in the table of the docstring."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.errors import DataError
from colonnade.evaluation.windows import Window, num_windows, window_at, window_batch, window_batches

LENGTHS = st.integers(1, 9).flatmap(lambda seq_length: st.tuples(st.just(seq_length), st.integers(1, seq_length)))


def all_windows(num_tokens: int, seq_length: int, stride: int) -> list[Window]:
    count = num_windows(num_tokens, seq_length, stride)
    return [window_at(index, num_tokens, seq_length, stride) for index in range(count)]


def test_the_example_of_the_docstring() -> None:
    assert all_windows(11, 6, 2) == [Window(0, 0, 6), Window(2, 6, 8), Window(4, 8, 10)]


@given(st.integers(2, 40), LENGTHS)
def test_each_token_is_scored_once_with_its_context(num_tokens: int, lengths: tuple[int, int]) -> None:
    seq_length, stride = lengths
    scored = []
    for window in all_windows(num_tokens, seq_length, stride):
        assert 0 < window.stop - window.start <= seq_length
        for position in range(window.scored, window.stop):
            assert position - window.start >= (seq_length - stride if window.start else 0)
            scored.append(position)
    assert scored == list(range(num_tokens - 1))


@given(st.integers(2, 40), LENGTHS, st.integers(1, 5))
def test_batches_hold_what_the_windows_say(num_tokens: int, lengths: tuple[int, int], batch_size: int) -> None:
    seq_length, stride = lengths
    tokens = np.arange(100, 100 + num_tokens, dtype=np.uint16)
    count = num_windows(num_tokens, seq_length, stride)
    numbers = [range(first, min(first + batch_size, count)) for first in range(0, count, batch_size)]
    labels = []
    for batch in window_batches(tokens, numbers, seq_length=seq_length, stride=stride, vocab_size=200):
        for column in range(batch.tokens.shape[1]):
            scored = batch.loss_mask[:, column].bool()
            labels += batch.labels[:, column][scored].tolist()
            assert (batch.labels[:, column][scored] == batch.tokens[:, column][scored] + 1).all()
    assert labels == list(range(101, 100 + num_tokens))


def test_a_token_of_another_vocabulary_is_named() -> None:
    tokens = np.array([1, 2, 9, 3])
    with pytest.raises(DataError, match="token id 9 near token 0, but the model's vocabulary has 9"):
        window_batch(tokens, all_windows(4, 4, 4), 4, 9)
