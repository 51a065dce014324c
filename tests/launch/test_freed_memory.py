"""What glibc is asked to do with freed memory, and that others are left alone."""

from types import SimpleNamespace

import pytest

from colonnade.launch import freed_memory
from colonnade.launch.freed_memory import keep_freed_memory


def test_glibc_keeps_freed_blocks_of_up_to_32_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their numbers in malloc.h: neither are they mapped one by one, nor is the end of the heap given back."""
    asked = dict[int, int]()
    library = SimpleNamespace(mallopt=asked.__setitem__)
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: library)
    keep_freed_memory()
    assert asked == {-3: 32 << 20, -1: (1 << 31) - 1}


@pytest.mark.parametrize("is_there", [True, False])
def test_other_c_libraries_stay_as_they_are(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be none, and one may have no mallopt."""
    asked = list[object]()

    def load(name: object) -> object:
        asked.append(name)
        if not is_there:
            raise OSError("no such library")
        return SimpleNamespace()

    monkeypatch.setattr(freed_memory.ctypes, "CDLL", load)
    keep_freed_memory()
    assert asked == [None] * 2, "for each of the two settings"
