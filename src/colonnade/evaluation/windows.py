"""Sliding windows over a long text: each token is scored once, with as much before it as the model can read.

    seq_length = 6, stride = 2        scored: =      context only: -

    inputs     0 1 2 3 4 5 6 7 8 9
    window 0   = = = = = =
    window 1       - - - - = =
    window 2           - - - - = =        each scored position predicts the token behind it

From window 1 on, a scored token has at least seq_length − stride + 1 tokens before it. stride = seq_length reads every
token once and gives the first of each window little context; the Megatron-LM paper (appendix E) slides 1024 positions
by 32.
Pure arithmetic.
"""

from typing import NamedTuple


class Window(NamedTuple):
    """Reads the input positions start … stop, of which scored … stop count."""

    start: int
    scored: int
    stop: int


def num_windows(num_tokens: int, seq_length: int, stride: int) -> int:
    """Windows that score the tokens 1 … num_tokens − 1 of a text."""
    return 1 + max(0, -(-(num_tokens - 1 - seq_length) // stride))


def window_at(index: int, num_tokens: int, seq_length: int, stride: int) -> Window:
    """Window number `index` of a text."""
    start = index * stride
    stop = min(start + seq_length, num_tokens - 1)
    return Window(start, start + seq_length - stride if index else 0, stop)
