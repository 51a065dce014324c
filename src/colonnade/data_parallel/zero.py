"""Who holds what between uses, and how gradients are summed: one mechanism for ZeRO 0, 1, 2 and 3.

Whoever runs the model tells what it is about to use and what it is done with; ownership does the rest.

    expect           the uses that come, in their order           plan of the gathers
    acquire          before a unit runs, forward or backward      its parameters are there; the next unit's on their way
    release          after it                                     ZeRO 3: they are a slice again, unless needed next
    gradients_ready  backward is through, for a micro-batch       its gradients are on their way (ZeRO 2, 3; else: last)
    finish           after the last micro-batch                   `reduced` is the sum over all ranks
    publish          after the optimizer                          ZeRO 1, 2: parameters on their way to the next forward

A unit (what runs) needs the weights of buckets (what is owned): a head with tied embeddings needs the token table,
which is a bucket of its own. A bucket's gradients are complete when those of the first unit that needs it are, and
those of a bucket that units on several pipeline stages need, when these have added theirs.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from colonnade.data_parallel.buckets import Bucket
from colonnade.mesh.collectives import all_reduce_
from colonnade.mesh.mesh import Axis, Mesh


class Ownership:
    """Every bucket of this rank, gathered and summed in time."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        needs: Mapping[str, Sequence[str]],
        mesh: Mesh,
        *,
        zero: int,
        sequence_parallel: bool = False,
        shared: Mapping[str, Axis] | None = None,
    ) -> None:
        """`buckets`: of trained weights and of frozen ones. `needs`: this rank's units in the order of the model, each
        with the buckets whose weights it multiplies with.

        `sequence_parallel`: each tp rank's gradients of replicated weights are of its part of the sequence alone.
        `shared`: of each bucket that several pipeline stages have a copy of, their axis; those of other stages too.
        """
        self.mesh, self.zero, self.sequence_parallel, self.shared = mesh, zero, sequence_parallel, shared or {}
        self.every = list(buckets)
        self.buckets = {bucket.name: bucket for bucket in buckets if not bucket.is_frozen}
        self._needs = {unit: [each for each in buckets if each.name in names] for unit, names in needs.items()}
        completes = _first_needed(needs)
        self._completes = {
            unit: [self.buckets[name] for name in names if name in self.buckets] for unit, names in completes.items()
        }
        self._uses: Sequence[str] = ()
        self._at = 0
        self._reducing: deque[Bucket] = deque()

    # --- parameters ---------------------------------------------------------------------------------------------------

    def expect(self, uses: Sequence[str]) -> None:
        """The units that will be acquired, in their order."""
        self._uses, self._at = uses, 0

    def acquire(self, unit: str, *, gradients: bool) -> None:
        """Return when `unit` can run; `gradients`: and when there is memory for its weights' gradients."""
        assert self._uses[self._at] == unit, f"{unit} comes where {self._uses[self._at]} was expected"
        self._at += 1
        self.mesh.ledger.unit = unit
        for bucket in self._needs[unit]:
            bucket.unshard()
        if gradients:
            self.open(unit)
        for bucket in self._next():
            bucket.fetch()

    def release(self, unit: str) -> None:
        """`unit` has run."""
        kept = self._next()
        for bucket in self._needs[unit]:
            if bucket not in kept:
                bucket.reshard()

    def _next(self) -> list[Bucket]:
        return self._needs[self._uses[self._at]] if self._at < len(self._uses) else []

    def publish(self, *, copied: bool = False) -> None:
        """Hand all master weights, new from a checkpoint or, `copied` by it, from the optimizer, to the layers."""
        for bucket in self.every:
            self.mesh.ledger.unit = bucket.name
            bucket.publish(copied=copied)
        self.mesh.ledger.unit = ""

    def settle(self) -> None:
        """Return when nothing is under way: before anybody but the optimizer changes master weights."""
        for bucket in self.buckets.values():
            bucket.settle()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All weights are there to be read, between steps; every rank enters this. ZeRO 3: gathers them, and frees them
        behind it: what is kept is copied within, a `state_dict()` too.
        """
        for bucket in self.every:
            bucket.unshard()
        try:
            yield
        finally:
            for bucket in self.every:
                bucket.reshard()

    # --- gradients ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first micro-batch of a step: no gradients yet, and none of a step that was broken off."""
        self._reducing.clear()
        for bucket in self.every:
            bucket.check_weights()
        for bucket in self.buckets.values():
            bucket.zero_gradients()

    def open(self, unit: str) -> None:
        """Return when there is memory to add the gradients of `unit`'s weights to."""
        self.mesh.ledger.unit = unit
        for bucket in self._needs[unit]:
            bucket.open_gradients()

    def gradients_ready(self, unit: str, *, last: bool) -> None:
        """All of a micro-batch's gradients of `unit` are there; `last`: of the step's last micro-batch."""
        if not last and self.zero < 2:
            return
        self.mesh.ledger.unit = unit
        for bucket in self._completes[unit]:
            if bucket.sum_holds_memory:
                while len(self._reducing) > 1:  # one sum goes on behind backward; more would hold more memory
                    self._reducing.popleft().finish_reduction()
            bucket.start_reduction()
            self._reducing.append(bucket)

    def finish(self) -> None:
        """Return when `reduced` of every bucket is the sum over all ranks that have a share in it."""
        while self._reducing:
            self._reducing.popleft().finish_reduction()
        self.mesh.ledger.unit = ""
        self._sum_replicated()
        for name, stages in self.shared.items():
            if name in self.buckets:
                mine = self.buckets[name].reduced
                self.mesh.ledger.unit = name
                all_reduce_(mine, stages).wait()
        self.mesh.ledger.unit = ""

    @torch.no_grad()
    def _sum_replicated(self) -> None:
        """Sum over tp the gradients of weights that tp ranks have alike and have seen different shares of, in one
        all-reduce: all of them under sequence parallelism, else those of which each rank uses a shard.
        """
        mine = [
            bucket.reduced[at]
            for bucket in self.buckets.values()
            for group, at in bucket.local_groups()
            if group.is_partial or (self.sequence_parallel and not group.cut)
        ]
        if not mine:
            return
        summed = torch.cat(mine)
        all_reduce_(summed, self.mesh.tp).wait()
        for gradients, total in zip(mine, torch.split(summed, [len(each) for each in mine]), strict=True):
            gradients.copy_(total)


def _first_needed(needs: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Each unit with the buckets that it is the first to need: backward leaves those last there."""
    completes: dict[str, list[str]] = {unit: [] for unit in needs}
    seen: set[str] = set()
    for unit, buckets in needs.items():
        completes[unit] = [bucket for bucket in buckets if bucket not in seen]
        seen.update(buckets)
    return completes
