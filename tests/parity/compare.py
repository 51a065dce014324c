"""Runs beside the serial run, number against number, and ranks beside each other, bit against bit.

Each rank compares its own numbers with the reference, which it has from its parent, and hands back a small `Verdict`.
An `Outcome` is one job's verdicts of all ranks, and what is wrong with it in words.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf, isnan
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.architecture.parts import trained_architecture
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import build_mesh
from colonnade.pipeline.partition import chunks, holders
from colonnade.train.step import StepResult
from tests.distributed import run_on_ranks
from tests.parity.runs import (
    Case,
    Job,
    LocalRange,
    LocalRanges,
    Reference,
    Run,
    Way,
    configured,
    references_on_a_rank,
    train,
)

TOLERANCE = 1e-12
"""Of everything but the weights of `NEAR_NOTHING`."""
NEAR_NOTHING = ("attention.qkv.bias", "attention.key_value.bias")
"""The biases of keys are in them. Such a bias has a gradient of rounding alone, 1e-16, which Adam divides by its own
size plus epsilon, 1e-5 (see `runs`), and LAMB too: 1e-11 of a step is left of it, and the largest bias is a few steps
long."""
WHAT: Mapping[str, float] = MappingProxyType(
    {
        "loss": TOLERANCE,
        "grad_norm": TOLERANCE,
        "gradients": TOLERANCE,
        "master": TOLERANCE,
        "exp_avg": TOLERANCE,
        "exp_avg_sq": TOLERANCE,
        "parameters": TOLERANCE,
        "key_biases": 1e-11,
        "thermometers": 1e-10,
    }
)
"""What is compared, and to what: `master` and `parameters` but for those biases, and those biases."""


class Difference(NamedTuple):
    """How far a number is from the reference's, relative to the largest element of its tensor."""

    size: float
    where: str


def _is_near_nothing(difference: Difference) -> bool:
    return any(name in difference.where for name in NEAR_NOTHING)


class Share(NamedTuple):
    """Which elements of a weight a rank has: elements `first` … `first` + `length` of the shard at `real`."""

    name: str
    shape: tuple[int, ...]
    real: tuple[tuple[int, int], ...]
    cut: bool
    first: int
    length: int

    @classmethod
    def of(cls, name: str, held: LocalRange) -> "Share":
        real = tuple((window.start, window.stop) for window in held.real)
        return cls(name, held.shape, real, held.cut, held.first, len(held.values))


@dataclass(frozen=True)
class Verdict:
    """One rank's run beside the reference."""

    worst: dict[str, Difference]
    """By what was compared."""
    results: list[StepResult]
    outside: float
    """The largest |number| that belongs to no weight: must be 0."""
    digests: dict[tuple[str, Share], bytes]
    """Of weights, moments and parameters at the end: whoever has the same share must have the same bits."""


