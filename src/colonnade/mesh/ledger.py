"""The ledger: every byte that crosses ranks is written down, with who asked for it.

One entry a collective or transfer: operation, axis, shape, dtype, bytes, call site, layer, when, how long. Totals are
kept for ever, entries for the last few thousand. The audit (two all-reduces forward and two backward a layer), the
explanation of a hang and the simulator all read this.
"""

import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from colonnade.mesh.clock import Clock

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_PART = "LEDGER_PART"  # a constant by which a file of a layer names the part of a unit that it is
_DEPTH = 24  # frames above the call site in which such a file is looked for


@dataclass
class Entry:
    """One collective, or one end of a transfer, as one rank saw it."""

    operation: str
    """all_reduce, all_gather, reduce_scatter, broadcast, send or receive."""
    axis: str
    """The mesh axis it ran over."""
    shape: tuple[int, ...]
    """Shape of the tensor this rank put in, or receives."""
    dtype: str
    bytes: int
    """Size of the tensor this rank put in, or receives."""
    site: str
    """file:line of the code that asked; for an operator's backward, where its forward was called."""
    backward: bool
    """True in the backward half of a conjugate operator."""
    started: float
    """[seconds] Of `time.monotonic`."""
    unit: str = ""
    """The unit of the model that was at work, "blocks.7"; "" where none was."""
    part: str = ""
    """The part of the unit, "mlp"; "" where it is the unit itself, or no layer."""
    peer: int | None = None
    """send, receive: the other rank's number on the axis."""
    number: int = 0
    """Which collective of its axis this is, from 1; for a send or receive, which one to or from that peer."""
    seconds: float | None = None
    """How long until the result could be used; None while under way. On CUDA: until it was enqueued."""

    @property
    def layer(self) -> str:
        """blocks.7.mlp, as far as it is known."""
        return ".".join(name for name in (self.unit, self.part) if name)


@dataclass
class Flight:
    """An operation on a CUDA device. It keeps events alive, never what torch calls the work: that owns its tensors."""

    entry: Entry
    ready: Any
    """The event after which the device may begin with it."""
    done: Any = None
    """The event after which the device is done with it; None until the program has waited for it."""
    work: weakref.ref[Any] | None = None
    """Until then it can be asked."""

    @property
    def is_over(self) -> bool:
        """Whether the device is done with it. One that has failed is over too: the program's own wait tells of that."""
        if self.done is not None:
            return bool(self.done.query())
        work = None if self.work is None else self.work()
        return work is not None and bool(work.is_completed())


