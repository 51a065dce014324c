"""Sliding windows: each token once, with its context, as in the table of the docstring."""

from hypothesis import given
from hypothesis import strategies as st

from colonnade.evaluation.windows import Window, num_windows, window_at

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
