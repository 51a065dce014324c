"""Which documents of one bucket are compared, where they are many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colonnade.corpus import matching


class Shingles:
    """Stands for a SignatureIndex, of whose documents the first is of an earlier run."""

    def __init__(self, sets: list[set[int]]) -> None:
        self._sets = [np.array(sorted(each), np.uint64) for each in sets]

    def shingles(self, document: int) -> Any:
        return self._sets[document]

    def num_shingles(self, document: int) -> int:
        return len(self._sets[document])

    def is_earlier(self, document: int) -> bool:
        return document == 0


@pytest.mark.parametrize("others", [1, matching.ALL_PAIRS])
@pytest.mark.parametrize(("earlier", "own"), [(100, 95), (95, 100), (100, 100)])
def test_a_copy_of_what_an_earlier_run_kept_is_found_whichever_is_longer(earlier: int, own: int, others: int) -> None:
    unlike = [{1_000 * number, 1_000 * number + 1} for number in range(1, others + 1)]
    sets = [set(range(earlier)), *unlike, set(range(own))]
    matcher = matching.Matcher(Shingles(sets), 0.9)  # type: ignore[arg-type]
    matcher.add(list(range(len(sets))))
    assert matcher.pairs == [(0, len(sets) - 1, min(earlier, own) / max(earlier, own))]
