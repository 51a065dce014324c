"""Text under a curriculum: samples of the last phase's length, cut in pieces in the phases before (`curriculum.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from colonnade.data.curriculum import Curriculum, Phase
from colonnade.data.datasets import Dataset, Passes, Positions
from colonnade.data.rows import Integers, Rows


class CurriculumDataset:
    """The sequences of a run under a curriculum, by their positions."""

    def __init__(self, dataset: Dataset, curriculum: Curriculum) -> None:
        assert dataset.seq_length == curriculum.seq_length, "samples are as long as the last phase's sequences"
        self.dataset, self.curriculum, self.seq_length = dataset, curriculum, dataset.seq_length

    def __len__(self) -> int:
        """Positions of one pass."""
        return len(self.dataset) * (self.seq_length // self.curriculum.unit)

    def used(self, end: int, curriculum: Curriculum) -> Iterator[tuple[Dataset, int]]:
        """Whole samples, whichever of their pieces are read: those of a group all come with their first pieces."""
        phase = curriculum.phase(max(0, end - 1))
        sequences = -(-(end - phase.begin) * curriculum.unit // phase.seq_length)
        groups, rest = divmod(sequences, phase.global_batch_size * phase.num_pieces)
        yield self.dataset, phase.sample + groups * phase.global_batch_size + min(rest, phase.global_batch_size)

    def rows(self, positions: Positions) -> Rows:
        """The sequences at positions [b], all of one phase: [b, the phase's length]."""
        asked = np.asarray(positions, dtype=np.int64)
        phase = self.curriculum.phase_of(asked)
        numbers = (asked - phase.begin) * self.curriculum.unit // phase.seq_length
        samples, pieces = self._cut(phase, numbers)
        rows = self.dataset.rows(samples)
        assert isinstance(rows, Rows), "samples of text, which can be cut"
        return rows.narrow(pieces * phase.seq_length, phase.seq_length)

    def passes(self, positions: Positions) -> Passes:
        """Which pass over which data each sequence is of."""
        asked = np.asarray(positions, dtype=np.int64)
        return self.dataset.passes(asked * self.curriculum.unit // self.seq_length)

    def _cut(self, phase: Phase, numbers: Integers) -> tuple[Integers, Integers]:
        """The sample and the piece of each of a phase's sequences [b]."""
        if phase.num_pieces == 1:
            return phase.sample + numbers, np.zeros_like(numbers)
        groups, within = np.divmod(numbers, phase.global_batch_size * phase.num_pieces)
        samples, pieces = np.empty_like(numbers), np.empty_like(numbers)
        for group in np.unique(groups):
            chosen = groups == group
            first = phase.sample + int(group) * phase.global_batch_size
            order = self._group(np.arange(first, first + phase.global_batch_size), phase.num_pieces)
            samples[chosen] = first + order[within[chosen]] // phase.num_pieces
            pieces[chosen] = order[within[chosen]] % phase.num_pieces
        return samples, pieces

    def _group(self, samples: Integers, num_pieces: int) -> Integers:
        """The order of a group's sequences [b · r], each named by sample · r + piece.

        All first pieces, then all second; but where a new pass over some data begins within the group, its sequences
        come after all others, so that no token comes twice before all came once.
        """
        passes = self.dataset.passes(samples)
        rounds = np.array([epoch - passes.epochs[passes.sets == s].min() for s, epoch in zip(*passes, strict=True)])
        numbers = np.arange(len(samples) * num_pieces)
        return np.lexsort((numbers // num_pieces, numbers % num_pieces, np.repeat(rounds, num_pieces)))
