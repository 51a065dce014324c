"""Sliding windows over a long text: each token is scored once, with as much before it as the model can read.

    seq_length = 6, stride = 2        scored: =      context only: -

    inputs     0 1 2 3 4 5 6 7 8 9
    window 0   = = = = = =
    window 1       - - - - = =
    window 2           - - - - = =        each scored position predicts the token behind it

From window 1 on, a scored token has at least seq_length − stride + 1 tokens before it. stride = seq_length reads every
token once and gives the first of each window little context; the Megatron-LM paper (appendix E) slides 1024 positions
by 32.
Pure arithmetic, but for making the batches.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.data.loader import Batch
from colonnade.errors import DataError


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


def window_batch(tokens: NDArray[np.integer], windows: Sequence[Window], seq_length: int, vocab_size: int) -> Batch:
    """These windows side by side. Shorter ones are filled up behind their end, which a causal model does not notice."""
    rows = np.zeros((seq_length + 1, len(windows)), dtype=np.int64)
    mask = torch.zeros(seq_length, len(windows))
    for column, window in enumerate(windows):
        length = window.stop - window.start
        rows[: length + 1, column] = tokens[window.start : window.stop + 1]
        mask[window.scored - window.start : length, column] = 1.0
    if rows.min() < 0 or rows.max() >= vocab_size:
        unknown = rows[(rows < 0) | (rows >= vocab_size)][0]
        raise DataError(
            f"the text has token id {unknown:,} near token {windows[0].start:,}, but the model's vocabulary has "
            f"{vocab_size:,} ids (0 to {vocab_size - 1:,}): it was tokenized with another tokenizer. Tokenize it with "
            "the checkpoint's own."
        )
    both = torch.from_numpy(rows)
    return Batch(both[:-1], both[1:], mask, torch.tensor([window.start for window in windows]))


def window_batches(
    tokens: NDArray[np.integer], microbatches: Sequence[range], *, seq_length: int, stride: int, vocab_size: int
) -> Iterator[Batch]:
    """A batch for each run of window numbers; tokens are read as they are needed."""
    for numbers in microbatches:
        windows = [window_at(number, len(tokens), seq_length, stride) for number in numbers]
        yield window_batch(tokens, windows, seq_length, vocab_size)
