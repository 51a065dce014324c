"""What the optimizer steps through: this rank's slices of all buckets, one for each group of weights."""

from collections.abc import Iterator, Sequence

from colonnade.data_parallel.buckets import Bucket, ParamRange
from colonnade.data_parallel.clip import is_counted
from colonnade.kernels.choice import Products, usual
from colonnade.mesh.mesh import Axis
from colonnade.optim.param_slice import ParamSlice, State, state_at


def param_slices(
    buckets: Sequence[Bucket], states: Sequence[State], tp: Axis, products: Products | None = None
) -> list[ParamSlice]:
    """Views of the buffers that an optimizer reads and writes: nothing of frozen weights. Weights are numbered as the
    buckets list them. Where `products` have weight gradients compiled, so is what an optimizer does with them: the
    same numbers in a run that goes on.
    """
    products = products or usual()
    found, first = [], 0
    for bucket, state in zip(buckets, states, strict=True):
        if bucket.is_frozen:
            continue
        is_compiled = products.of(bucket.parameters).weight_gradient == "compiled"
        found += list(_slices_of_bucket(bucket, state, tp, first, compiled=is_compiled))
        first += len(bucket.ranges)
    return found


def _slices_of_bucket(
    bucket: Bucket, state: State, tp: Axis, first_number: int, *, compiled: bool
) -> Iterator[ParamSlice]:
    read = bucket.copied_to
    for group, at in bucket.local_groups():
        yield ParamSlice(
            weights=bucket.master[at],
            gradients=bucket.optimizer_gradients[at],
            state=state_at(state, at),
            decayed=group.decayed,
            learning_rate=group.learning_rate,
            weight_decay=group.weight_decay,
            counted=is_counted(group, tp),
            part=bucket.name,
            copied_to=None if read is None else read[at],
            compiled=compiled,
            ranges=[
                (first_number + number, within)
                for number, param in enumerate(bucket.ranges)
                if (within := _overlap(param, bucket, at)) is not None
            ],
        )


def _overlap(param: ParamRange, bucket: Bucket, at: slice) -> slice | None:
    """Where a weight lies in the range `at` of the rank's slice, seen from the range's start."""
    base = bucket.mine.start + at.start
    first, last = max(param.start, base), min(param.stop, bucket.mine.start + at.stop)
    return slice(first - base, last - base) if first < last else None
