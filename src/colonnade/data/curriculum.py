"""Sequences and batches that grow during a run (YaLM; DeepSpeed), with every token still used once an epoch.

    phase 0: sequences of s/4, batches of 2     phase 1: s/2, 4                 phase 2: s, 8
    sample 0  |a b c d|                         |a b|c d|  …                    |a b c d …|
    sample 1  |e f g h|                         |e f|g h|  …

The run goes through the same samples of s tokens in the same order as without a curriculum. In a phase of shorter
sequences each sample is cut in r equal pieces. A group of b samples, b the batch of the phase, makes r steps: all first
pieces, then all second ones, and so on, so that a batch is as mixed as one of whole samples: b texts. A phase ends with
a group, so that the next begins with whole samples. Where no sample is cut any more, a phase may begin at any, and the
first step from there on is of it: batches that a rollback passes over need not be multiples of those of its own.

A *position* counts tokens in units of the shortest sequence (of the lengths' common divisor). It is the whole state, as
it is without a curriculum, where a unit is a sample: a run goes on from a position on any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from colonnade.data.sampler import cut_in_microbatches


@dataclass(frozen=True)
class Phase:
    """A part of the run with sequences and batches of one size."""

    begin: int
    """Position: steps that begin there or later, and before the next phase, are of it."""
    sample: int
    """The sample at `begin`."""
    seq_length: int
    global_batch_size: int
    """Sequences of a step; samples of a group."""
    num_pieces: int
    """Sequences that a sample is cut in; steps of a group."""


class Curriculum:
    """The phases of a run: pure arithmetic."""

    def __init__(self, tokens: Sequence[int], seq_lengths: Sequence[int], batch_sizes: Sequence[int]) -> None:
        """A place a phase in each list: where it begins at the earliest, its sequence length, its global batch."""
        assert len(tokens) == len(seq_lengths) == len(batch_sizes) >= 1, "a place a phase in each list"
        assert tokens[0] == 0 and all(seq_lengths[-1] % length == 0 for length in seq_lengths), "see the config check"
        self.seq_length = seq_lengths[-1]
        self.unit = gcd(*seq_lengths)
        begin = sample = 0
        last_cut = max((n for n, length in enumerate(seq_lengths) if length != self.seq_length), default=-1)
        self.phases: list[Phase] = []
        for number, (length, batch) in enumerate(zip(seq_lengths, batch_sizes, strict=True)):
            self.phases.append(Phase(begin, sample, length, batch, self.seq_length // length))
            if number + 1 < len(tokens):
                group = 1 if number > last_cut else batch
                groups = -(-(tokens[number + 1] - begin * self.unit) // (group * self.seq_length))
                sample += max(groups, 0) * group
                begin = sample * (self.seq_length // self.unit)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every sequence length once, in the order of the run."""
        return tuple(dict.fromkeys(phase.seq_length for phase in self.phases))

    @classmethod
    def constant(cls, seq_length: int, global_batch_size: int) -> Curriculum:
        """One phase: positions are samples."""
        return cls([0], [seq_length], [global_batch_size])

    def phase(self, position: int) -> Phase:
        """The phase that a position is in."""
        return [phase for phase in self.phases if phase.begin <= position][-1]

    def phase_of(self, positions: NDArray[np.int64]) -> Phase:
        """The phase of the step that positions are in, all of them; it may go beyond the phase's end."""
        phase, last = (self.phase(int(each)) for each in (positions.min(), positions.max()))
        assert phase.seq_length == last.seq_length, "sequences of one length"
        return phase

    def next(self, position: int) -> int:
        """The position after the step that begins at one."""
        phase = self.phase(position)
        return position + phase.global_batch_size * self._stride(phase)

    def steps(self, count: int, position: int = 0) -> int:
        """The position after `count` steps from one on: from 0, what they use up."""
        for phase, after in zip(self.phases, [*self.phases[1:], None], strict=True):
            if after is None or position < after.begin:
                step = phase.global_batch_size * self._stride(phase)
                there = count if after is None else min(count, -((position - after.begin) // step))
                position, count = position + there * step, count - there
        return position

    def sizes(self, count: int, position: int = 0) -> list[int]:
        """Positions of each of `count` steps from one on."""
        ends = [position]
        for _ in range(count):
            ends.append(self.next(ends[-1]))
        return [end - begin for begin, end in pairwise(ends)]

    def rank_positions(self, start: int, *, micro_batch_size: int, dp_rank: int, dp_size: int) -> list[range]:
        """Positions of each micro-batch of one dp rank, in the step that begins at `start`."""
        phase = self.phase(start)
        numbers = cut_in_microbatches(phase.global_batch_size, micro_batch_size, dp_rank=dp_rank, dp_size=dp_size)
        stride = self._stride(phase)
        return [range(start + n.start * stride, start + n.stop * stride, stride) for n in numbers]

    def _stride(self, phase: Phase) -> int:
        return phase.seq_length // self.unit
