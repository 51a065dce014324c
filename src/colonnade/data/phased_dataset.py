"""Samples that are made anew at the length of each phase of a curriculum.

What cannot be cut in pieces (two texts between control tokens) is made of less text instead. A phase goes on in its own
dataset where the run is, counted in sequences of its length: no sample of it comes twice in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from colonnade.data.curriculum import Curriculum
from colonnade.data.datasets import Dataset, Passes, Positions
from colonnade.data.rows import Integers, Samples

LENGTH_KEYS = "model.seq_length (with a curriculum, each curriculum.seq_length)"
"""What sets the length of samples: a data set knows its own alone, whichever key says it."""


class PhasedDataset:
    """The samples of a run, by their positions under a curriculum."""

    def __init__(self, datasets: Mapping[int, Dataset], curriculum: Curriculum) -> None:
        """`datasets`: of samples of every length of the curriculum."""
        self.datasets, self.curriculum, self.seq_length = datasets, curriculum, curriculum.seq_length

    def __len__(self) -> int:
        """Positions of one pass."""
        return len(self.datasets[self.seq_length]) * (self.seq_length // self.curriculum.unit)

    def rows(self, positions: Positions) -> Samples:
        """The samples at positions [b], all of one phase."""
        dataset, numbers = self._at(positions)
        return dataset.rows(numbers)

    def passes(self, positions: Positions) -> Passes:
        """Which pass over which data each sample is of."""
        dataset, numbers = self._at(positions)
        return dataset.passes(numbers)

    def used(self, end: int, curriculum: Curriculum) -> Iterator[tuple[Dataset, int]]:
        """As many of a phase's dataset as its sequences are up to there, with those that phases before it stand for."""
        for phase, after in zip(curriculum.phases, [*curriculum.phases[1:], None], strict=True):
            stop = end if after is None else min(end, after.begin)
            if stop > phase.begin:
                yield self.datasets[phase.seq_length], -(-stop * curriculum.unit // phase.seq_length)

    def _at(self, positions: Positions) -> tuple[Dataset, Integers]:
        asked = np.asarray(positions, dtype=np.int64)
        phase = self.curriculum.phase_of(asked)
        return self.datasets[phase.seq_length], asked * self.curriculum.unit // phase.seq_length