@dataclass(frozen=True)
class Outcome:
    """One job's verdicts, by rank."""

    job: Job
    ranks: Sequence[Verdict]
    reference: Reference

    @property
    def way(self) -> Way:
        return self.job[1]

    def worst(self, what: str) -> Difference:
        """The largest difference on any rank. That nothing was left out is `miscounted`'s to say."""
        return max((verdict.worst[what] for verdict in self.ranks), key=lambda difference: difference.size)

    def differences(self) -> list[str]:
        """What is further from the reference than the tolerance."""
        found = {what: self.worst(what) for what in WHAT}
        return [f"{what}: {size:.1e} at {where}" for what, (size, where) in found.items() if size > WHAT[what]]

    def unequal_copies(self) -> list[str]:
        """Shares that ranks have in common and that are not equal to the bit; results that ranks tell differently."""
        holders = self.holders()
        different = [
            f"{what} of {share.name} on ranks {sorted(ranks)}"
            for (what, share), ranks in holders.items()
            if len({self.ranks[rank].digests[what, share] for rank in ranks}) > 1
        ]
        told = [f"results of step {step}" for step, results in enumerate(self._results()) if len(set(results)) > 1]
        return different + told

    def holders(self) -> Mapping[tuple[str, Share], list[int]]:
        """The ranks that have a share."""
        found: dict[tuple[str, Share], list[int]] = defaultdict(list)
        for rank, verdict in enumerate(self.ranks):
            for key in verdict.digests:
                found[key].append(rank)
        return found

    def _results(self) -> Iterator[tuple[StepResult, ...]]:
        return zip(*(verdict.results for verdict in self.ranks), strict=True)

    def miscounted(self) -> list[str]:
        """Weights of which some element is not kept by exactly as many ranks as the way says."""
        counts = {name: torch.zeros_like(whole) for name, whole in self.reference.kept["master"].items()}
        cut = {}
        for what, share in (key for verdict in self.ranks for key in verdict.digests):
            if what == "master":
                _count(counts[share.name], share)
                cut[share.name] = share.cut
        return [name for name, count in counts.items() if not bool((count == self._copies(name, cut)).all())]

    def _copies(self, name: str, cut: Mapping[str, bool]) -> int:
        case, way = self.job
        stages = [len(held) for bucket, held in holders_of(case, way).items() if name.startswith(f"{bucket}.")]
        is_frozen = name not in self.reference.kept["exp_avg"]  # only ZeRO 3 cuts what is frozen
        return (
            max(stages, default=1)
            * (way.dp if way.zero == 0 or (is_frozen and way.zero < 3) else 1)
            * (1 if cut.get(name, True) else way.tp)
        )

    def problems(self) -> list[str]:
        """Everything that is wrong, in words."""
        return [
            *self.differences(),
            *(f"copies differ: {each}" for each in self.unequal_copies()),
            *(f"kept too often or not at all: {each}" for each in self.miscounted()),
            *(
                f"rank {i}: numbers outside of weights"
                for i, verdict in enumerate(self.ranks)
                if verdict.outside != 0.0
            ),
        ]


def holders_of(case: Case, way: Way) -> dict[str, tuple[int, ...]]:
    """Which pipeline stages have a copy of each bucket that several have."""
    stated = trained_architecture(configured(case, way), case.vocab_size)
    return holders(stated, chunks(stated, way.parallel), way.pp)


def _count(count: Tensor, share: Share) -> None:
    """One more for every real element of `share`."""
    shard = torch.zeros(share.shape, dtype=count.dtype)
    shard.view(-1)[share.first : share.first + share.length] = 1
    window = count[tuple(slice(start, stop) for start, stop in share.real)]
    window += shard[tuple(slice(size) for size in window.shape)]


# --- one rank ---------------------------------------------------------------------------------------------------------


def judge(run: Run, reference: Reference) -> Verdict:
    """Compare everything that a rank has."""
    found: dict[str, list[Difference]] = {
        "loss": _numbers("loss", run, reference),
        "grad_norm": _numbers("grad_norm", run, reference),
        "gradients": [
            difference
            for number, (step, whole) in enumerate(zip(run.steps, reference.gradients, strict=True))
            for difference in tensors(f"step {number}", step.gradients, whole)
        ],
        **{buffer: list(tensors(buffer, mine, reference.kept[buffer])) for buffer, mine in run.kept.items()},
        "thermometers": list(_readings(run, reference)),
        "parameters": list(tensors("parameter", run.parameters, reference.kept["master"])),
    }
    weights = found["master"] + found["parameters"]
    found["key_biases"] = [each for each in weights if _is_near_nothing(each)]
    for what in ("master", "parameters"):
        found[what] = [each for each in found[what] if not _is_near_nothing(each)]
    everything = {**run.kept, "parameters": run.parameters}
    return Verdict(
        {what: largest(differences) for what, differences in found.items()},
        [step.result for step in run.steps],
        run.outside,
        {
            (what, Share.of(name, held)): _digest(held.values)
            for what, mine in everything.items()
            for name, held in mine.items()
        },
    )


