"""Which stage holds which part of the model: consecutive units, cut so that the heaviest chunk is as light as can be.

    embedding │ blocks.0 │ blocks.1 │ … │ blocks.L−1 │ head          L + 2 units
    └── chunk 0 ──┘└── chunk 1 ──┘└ … ┘└── chunk p·v − 1 ──┘         chunk g runs on stage g mod p

What is spread evenly is a list of numbers, one a unit: by layers each unit counts one (BLOOM's way: 70 blocks, the
embedding and the head are 72 units, 6 for each of 12 stages; Scao et al., 2022, arXiv 2211.05100); by parameters, those
that it computes with; or any other, such as measured times. Pure.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.schema import ParallelConfig
from colonnade.errors import LayoutError


def chunks(architecture: Architecture, parallel: ParallelConfig) -> list[list[Unit]]:
    """The units of every chunk, in the order of the model: by parallel.cuts, or evenly as parallel.partition says.

    Raises LayoutError where there are fewer units than chunks, or the cuts do not fit.
    """
    units, num_chunks = list(architecture.units), parallel.pp * parallel.virtual_stages
    if parallel.cuts:
        counts = list(parallel.cuts)
        _refuse_other_cuts(counts, num_chunks, len(units))
    else:
        _refuse_empty_chunks(parallel.pp, parallel.virtual_stages, len(units))
        counts = cut([_load(architecture, unit, parallel.partition) for unit in units], num_chunks)
    return [units[start:end] for start, end in pairwise(accumulate(counts, initial=0))]


def _load(architecture: Architecture, unit: Unit, partition: str) -> float:
    """What one unit counts when chunks are made equal."""
    if partition == "layers":
        return 1
    return architecture.parameters_of(unit) if partition == "parameters" else architecture.flops_of(unit)


def chunks_of_stage(architecture: Architecture, parallel: ParallelConfig, stage: int) -> list[list[Unit]]:
    """The units of each chunk of a stage: virtual_stages lists."""
    return chunks(architecture, parallel)[stage :: parallel.pp]


def first_trained(every: Sequence[Sequence[Unit]]) -> int:
    """The first chunk of the model with a backward, given the units of every chunk."""
    return next(number for number, units in enumerate(every) if units[-1].has_backward)


def holders(architecture: Architecture, every: Sequence[Sequence[Unit]], num_stages: int) -> dict[str, tuple[int, ...]]:
    """Which stages have a copy of each bucket that several have, given the units of every chunk."""
    found: dict[str, tuple[int, ...]] = {}
    for bucket in architecture.shared_buckets():
        chunks_with = [number for number, units in enumerate(every) if any(bucket in unit.buckets for unit in units)]
        stages = sorted({number % num_stages for number in chunks_with})
        if len(stages) > 1:
            found[bucket] = tuple(stages)
    return found


def cut(weights: Sequence[float], num_chunks: int) -> list[int]:
    """How many consecutive units each chunk gets, at least one, so that the heaviest chunk is as light as possible.

    Of the ways to do that, the most even one (least squares); of those, the one with the lightest ends of the model,
    for embedding and head cost memory of their own. Raises LayoutError for more chunks than units.
    """
    assert all(weight >= 0 for weight in weights), "less than nothing cannot be spread"
    if not 1 <= num_chunks <= len(weights):
        raise LayoutError(
            f"{len(weights)} units cannot be cut in {num_chunks} chunks: each needs at least one unit. "
            f"Use 1 to {len(weights)} chunks, or a model with more layers."
        )
    ends = list(accumulate(weights, initial=0))
    return _most_even(ends, num_chunks, _lightest_limit(ends, num_chunks))


def _lightest_limit(ends: Sequence[float], num_chunks: int) -> float:
    """The weight of the heaviest chunk, at its lightest. `ends`: the weight of all units up to each place."""
    sums = sorted({end - start for at, start in enumerate(ends) for end in ends[at + 1 :]})
    return sums[bisect_left(sums, True, key=lambda limit: _chunks_needed(ends, limit) <= num_chunks)]


def _chunks_needed(ends: Sequence[float], limit: float) -> float:
    """The fewest chunks that weigh at most `limit` each; infinite where one unit is heavier."""
    if max(end - start for start, end in pairwise(ends)) > limit:
        return float("inf")
    count, start = 1, ends[0]
    for before, end in pairwise(ends):
        if end - start > limit:
            count, start = count + 1, before
    return count


def _most_even(ends: Sequence[float], num_chunks: int, limit: float) -> list[int]:
    """The counts with the least sum of squared weights among those with no chunk above `limit`.

    From the last chunk to the first: the best way from each place on, given how many chunks are left.
    """
    units = len(ends) - 1
    Way = tuple[float, float, tuple[int, ...]]  # squares, weight × distance from the middle chunk, counts
    ways: dict[int, Way] = {units: (0, 0, ())}
    for chunk in reversed(range(num_chunks)):
        distance = abs(2 * chunk - (num_chunks - 1))
        longer: dict[int, Way] = {}
        for start in range(chunk, units - (num_chunks - chunk) + 1):
            for end in range(start + 1, units + 1):
                weight = ends[end] - ends[start]
                if weight > limit:
                    break
                if end in ways:
                    squares, off_centre, counts = ways[end]
                    way = (squares + weight**2, off_centre + weight * distance, (end - start, *counts))
                    longer[start] = min(longer.get(start, way), way)
        ways = longer
    return list(ways[0][-1])


def _refuse_empty_chunks(num_stages: int, virtual_stages: int, num_units: int) -> None:
    num_chunks = num_stages * virtual_stages
    if num_chunks <= num_units:
        return
    fits = num_units // num_stages
    use = f"virtual_stages = {fits}" if fits else f"pp = {num_units} with virtual_stages = 1"
    raise LayoutError(
        f"parallel.pp × parallel.virtual_stages = {num_stages} × {virtual_stages} = {num_chunks} chunks, but the model "
        f"has {num_units} units (embedding, {num_units - 2} blocks, head), and each chunk needs one. "
        f"Use {use}, or at least {num_chunks - 2} layers."
    )


def _refuse_other_cuts(counts: Sequence[int], num_chunks: int, num_units: int) -> None:
    wanted = f"Give {num_chunks} counts >= 1 (one a chunk) that sum to {num_units} (embedding, blocks and head)."
    if len(counts) != num_chunks:
        raise LayoutError(
            f"parallel.cuts has {len(counts)} counts, but parallel.pp × parallel.virtual_stages = {num_chunks} chunks. "
            + wanted
        )
    if min(counts) < 1 or sum(counts) != num_units:
        raise LayoutError(
            f"parallel.cuts = {list(counts)} sums to {sum(counts)} and its smallest count is {min(counts)}, which does "
            f"not give each of {num_units} units to one chunk and each chunk a unit. " + wanted
        )
