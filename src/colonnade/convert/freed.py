"""Freed memory goes back to the system at once, so that what a conversion takes is what it holds.

glibc raises the size from which blocks are mapped one by one as such blocks are freed, up to 32 MB, and keeps smaller
ones for later: of tensors of many sizes in turn, hundreds of MB pile up. Set by hand, the size stays.
"""

from colonnade.launch.freed_memory import M_MMAP_THRESHOLD, set_malloc

_SMALLEST = 1 << 20  # bytes


def give_back_freed_memory() -> None:
    """Of blocks from 1 MB on. Other C libraries stay as they are."""
    set_malloc(M_MMAP_THRESHOLD, _SMALLEST)
