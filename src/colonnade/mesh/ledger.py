"""The ledger: every byte that crosses ranks is written down, with who asked for it.

One entry a collective: operation, axis, shape, dtype, bytes, call site, when, how long. Totals are kept for ever,
entries for the last few thousand. The audit (two all-reduces forward and two backward a layer), the explanation of a
hang and the simulator all read this.
"""

import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


@dataclass
class Entry:
    """One collective as one rank saw it."""

    operation: str
    """all_reduce, all_gather, reduce_scatter, broadcast or barrier."""
    axis: str
    """The mesh axis it ran over."""
    shape: tuple[int, ...]
    """Shape of the tensor this rank put in."""
    dtype: str
    bytes: int
    """Size of the tensor this rank put in."""
    site: str
    """file:line of the code that asked; for an operator's backward, where its forward was called."""
    backward: bool
    """True in the backward half of a conjugate operator."""
    started: float
    """Seconds since the epoch."""
    seconds: float | None = None
    """How long until the result could be used; None while under way. On CUDA: until it was enqueued."""


@dataclass
class Ledger:
    """What this rank sent, newest last."""

    entries: deque[Entry] = field(default_factory=lambda: deque(maxlen=4096))
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def open(self, operation: str, axis: str, tensor: torch.Tensor, site: "Site") -> Entry:
        """Write an entry down before the operation starts, so that a hang shows it."""
        entry = Entry(
            operation,
            axis,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.numel() * tensor.element_size(),
            site.where,
            site.backward,
            time.time(),
        )
        self.entries.append(entry)
        self.counts[operation, axis] += 1
        self.bytes[operation, axis] += entry.bytes
        return entry

    @staticmethod
    def close(entry: Entry) -> None:
        entry.seconds = time.time() - entry.started

    def clear(self) -> None:
        self.entries.clear()
        self.counts.clear()
        self.bytes.clear()


@dataclass(frozen=True)
class Site:
    """Who asked for a collective."""

    where: str
    backward: bool = False


def call_site() -> Site:
    """The nearest caller outside of this folder and of torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    if frame is None:
        return Site("?")
    return Site("/".join(Path(frame.f_code.co_filename).parts[-2:]) + f":{frame.f_lineno}")