def _numbers(name: str, run: Run, reference: Reference) -> list[Difference]:
    pairs = [
        (getattr(step.result, name), getattr(other, name))
        for step, other in zip(run.steps, reference.results, strict=True)
    ]
    return [
        Difference(relative(abs(value - expected), abs(expected)), f"step {step}: {value} in place of {expected}")
        for step, (value, expected) in enumerate(pairs)
    ]


def _readings(run: Run, reference: Reference) -> Iterator[Difference]:
    """Every number that thermometers show, relative to the largest of its site or part."""
    for step, (mine, other) in enumerate(zip(run.steps, reference.results, strict=True)):
        assert (mine.result.reading is None) == (other.reading is None) == (step % 2 == 0), "every second is measured"
        if mine.result.reading is None or other.reading is None:
            continue
        for found, expected in (
            (mine.result.reading.activations, other.reading.activations),
            (mine.result.reading.parts, other.reading.parts),
        ):
            assert [where for where, _ in found] == [where for where, _ in expected]
            for (where, numbers), (_, right) in zip(found, expected, strict=True):
                scale = max(abs(number) for number in right if number is not None)
                for name, number, wanted in zip(numbers._fields, numbers, right, strict=True):
                    size = inf if None in (number, wanted) else abs((number or 0.0) - (wanted or 0.0))
                    told = f"step {step}, {name} of {where}: {number} in place of {wanted}"
                    yield Difference(0.0 if number == wanted else relative(size, scale), told)


def tensors(what: str, mine: LocalRanges, wholes: Mapping[str, Tensor]) -> Iterator[Difference]:
    """Every range beside the same range of the whole tensor."""
    for name, held in mine.items():
        whole = wholes[name]
        distance = (held.values - held.of(whole)).abs().max().item()
        yield Difference(relative(distance, whole.abs().max().item()), f"{what} {name} from {held.first}")


def relative(difference: float, scale: float) -> float:
    """difference / scale; infinite where it is NaN, 0 for 0 / 0."""
    if isnan(difference) or isnan(scale):
        return inf
    return difference / scale if scale else (inf if difference else 0.0)


def largest(found: Iterable[Difference]) -> Difference:
    """The largest difference. Of a small part, some dp rank's slice may be padding alone: then there is none."""
    return max(found, key=lambda difference: difference.size, default=Difference(0.0, "nothing"))


def _digest(x: Tensor) -> bytes:
    return blake2b(x.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


# --- all ranks --------------------------------------------------------------------------------------------------------


def compare(jobs: Sequence[Job], references: dict[Case, Reference], *, time_limit: float) -> list[Outcome]:
    """Train every job on the ranks of its layout, jobs of one layout in one set of processes, and compare.

    `references` holds the serial runs made so far, and gets those that are missing.
    """
    missing = sorted({case for case, _ in jobs} - references.keys(), key=str)
    if missing:
        (made,) = run_on_ranks(references_on_a_rank, 1, missing, time_limit=time_limit)
        references.update(zip(missing, made, strict=True))
    outcomes: dict[Job, Outcome] = {}
    for layout, together in by_layout(jobs).items():
        verdicts = run_on_ranks(on_a_rank, layout.num_ranks, layout, together, references, time_limit=time_limit)
        for number, job in enumerate(together):
            outcomes[job] = Outcome(job, [each[number] for each in verdicts], references[job[0]])
    return [outcomes[job] for job in jobs]


def by_layout(jobs: Iterable[Job]) -> dict[Layout, list[Job]]:
    """Jobs that can run in the same processes."""
    groups: dict[Layout, list[Job]] = defaultdict(list)
    for job in jobs:
        groups[job[1].layout].append(job)
    return groups


def on_a_rank(
    rank: int, num_ranks: int, layout: Layout, jobs: Sequence[Job], references: Mapping[Case, Reference]
) -> list[Verdict]:
    """For `run_on_ranks`: every job of one layout."""
    mesh = build_mesh(layout, rank)
    return [judge(train(case, way, mesh), references[case]) for case, way in jobs]
