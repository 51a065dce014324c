"""What glibc's allocator does with freed memory. Other C libraries, which have no `mallopt`, stay as they are."""

import ctypes

_M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt, from malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks of up to 32 MB for the next tensors instead of handing each back to the system.

    Else every activation above a threshold costs a page fault for each 4 KB, every time it is made (figures:
    docs/design/11-freed-memory.md).
    """
    set_malloc(M_MMAP_THRESHOLD, 32 << 20)  # larger blocks, few and long, go back as before
    set_malloc(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def set_malloc(parameter: int, value: int) -> None:
    """Set a parameter of glibc's memory allocator for this process, where the C library is glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(parameter, value)
