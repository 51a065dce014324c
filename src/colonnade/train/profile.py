"""`--profile STEPS`: a few steps with a clock running, and what came of it in the run's folder.

    profile/rank_00003.json    what a rank did, span by span          written by that rank
    profile.json               where the step goes; the pipeline      written by rank 0 from all of them
    trace.json                 the same for Perfetto or chrome://tracing, all ranks on one time axis

Actions, units and waits are told by wrappers that are there while steps are profiled and at no other time. On CUDA each
span waits for the device, so that its time is its own: nothing overlaps then, and the step takes longer than others.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from colonnade.atomic import write_whole
from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.clock import Clock
from colonnade.mesh.mesh import Mesh
from colonnade.pipeline.carry import Carry
from colonnade.pipeline.chunk import Owner
from colonnade.pipeline.mailbox import Mailbox
from colonnade.pipeline.runner import Runner
from colonnade.pipeline.schedule import Action
from colonnade.train.monitor import Monitor
from colonnade.train.profile_report import MOST_RANKS, merged, table
from colonnade.train.state import TrainState

FOLDER = "profile"
MOST_ALLOCATIONS = 100_000  # that a memory snapshot of CUDA goes back


class TimedOwner:
    """An owner that tells a clock when a unit is at work."""

    def __init__(self, owner: Owner, clock: Clock) -> None:
        self._owner, self._clock, self._opened = owner, clock, False

    def expect(self, uses: Sequence[str]) -> None:
        self._owner.expect(uses)

    def acquire(self, unit: str, *, gradients: bool) -> None:
        self._owner.acquire(unit, gradients=gradients)
        self._clock.begin("unit", unit)

    def release(self, unit: str) -> None:
        self._clock.end()
        self._owner.release(unit)

    def open(self, unit: str) -> None:
        self._owner.open(unit)
        self._clock.begin("unit", unit)
        self._opened = True

    def gradients_ready(self, unit: str, *, last: bool) -> None:
        if self._opened:
            self._clock.end()
        self._opened = False
        self._owner.gradients_ready(unit, last=last)


class TimedRunner(Runner):
    """A runner that tells a clock which action is being done."""

    clock: Clock
    memory: Callable[[], None]

    @classmethod
    def of(cls, runner: Runner, clock: Clock, memory: Callable[[], None]) -> "TimedRunner":
        timed = cls(**{field.name: getattr(runner, field.name) for field in fields(runner)})
        object.__setattr__(timed, "clock", clock)
        object.__setattr__(timed, "memory", memory)
        return timed

    def do(self, action: Action, inputs: Any, mailbox: Mailbox, *, last: bool) -> Carry | None:
        chunk = f".{action.chunk}" if len(self.chunks) > 1 else ""
        with self.clock.within("action", f"{action.kind}{action.microbatch}{chunk}"):
            made = super().do(action, inputs, mailbox, last=last)
        self.memory()
        return made


class Profile:
    """The steps to be profiled, of one rank. `steps` empty: none, and nothing is done."""

    def __init__(
        self, steps: range, done: int, config: Config, mesh: Mesh, device: torch.device, monitor: Monitor
    ) -> None:
        """`done`: the step of the run as it begins. Steps before it are not made again."""
        if steps and steps[0] <= done:
            monitor.say(
                f"--profile {steps[0]}:{steps[-1]}: the run is at step {done:,}; what is before is not profiled."
            )
            steps = range(min(done, steps[-1]) + 1, steps[-1] + 1)
        self._steps, self._folder, self._mesh, self._monitor = steps, Path(config.run.folder), mesh, monitor
        self._device = device
        self._clock = Clock(torch.cuda.synchronize if device.type == "cuda" else lambda: None)
        self._memory: list[tuple[float, int]] = []
        self._done: list[int] = []

    @contextmanager
    def step(self, state: TrainState) -> Iterator[None]:
        """Times what is inside, where the step that follows is one of those to be profiled. Every rank enters this."""
        number = state.step + 1
        if number not in self._steps:
            yield
            return
        self._begin()
        runner, owners = state.runner, [chunk.owner for chunk in state.runner.chunks]
        ledger, spans = self._mesh.ledger, len(self._clock.spans)
        ledger.clock, state.runner = self._clock, TimedRunner.of(runner, self._clock, self._note_memory)
        for chunk in runner.chunks:
            chunk.owner = TimedOwner(chunk.owner, self._clock)
        try:
            with self._clock.within("step", str(number)):
                yield
            self._done.append(number)
        except BaseException:
            del self._clock.spans[spans:]  # a step that failed is no profile
            raise
        finally:
            ledger.clock, state.runner = None, runner
            for chunk, owner in zip(runner.chunks, owners, strict=True):
                chunk.owner = owner

    def finish(self, step: int, *, ends: bool = False) -> None:
        """Write everything behind the last step to be profiled, or where the run `ends` before it. Every rank calls
        this behind each step.
        """
        if not self._done or (step < self._steps[-1] and not ends):
            return
        rank, folder = self._mesh.rank, self._folder / FOLDER
        write_whole(folder / f"rank_{rank:05}.json", json.dumps(self._told()).encode())
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"memory_{rank:05}.pickle"))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        gather_texts("", self._mesh.world)  # all have written
        if rank == 0:
            self._merge(folder)
        self._done, self._steps = [], range(0)

    def _merge(self, folder: Path) -> None:
        names = [folder / f"rank_{rank:05}.json" for rank in range(min(MOST_RANKS, self._mesh.world.size))]
        profile, trace = merged([json.loads(name.read_bytes()) for name in names if name.exists()])
        write_whole(self._folder / "profile.json", json.dumps(profile).encode())
        write_whole(self._folder / "trace.json", json.dumps(trace).encode())
        self._monitor.event("profiled", step=self._done[-1], steps=self._done)
        self._monitor.say(table(profile))
        self._monitor.say(
            f"Profiled {counted(len(self._done), 'step')}: {self._folder / 'trace.json'} for https://ui.perfetto.dev, "
            f"{self._folder / 'profile.json'} for `colonnade report {self._folder}`."
        )

    def _told(self) -> dict[str, Any]:
        mesh = self._mesh
        return {
            "rank": mesh.rank,
            "coordinates": {"pp": mesh.pp.rank, "dp": mesh.dp.rank, "tp": mesh.tp.rank},
            "groups": {name: list(axis.ranks) for name, axis in mesh.axes.items()},
            "epoch": time.time() - time.perf_counter(),
            "steps": self._done,
            "spans": [asdict(span) for span in self._clock.spans],
            "memory": self._memory,
        }

    def _begin(self) -> None:
        if self._device.type == "cuda" and not self._done:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)

    def _note_memory(self) -> None:
        size = memory_in_use(self._device)
        if size is not None:
            self._memory.append((time.perf_counter(), size))


def memory_in_use(device: torch.device) -> int | None:
    """[bytes] Of a CUDA device what torch has given out; else the memory of this process that is in RAM, where the
    system tells.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:  # not Linux
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