@dataclass
class Ledger:
    """What this rank sent, newest last."""

    entries: deque[Entry] = field(default_factory=lambda: deque(maxlen=4096))
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    unit: str = ""
    """The unit of the model that is at work ("blocks.7"): whoever runs units sets it, and each entry copies it."""
    numbers: Counter[str] = field(default_factory=Counter)
    """Entries so far by axis, and for transfers by axis, direction and peer: equal numbers meet. Never cleared."""
    step: int | None = None
    """The step under way, None before the first."""
    step_numbers: dict[str, int] = field(default_factory=dict)
    """`numbers` at the start of the step."""
    sent_by_step: deque[tuple[int, Counter[str]]] = field(default_factory=lambda: deque(maxlen=64))
    """[bytes] Of what was put in by the last steps, by axis."""
    sent_before: Counter[str] = field(default_factory=Counter)
    """The same of all before the step that is under way."""
    is_resting: bool = False
    """Whether the step under way has done its work: what is sent until the next is no step's."""
    waiting: tuple[Entry, float] | None = None
    """The entry that the program stands still for, and since when (time.monotonic)."""
    flying: deque[Flight] = field(default_factory=lambda: deque(maxlen=1024))
    """On CUDA, where the program does not wait itself: what the device may not have done yet, oldest first."""
    waited: float = 0.0
    """[seconds] That the program has stood still so far, and the device where it was timed (`stood_still`)."""
    stalls: list[tuple[Any, Any]] | None = None
    """On CUDA: events between which the device stood still for other ranks, not yet in `waited`; None: not timed."""
    clock: Clock | None = None
    """While steps are profiled: where what the program stands still for is written down."""
    on_failure: Callable[[Exception], None] = field(default=lambda error: None)
    """Called when an operation fails, before the error is raised."""

    def open(self, operation: str, axis: str, tensor: torch.Tensor, site: "Site", peer: int | None = None) -> Entry:
        """Write an entry down before the operation starts, so that a hang shows it."""
        line = axis if peer is None else f"{axis} {operation} {peer}"
        self.numbers[line] += 1
        entry = Entry(
            operation,
            axis,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.numel() * tensor.element_size(),
            site.where,
            site.backward,
            time.monotonic(),
            site.unit if site.backward else self.unit,
            site.part,
            peer,
            self.numbers[line],
        )
        self.entries.append(entry)
        self.counts[operation, axis] += 1
        self.bytes[operation, axis] += entry.bytes
        return entry

    def begin_step(self, step: int) -> None:
        """Tell which step is under way, for who explains a hang."""
        self._end_step()
        self.is_resting = False
        self.step, self.step_numbers = step, dict(self.numbers)

    def rest(self) -> None:
        """Tell that a step has done its work. Behind it there may be what thermometers send, an evaluation, a save, and
        what ranks agree on.
        """
        self._end_step()
        self.is_resting = True

    def least_of_steps(self, of: Container[int] | None = None) -> dict[str, int]:
        """[bytes] By axis, of that step (`of` these, where given) which sent least."""
        self._end_step()
        steps = [sent for step, sent in self.sent_by_step if sent and (of is None or step in of)] or [Counter[str]()]
        return {axis: min(each[axis] for each in steps) for axis in dict.fromkeys(a for each in steps for a in each)}

    def _end_step(self) -> None:
        sent = Counter[str]()
        for (operation, axis), size in self.bytes.items():
            sent[axis] += size if operation != "receive" else 0
        if self.step and not self.is_resting:
            self.sent_by_step.append((self.step, sent - self.sent_before))
        self.sent_before = sent

    def wait(self, entry: Entry, call: Callable[[], Any]) -> Any:
        """The result of `call`, which may stand still until the other ranks come to `entry` too."""
        began = time.monotonic()
        self.waiting = entry, began
        clock = self.clock
        if clock is not None:
            meets = 0 if entry.peer is not None else entry.number
            clock.begin("wait", f"{entry.operation} {entry.axis}", axis=entry.axis, number=meets)
        try:
            return call()
        except Exception as error:
            self.on_failure(error)
            raise
        finally:
            self.waiting = None
            self.waited += time.monotonic() - began
            if clock is not None:
                clock.end()

    def stood_still(self) -> float:
        """[seconds] That this rank has waited for others since it began, as far as the device has come."""
        if self.stalls:
            pairs, self.stalls = self.stalls, []
            for began, ended in pairs:
                if ended.query():
                    self.waited += began.elapsed_time(ended) / 1e3
                else:
                    self.stalls.append((began, ended))
        return self.waited

    def part(self, name: str) -> AbstractContextManager[None]:
        """A part of the step, by its name in a profile."""
        return nullcontext() if self.clock is None else self.clock.within("part", name)

    @staticmethod
    def close(entry: Entry) -> None:
        entry.seconds = time.monotonic() - entry.started

    def clear(self) -> None:
        """Forget entries and totals. What numbers entries goes on: the other ranks' do."""
        self.entries.clear()
        self.counts.clear()
        self.bytes.clear()
        self.sent_before = Counter()


@dataclass(frozen=True)
class Site:
    """Who asked for a collective."""

    where: str
    part: str = ""
    """The part of a unit on the way, "mlp"; "" where none is."""
    backward: bool = False
    unit: str = ""
    """With `backward`: the unit whose forward this is the backward of."""

    def in_backward(self, unit: str) -> "Site":
        """The site of the backward of what is called here in `unit`."""
        return Site(self.where, self.part, backward=True, unit=unit)


def call_site() -> Site:
    """The nearest caller outside of this folder and of torch, and the part of the model that it works for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    if frame is None:
        return Site("?")
    return Site(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}", _part(frame))


def _part(frame: FrameType | None) -> str:
    """What the innermost file on the stack above `frame` that names itself a part calls itself."""
    for _ in range(_DEPTH):
        if frame is None:
            return ""
        if _PART in frame.f_globals:
            return str(frame.f_globals[_PART])
        frame = frame.f_back
    return ""


@lru_cache(maxsize=256)
def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])
