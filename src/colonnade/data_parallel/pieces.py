"""What the optimizer steps through: this rank's slices of all parts, a piece for each segment."""

from collections.abc import Iterator, Sequence

from colonnade.data_parallel.buckets import Bucket, Slot
from colonnade.data_parallel.clip import is_counted
from colonnade.mesh.mesh import Axis
from colonnade.optim.piece import Piece, State, state_at


def pieces_of(buckets: Sequence[Bucket], states: Sequence[State], tp: Axis) -> list[Piece]:
    """Views of the buffers that an optimizer reads and writes. Weights are numbered as the buckets list them."""
    found, first = [], 0
    for bucket, state in zip(buckets, states, strict=True):
        found += list(_pieces_of_bucket(bucket, state, tp, first))
        first += len(bucket.slots)
    return found


def _pieces_of_bucket(bucket: Bucket, state: State, tp: Axis, first_number: int) -> Iterator[Piece]:
    for segment, at in bucket.my_segments():
        yield Piece(
            weights=bucket.master[at],
            gradients=bucket.applied[at],
            state=state_at(state, at),
            decayed=segment.decayed,
            counted=is_counted(segment, tp),
            spans=[
                (first_number + number, within)
                for number, slot in enumerate(bucket.slots)
                if (within := _overlap(slot, bucket, at)) is not None
            ],
        )


def _overlap(slot: Slot, bucket: Bucket, at: slice) -> slice | None:
    """Where a weight lies in the stretch `at` of the rank's slice, seen from the stretch's start."""
    base = bucket.mine.start + at.start
    first, last = max(slot.start, base), min(slot.stop, bucket.mine.start + at.stop)
    return slice(first - base, last - base) if first < last else None
