"""Which of several alike cases run in the default suite."""

from collections.abc import Sequence
from typing import Any

import pytest


def first_fast(cases: Sequence[Any], fast: int = 1) -> list[Any]:
    """The cases of a `parametrize`, with all but the first few left to the slow suite."""
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[fast:]]
    return [*cases[:fast], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]
