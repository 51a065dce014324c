"""A step of a run to the batches of one data-parallel rank.

    positions   start                          start + global_batch_size
                |-- dp rank 0 --|-- dp rank 1 --| …       each a run of positions,
                |mb 0|mb 1|mb 2 |                         cut into micro-batches

The global batch of a step is the same positions for any dp and any micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.data.rows import Rows, positions_within
from colonnade.upload import upload


class Uncounted(Protocol):
    """A batch that can be made to count nothing."""

    def uncounted(self) -> Self: ...


Counted = TypeVar("Counted", bound=Uncounted)


@dataclass(frozen=True)
class Batch:
    """The samples of one micro-batch."""

    tokens: Tensor
    """int64 [s, b]."""
    labels: Tensor
    """int64 [s, b]: the token after each."""
    loss_mask: Tensor
    """float32 [s, b]: 1 where the label counts, 0 where not."""
    samples: Tensor
    """int64 [b], on the CPU: each sample's position in the run; dropout depends on it."""
    documents: Tensor | None = None
    """int64 [s, b]: the document that each token belongs to, counted within the sample: tokens of different documents
    do not see each other. None: all tokens of a sample do."""
    positions: Tensor | None = None
    """int64 [s, b]: each token's place in its document. None: 0 … s - 1."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; `samples`, which only the program reads, stay where they are."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "samples"}
        return replace(self, **{name: upload(part, device) for name, part in parts.items() if part is not None})

    def uncounted(self) -> Batch:
        """The same batch, none of whose labels counts."""
        return replace(self, loss_mask=torch.zeros_like(self.loss_mask))


def as_batch(rows: Rows, positions: Sequence[int]) -> Batch:
    """Rows [b, s] of the samples at `positions` [b] of the run, as a batch of sequences [s, b]."""
    return Batch(
        tokens=_sequence_first(rows.tokens),
        labels=_sequence_first(rows.labels),
        loss_mask=_sequence_first(rows.counted.astype(np.float32)),
        samples=torch.tensor(list(positions), dtype=torch.int64),
        documents=None if rows.documents is None else _sequence_first(rows.documents),
        positions=None if rows.documents is None else _sequence_first(positions_within(rows.documents)),
    )


def _sequence_first(rows: NDArray[np.generic]) -> Tensor:
    """[b, s] -> [s, b]"""
    return torch.from_numpy(np.ascontiguousarray(rows.T))


def evaluation_positions(num_samples: int, *, micro_batch_size: int, dp_rank: int, dp_size: int) -> list[range]:
    """Positions 0 to num_samples - 1 shared by the dp ranks; a rank's last micro-batch may be short, or it has none."""
    first, stop = num_samples * dp_rank // dp_size, num_samples * (dp_rank + 1) // dp_size
    return [range(begin, min(begin + micro_batch_size, stop)) for begin in range(first, stop, micro_batch_size)]


def evaluation_batches(
    load: Callable[[range], Counted], num_samples: int, *, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[Counted]:
    """The first `num_samples` samples shared by the dp ranks, in as many micro-batches on each of them; `load` makes a
    micro-batch of samples.

    A rank that would have fewer ends with one that counts nothing: where the ranks share the weights, all of them have
    to come along for as long as one has work.
    """
    shares = [
        evaluation_positions(num_samples, micro_batch_size=micro_batch_size, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    mine, rounds = shares[dp_rank], max(map(len, shares))
    yield from map(load, mine)
    for _ in range(rounds - len(mine)):
        yield load(range(min(micro_batch_size, num_samples))).uncounted()
