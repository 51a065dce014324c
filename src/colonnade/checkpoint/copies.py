"""Copies of state that several ranks hold are proven equal, to the bit, before any of them is saved.

A checkpoint takes each box from one of the ranks that hold it. Where they had drifted apart (a device that rounds
otherwise, a bit that flipped, an error of the program) it would be a mixture that no rank has computed.

    over    what is compared                                                             ZeRO
    dp      master weights and optimizer state                                           0
            parameters: the weights as layers have them, where they are other memory     0, 1, 2
    tp      the same, of weights that tp does not cut, in the rank's slice               0, 1, 2, 3 (parameters: not 3)
    stages  the same, of what they share: a token table (first and last), T5's tables    0, 1, 2, 3 (parameters: not 3)
    world   how far the run is: step, samples, skipped steps, loss scale                 all

What ZeRO cuts over dp has no copy there: master weights and optimizer state from 1 on, parameters under 3. Neither has
a weight that tp cuts among its tp ranks.

First long ranges are summed (`checksum.py`), 16 bytes each cross; where any rank sees a difference, all sum tensor
by tensor, to name it.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from colonnade.checkpoint.checksum import Checksum
from colonnade.data_parallel.buckets import Bucket
from colonnade.errors import CopiesError
from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.collectives import all_reduce, broadcast_, where_unequal
from colonnade.mesh.mesh import Axis, Mesh
from colonnade.optim.param_slice import State

SHOWN = 8  # tensors that a message names
Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Copies:
    """What a rank holds that others hold too."""

    buckets: Sequence[Bucket]
    optimizer_state: Sequence[State]
    """One per bucket: of this rank's slice."""
    mesh: Mesh
    shared: Mapping[str, Axis] = field(default_factory=dict)
    """Of each bucket that several pipeline stages have a copy of, their axis."""

    def check(self, what: str, counts: Mapping[str, float]) -> None:
        """CopiesError on all ranks, naming tensors and ranks, unless all copies are equal. Every rank calls this.

        `what` begins the message; `counts` are numbers that are the same on all ranks of a sound run.
        """
        found = self._unequal(counts, detail=False)
        if not bool(all_reduce(torch.tensor(int(bool(found))), self.mesh.world, "max")):
            return
        fine = self._unequal(counts, detail=True)
        gathered = [json.loads(text) for text in gather_texts(json.dumps(fine or found), self.mesh.world)]
        raise CopiesError(_message(what, gathered), gathered)

    def _unequal(self, counts: Mapping[str, float], *, detail: bool) -> dict[str, str]:
        """Of what this rank sees differing: name and ranks -> its own checksum."""
        sums = _Sums()
        found: dict[str, str] = {}
        for axis, held in self._held():
            found |= _compare(axis, partial(sums.of_all, partial(held, detail)))
        found |= _compare(self.mesh.world, lambda: {name: _bits(number) for name, number in counts.items()})
        return found

    def mend_(self, sound: Mapping[str, int]) -> None:
        """Overwrite copies by that of a rank: by their names in `verdict`. Every rank calls this with the same."""
        for axis, held in self._held():
            for name, x in held(True):
                source = sound.get(_over(name, axis))
                if source is not None:
                    broadcast_(x, axis, axis.ranks.index(source))

    def _held(self) -> list[tuple[Axis, Callable[[bool], Named]]]:
        """The axes over which there are copies, and what these are."""
        return [
            (self.mesh.reduce, self._over_dp),
            (self.mesh.tp, self._over_tp),
            *((stages, partial(self._over_stages, bucket)) for bucket, stages in self.shared.items()),
        ]

    def _over_dp(self, detail: bool) -> Named:
        for bucket, kept in zip(self.buckets, self.optimizer_state, strict=True):
            for name, at, _ in _ranges(bucket, detail):
                if bucket.storage.zero == 0:
                    yield from _state(name, bucket, kept, at)
                yield from _parameters(name, bucket, at)

    def _over_tp(self, detail: bool) -> Named:
        for bucket, kept in zip(self.buckets, self.optimizer_state, strict=True):
            for name, at, cut in _slices(bucket, detail):
                if not cut:
                    yield from _state(name, bucket, kept, at)
            for name, at, cut in _ranges(bucket, detail):
                if not cut:
                    yield from _parameters(name, bucket, at)

    def _over_stages(self, shared: str, detail: bool) -> Named:
        for bucket, kept in zip(self.buckets, self.optimizer_state, strict=True):
            if bucket.name == shared:
                for name, at, _ in _slices(bucket, detail):
                    yield from _state(name, bucket, kept, at)
                for name, at, _ in _ranges(bucket, detail):
                    yield from _parameters(name, bucket, at)


