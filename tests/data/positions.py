"""Positions of a step, written apart from the program's own."""


def rank_positions(
    start: int, *, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[range]:
    """Of each micro-batch of one dp rank, in the step whose global batch begins at `start`."""
    assert global_batch_size % (micro_batch_size * dp_size) == 0, "whole micro-batches"
    share = global_batch_size // dp_size
    begins = range(start + dp_rank * share, start + (dp_rank + 1) * share, micro_batch_size)
    return [range(begin, begin + micro_batch_size) for begin in begins]
