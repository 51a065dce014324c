"""How long flat buffers are: integers, without torch."""

from collections.abc import Iterable

ALIGNMENT = 16
"""[elements] Every weight, and every rank's slice, starts on a cache line."""


def up(number: int, multiple: int) -> int:
    """`number` rounded up to a multiple."""
    return -(-number // multiple) * multiple


def weights_length(sizes: Iterable[int]) -> int:
    """[elements] Weights of these sizes behind one another, each aligned."""
    return sum(up(size, ALIGNMENT) for size in sizes)


def buffer_length(sizes: Iterable[int], dp: int) -> int:
    """[elements] The buffer that holds them, which `dp` ranks can share in aligned slices."""
    return up(weights_length(sizes), ALIGNMENT * dp)