class _Sums:
    """Checksums by name, each computed once."""

    def __init__(self) -> None:
        self._known: dict[str, Tensor] = {}
        self._on: dict[torch.device, Checksum] = {}

    def of_all(self, held: Callable[[], Named]) -> dict[str, Tensor]:
        return {name: self.of(name, x) for name, x in held()}

    def of(self, name: str, x: Tensor) -> Tensor:
        if name not in self._known:
            if x.device not in self._on:
                self._on[x.device] = Checksum(x.device)
            self._known[name] = self._on[x.device].of(x)
        return self._known[name]


def _ranges(bucket: Bucket, detail: bool) -> Iterator[tuple[str, slice, bool]]:
    """(name, place in the buffer, whether tp cuts it) of each weight, or of each group."""
    if detail:
        for param in bucket.ranges:
            place = param.placement
            yield f"{bucket.name}.{place.name}", slice(param.start, param.stop), place.dim is not None
        return
    for number, group in enumerate(bucket.groups):
        yield f"{bucket.name}, group {number}", slice(group.start, group.stop), group.cut


def _slices(bucket: Bucket, detail: bool) -> Iterator[tuple[str, slice, bool]]:
    """The same of what lies in this rank's slice, with places in that."""
    if detail:
        for local in bucket.local_ranges():
            yield local.name, local.at, local.placement.dim is not None
        return
    which = "" if bucket.storage.zero == 0 else " of the slice"
    for number, (group, at) in enumerate(bucket.local_groups()):
        yield f"{bucket.name}, group {number}{which}", at, group.cut


def _state(name: str, bucket: Bucket, kept: State, at: slice) -> Named:
    yield name, bucket.master[at]
    for what, flat in kept.items():
        yield f"optimizer.{what}.{name}", flat[at]


def _parameters(name: str, bucket: Bucket, at: slice) -> Named:
    """The weights as layers have them, where a rank has all of them and they are not the master weights themselves."""
    zero, dtype = bucket.storage.zero, bucket.storage.dtype
    if zero == 3 or (zero == 0 and dtype == bucket.storage.exact):
        return
    bucket.unshard()  # what the last step has sent on its way
    yield f"parameters ({str(dtype).removeprefix('torch.')}) {name}", bucket.parameters[at]


def _compare(axis: Axis, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, str]:
    """What differs over an axis: its name and ranks -> this rank's own sum. Nothing is computed where one is alone."""
    named: dict[str, Tensor] = {}

    def sums() -> Tensor:
        named.update(make())
        values = [value.cpu() for value in named.values()]
        return torch.stack(values) if values else torch.zeros(0, dtype=torch.int64)

    unequal = where_unequal(sums, axis)
    if unequal is None:
        return {}
    own = {name: value for (name, value), differs in zip(named.items(), unequal.tolist(), strict=True) if differs}
    return {_over(name, axis): f"{int(value) % (1 << 64):016x}" for name, value in own.items()}


def _over(name: str, axis: Axis) -> str:
    return f"{name} over {axis.name} of {','.join(map(str, axis.ranks))}"


@dataclass(frozen=True)
class Verdict:
    """Who is wrong, as far as a majority tells."""

    sound: Mapping[str, int]
    """What differs -> a rank that has it as most do."""
    suspects: tuple[int, ...]
    """Ranks that stand against a majority."""
    undecided: bool
    """Something differs of which no majority is alike."""


def verdict(by_rank: Sequence[Mapping[str, str]]) -> Verdict:
    """From what each rank sees differing, with its own checksum (`CopiesError.by_rank`). Pure."""
    sound: dict[str, int] = {}
    suspects: set[int] = set()
    undecided = False
    for copy, values in _by_copy(by_rank).items():
        most = max(values.values(), key=len)
        total = sum(map(len, values.values()))
        if 2 * len(most) <= total or " over world of " in copy:
            undecided = True
            continue
        sound[copy] = most[0]
        suspects |= {rank for ranks in values.values() if ranks is not most for rank in ranks}
    return Verdict(sound, tuple(sorted(suspects)), undecided)


def _by_copy(by_rank: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    by_copy: dict[str, dict[str, list[int]]] = {}
    for rank, found in enumerate(by_rank):
        for copy, value in found.items():
            by_copy.setdefault(copy, {}).setdefault(value, []).append(rank)
    return by_copy


def _bits(number: float) -> Tensor:
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return torch.tensor(bits)


def _message(what: str, gathered: Sequence[Mapping[str, str]]) -> str:
    by_copy = _by_copy(gathered)
    lines = [f"  {copy.rpartition(' of ')[0]}: {_values(values)}" for copy, values in by_copy.items()]
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(
        [
            f"{what}: what several ranks hold as copies of each other is not equal any more (checksums of the bits):",
            *lines[:SHOWN],
            *more,
            "Nothing of this step is saved, and the last checkpoint stays: the same command goes on from there. If one "
            "rank stands alone again, suspect its device or memory; if ranks on one kind of machine stand against "
            "those on another, use one kind. Otherwise it is an error of the program: please report it.",
        ]
    )


def _values(values: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {' and '.join(map(str, ranks))} {value}"
        for value, ranks in values.items()
    )
