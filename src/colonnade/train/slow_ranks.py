"""Names ranks that compute more slowly than those that do the same work, from how long each waits.

    a step     its seconds, without those in which this rank stood still for others: what it has done itself
    a window   `run.slow_ranks_every` steps; of each rank the median, which a step with something special does not move
    slow       judged against the median of its peers, the other ranks of its pipeline stage

All wait for a slow rank, so that the seconds of a step are alike everywhere; what a rank does itself is not. Stages may
have unequal work, and are not compared. Evaluations and saves are no part of a step; the first steps are not counted.
"""

import socket
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from colonnade.config.schema import RunConfig
from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Mesh
from colonnade.train.monitor import Monitor

FIRST_STEPS = 5  # steps behind a start that are not counted: memory is taken, code is compiled, files are opened


@dataclass(frozen=True)
class Pace:
    """A rank beside its peers."""

    seconds: float
    """That its own part of a step takes."""
    peers: float
    """The median of the others."""

    @property
    def factor(self) -> float:
        return self.seconds / self.peers


def paces(seconds: Sequence[float], stages: Sequence[Sequence[int]]) -> dict[int, Pace]:
    """Of each rank that has peers. `seconds`: of each rank's own part of a step. `stages`: the ranks of each."""
    found = {}
    for ranks in stages:
        ordered = sorted(seconds[rank] for rank in ranks)
        for rank in ranks if len(ranks) > 1 else ():
            peers = _median_without(seconds[rank], ordered)
            if peers > 0:
                found[rank] = Pace(seconds[rank], peers)
    return found


def _median_without(own: float, ordered: Sequence[float]) -> float:
    """The median of all but one: sorting anew for each of thousands of ranks takes seconds."""
    left_out, count = bisect_left(ordered, own), len(ordered) - 1
    middle = ((count - 1) // 2, count // 2)
    return sum(ordered[each + (each >= left_out)] for each in middle) / 2


def slow(found: Mapping[int, Pace], factor: float) -> set[int]:
    """The ranks that take `factor` times as long as their peers, or longer."""
    return {rank for rank, pace in found.items() if pace.factor >= factor}


class SlowRanks:
    """Watches the steps of one run; every rank has one, and calls its methods in the same order."""

    def __init__(self, config: RunConfig, mesh: Mesh, monitor: Monitor) -> None:
        self._every, self._factor, self._mesh, self._monitor = (
            config.slow_ranks_every,
            config.slow_ranks_factor,
            mesh,
            monitor,
        )
        self._stages = mesh.layout.groups("dp", "tp")
        if len(self._stages[0]) == 1:
            self._every = 0  # nobody does what another does
        if self._every:
            mesh.ledger.stalls = []
        self._uncounted = FIRST_STEPS
        self._own: list[float] = []
        """[seconds] Of this rank's part of each step of the window."""
        self._slow: set[int] = set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, from its data to its update."""
        ledger = self._mesh.ledger
        before, started = ledger.stood_still(), time.perf_counter()
        yield
        own = time.perf_counter() - started - (ledger.stood_still() - before)
        self._uncounted -= 1
        if self._every and self._uncounted < 0 and ledger.clock is None:  # a profile waits for the device all the time
            self._own.append(max(0.0, own))

    def largest(self, number: int, step: int) -> int:
        """The largest `number` of all ranks, as they agree on after each step; at the end of a window the ranks' own
        seconds travel with it, and who is slow, or well again, is named.
        """
        world = self._mesh.world
        if not self._every or len(self._own) < self._every:
            return int(all_reduce(torch.tensor(number), world, "max"))
        numbers = torch.zeros(1 + world.size, dtype=torch.float64)
        numbers[0], numbers[1 + world.rank] = number, statistics.median(self._own)
        numbers = all_reduce(numbers, world, "max")  # whoever is not its rank has put in zero
        self._own.clear()
        self._judge(paces(numbers[1:].tolist(), self._stages), step)
        return int(numbers[0])

    def _judge(self, found: Mapping[int, Pace], step: int) -> None:
        before = self._slow
        self._slow = slow(found, self._factor) | (before - found.keys())  # held against nobody now: as it was
        changed = sorted(before ^ self._slow)
        if not changed:
            return
        hosts = gather_texts(socket.gethostname(), self._mesh.world)
        for rank in changed:
            self._name(rank, hosts[rank], found[rank], step, is_slow=rank in self._slow)

    def _name(self, rank: int, host: str, pace: Pace, step: int, *, is_slow: bool) -> None:
        layout, monitor = self._mesh.layout, self._monitor
        monitor.event(
            "slow rank" if is_slow else "rank well again",
            step=step,
            rank=rank,
            host=host,
            place=layout.coordinates(rank),
            factor=round(pace.factor, 2),
            seconds=round(pace.seconds, 4),
            of_peers=round(pace.peers, 4),
        )
        state = "is slow" if is_slow else "is well again"
        monitor.say(
            f"{layout.written(rank)} rank {rank} on {host} {state}: by step {step} its own part of a step takes "
            f"{pace.seconds:.3g} s, {pace.factor:.2f} × the {pace.peers:.3g} s of those that do the same work."
        )
