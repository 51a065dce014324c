"""Which of several alike cases run in the default suite: the others are slow, and run with `make test-all`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest


def first_fast(cases: Sequence[Any], fast: int = 1) -> list[Any]:
    """The cases of a `parametrize`, with all but the first few left to the slow suite."""
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[fast:]]
    return [*cases[:fast], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]


def leave_out(items: Sequence[pytest.Item]) -> None:
    """Mark as slow all cases of a test with the mark `one_in(n)` but the first, and each that is n further."""
    seen = Counter[str]()
    for item in items:
        mark, name = item.get_closest_marker("one_in"), item.nodeid.partition("[")[0]
        if mark is None or item.get_closest_marker("slow") is not None:
            continue
        if seen[name] % mark.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[name] += 1
