"""What a run tells while it goes on: progress lines, metrics.jsonl, thermometers.jsonl, events.jsonl, trackers.

Rank 0 writes; every other rank has a `Monitor` that does nothing. metrics.jsonl has one object a step,
thermometers.jsonl one a measured step; a step that fp16 skipped has no gradient norm, and one in which no label counts
no loss. A resumed run first cuts off what lies after its checkpoint, and of a step that is written twice keeps what was
written last, so that a file is what an uninterrupted run would have written (but for times).
"""

import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from colonnade.atomic import PARTIAL, write_whole
from colonnade.errors import ConfigError, hidden, without_credentials
from colonnade.outputs import json_of
from colonnade.pace import time_of
from colonnade.train.lines import Lines, append, each_line, object_in, objects_in, step_in, unwritable
from colonnade.train.tracking import Feed, Tracker

METRICS, EVENTS, UNDONE = "metrics.jsonl", "events.jsonl", "undone.jsonl"
LOST = "numbers lost"
"""The event of a run that goes on without the numbers of steps that it has done."""
BLOCK = 65_536
"""[bytes] What is read of the end of a file of lines first."""
THERMOMETERS, HEARTBEAT = "thermometers.jsonl", "heartbeat.json"
Metrics = Mapping[str, float | int]


class Monitor:
    """Writes one run's numbers. `active` is true on rank 0."""

    def __init__(
        self,
        folder: Path,
        *,
        active: bool,
        steps: int,
        log_every: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
        patient: bool = False,
        trackers: Sequence[Tracker] = (),
        tracking_patience: float = 10.0,
    ) -> None:
        """`patient`: a full disk is waited out (`lines.py`). `trackers`: where numbers go besides the folder;
        `tracking_patience` [seconds]: the end of the run waits so long for them.
        """
        self._lines = Lines(patient=patient)
        self._active, self._steps, self._log_every = active, steps, log_every
        self._tokens_per_step, self._flops_per_token, self._peak = tokens_per_step, flops_per_token, peak_flops
        self._metrics, self._events = folder / METRICS, folder / EVENTS
        self._thermometers, self._beaten = folder / THERMOMETERS, -math.inf
        self._recent: deque[float] = deque(maxlen=50)
        """Seconds of the last steps, for the rate and the time left."""
        self._feeds, self._patience = [Feed(each, self.say) for each in trackers], tracking_patience
        self._step = 0

    def resume(self, step: int) -> None:
        """Begin to write after `step`: forget what was written of later steps, and lines that were cut off.

        Nothing is written before this.
        """
        if not self._active:
            return
        with self._lines.still():
            for file in (self._metrics, self._thermometers):
                _cut(file, step)
            _rewrite(self._events, lambda lines: [line for line in lines if object_in(line) is not None])
        self._step = step
        for feed in self._feeds:
            feed.begin(step + 1)

    def tell_lost(self) -> None:
        """Behind `resume`, once: what follows from a metrics.jsonl that lacks steps before the one from which the run
        goes on, its first or its last.
        """
        if not self._active:
            return
        first, last = first_step(self._metrics), last_step(self._metrics)
        begins = first > 1 and first > self._first_told()
        ends = last < self._step
        if not (begins or ends):
            return
        self.event(LOST, step=self._step, first=first or self._step + 1, last=last)
        told = list[str]()
        if begins:
            told.append(f"begins with step {first:,}")
        if ends:
            told.append(f"ends with step {last:,}" if last else "has no step")
        self.say(
            f"{self._metrics} {' and '.join(told)}, and the run goes on from step {self._step:,}: the steps that it "
            "lacks are missing in reports, train.patience counts without them, and of the best checkpoint only what "
            "events.jsonl tells is known. If you have the file elsewhere, stop the run, put it back, and run the same "
            "command again."
        )

    def _first_told(self) -> int:
        """The last of the steps that were told to be the first of metrics.jsonl; 1 where none was."""
        events = (each.get("first") for each in objects_in(self._events) if each.get("event") == LOST)
        return max((each for each in events if isinstance(each, int)), default=1)

    def follow(self, *, steps: int, log_every: int, patient: bool) -> None:
        """Another length of the run, and of the time between progress lines, and another patience with a full disk."""
        self._steps, self._log_every, self._lines.patient = steps, log_every, patient

    def go_back(self, step: int) -> None:
        """Go on writing after `step`. What was written of later steps moves to undone.jsonl."""
        if self._active:
            with self._lines.still():
                set_aside(self._metrics.parent, step)
            self.close()
            self.resume(step)

    def step(self, metrics: Metrics, seconds: float, *, tokens: int | None = None) -> None:
        """Record one step; `metrics` has its number under "step". `tokens`: of this step, where steps differ.

        Prints every `log_every` steps, and the first and last.
        """
        if not self._active:
            return
        self._recent.append(seconds)
        self._tokens_per_step = self._tokens_per_step if tokens is None else tokens
        rate = self._tokens_per_step / seconds
        line = {**metrics, "tokens_per_second": round(rate, 1), "seconds": round(seconds, 4)}
        if self._peak is not None:
            line["mfu"] = round(rate * self._flops_per_token / self._peak, 4)
        self.say(self._lines.write(self._metrics, line))
        self._step = int(metrics["step"])
        for feed in self._feeds:
            feed.numbers(self._step, line)
        if metrics["step"] % self._log_every == 0 or metrics["step"] in (1, self._steps):
            self.say(self._progress(line))

    def beat(self, step: int, seconds: float) -> None:
        """Write heartbeat.json anew, where the last one is so old. 0: never. What cannot be written is left: whoever
        watches sees that it is old.
        """
        now = time.monotonic()
        if not self._active or not seconds or now - self._beaten < seconds:
            return
        self._beaten = now
        told = {"time": round(time.time(), 3), "step": step, "host": socket.gethostname(), "process": os.getpid()}
        file = self._metrics.with_name(HEARTBEAT)
        with suppress(OSError):
            written = file.with_suffix(".partial")
            written.write_text(json.dumps(told) + "\n")
            written.replace(file)

    def thermometers(self, reading: Mapping[str, Any], summary: Metrics) -> None:
        """Record what a measured step shows: a line of thermometers.jsonl, and its summary for trackers."""
        if not self._active:
            return
        self.say(self._lines.write(self._thermometers, reading))
        for feed in self._feeds:
            feed.numbers(int(reading["step"]), {f"thermometers/{name}": value for name, value in summary.items()})

    def event(self, kind: str, **details: Any) -> None:
        """Record what happened (a start, a save, an interruption) in events.jsonl."""
        if not self._active:
            return
        event = _event(kind, details)
        self.say(self._lines.write(self._events, event))
        for feed in self._feeds:
            feed.event(self._step, kind, json_of(event))

    def check(self) -> None:
        """CheckpointError while lines wait for a disk that is full: no copy of a step is to outlive its numbers."""
        if self._active:
            self._lines.check()

    def sync(self) -> None:
        """See metrics.jsonl and thermometers.jsonl to the disk: a checkpoint of a step must not outlive the numbers of
        that step.
        """
        self.check()
        for path in (self._metrics, self._thermometers):
            if self._active and path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def say(self, text: str) -> None:
        """Print a line, on rank 0 only."""
        if self._active and text:
            print(without_credentials(text), flush=True)

    def close(self) -> None:
        for feed in self._feeds:
            feed.close(self._patience)

    def _progress(self, line: Mapping[str, Any]) -> str:
        pace = sum(self._recent) / len(self._recent)
        width = len(str(self._steps))
        parts = [
            f"step {line['step']:>{width}}/{self._steps}",
            f"loss {line['loss']:.4f}" if "loss" in line else "no label counts",
            f"lr {line['learning_rate']:.2e}",
            _update(line),
            f"{self._tokens_per_step / pace:,.0f} tokens/s",
        ]
        if "mfu" in line:
            parts.append(f"MFU {line['mfu']:.1%}")
        parts.append(f"{time_of((self._steps - line['step']) * pace)} left")
        return "  ".join(parts)


def _update(line: Mapping[str, Any]) -> str:
    """What a step changed the weights by; one that changed none has no gradient norm."""
    if "grad_norm" in line:
        return f"grad {line['grad_norm']:.2f}"
    return f"overflow, no update (loss scale {line['loss_scale']:.2g})"


def write_event(run: Path, kind: str, **details: Any) -> None:
    """Record in events.jsonl what happened while no rank ran. Nothing where the folder is not there yet, or refuses."""
    with suppress(ConfigError, OSError):  # what is told of a full disk must not end what would survive it
        if run.is_dir():
            append(run / EVENTS, _event(kind, details))


def first_step(metrics: Path) -> int:
    """The first step that a run's metrics.jsonl tells of; 0 for none."""
    return next(filter(None, map(_step_of, each_line(metrics))), 0)


def last_step(metrics: Path) -> int:
    """The last step that a run's metrics.jsonl tells of; 0 for none."""
    lines = _tail(metrics, BLOCK)[1] if metrics.exists() else []
    return max(map(_step_of, lines[-3:]), default=0)


def _event(kind: str, details: Mapping[str, Any]) -> dict[str, Any]:
    return {"time": round(time.time(), 3), "event": kind, **hidden(dict(details))}


def set_aside(run: Path, step: int) -> None:
    """Move the lines of later steps of a run's metrics.jsonl to undone.jsonl."""
    metrics = run / METRICS
    if metrics.exists():
        size, end = metrics.stat().st_size, _end_of_steps(metrics, step) or 0
        for line in _tail(metrics, size - end)[1]:
            if _step_of(line) > step:
                append(run / UNDONE, object_in(line) or {})
    _cut(metrics, step)


def _tail(path: Path, size: int) -> tuple[int, list[bytes]]:
    """The whole lines among the last so many bytes of a file, and where they begin. The last one is "", or torn."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - size - 1)
        file.seek(start)
        lines = file.read().split(b"\n")
    return (start + len(lines[0]) + 1, lines[1:]) if start else (0, lines)


def _end_of_steps(path: Path, last: int) -> int | None:
    """Where the lines of steps 1 to `last` end: steps rise, and so no more is read than what is behind them, and
    something before. None where they do not rise there.
    """
    start, size = -1, BLOCK
    while start:
        start, lines = _tail(path, size)
        if any(map(_step_of, lines[-1:])):
            return None  # a line that lacks its end alone
        steps = [_step_of(line) for line in lines[:-1]]
        count = max((at for at, step in enumerate(steps, 1) if 1 <= step <= last), default=0)
        if count > 1 or not start:
            rises = all(before < step for before, step in pairwise([0, *steps[:count]]))
            return start + sum(len(line) + 1 for line in lines[:count]) if rises else None
        size *= 4
    return None


def _cut(path: Path, last: int) -> None:
    """Keep the lines of steps 1 to `last`."""
    _rewrite(path, lambda lines: _of_steps(lines, last), partial(_end_of_steps, last=last))


def _rewrite(
    path: Path, choose: Callable[[list[bytes]], list[bytes]], end: Callable[[Path], int | None] = lambda path: None
) -> None:
    """Keep some lines of a file that nobody writes meanwhile; what a killed process has left of that goes. Where they
    are the first, the file is cut behind them, for which a full disk has room. `end`: where they end, if that is known
    without reading all of it.
    """
    try:
        for left in path.parent.glob(f"{path.name}.*{PARTIAL}"):
            left.unlink(missing_ok=True)
        known = end(path) if path.exists() else None
        if known is not None:
            if known < path.stat().st_size:
                os.truncate(path, known)
            return
        before = path.read_bytes() if path.exists() else b""
        kept = b"".join(line + b"\n" for line in choose(before.split(b"\n")))
        if not before.startswith(kept):
            write_whole(path, kept)
        elif kept != before:
            os.truncate(path, len(kept))
    except OSError as error:
        raise unwritable(path, error) from error


def _of_steps(lines: list[bytes], last: int) -> list[bytes]:
    """The lines of steps 1 to `last`, in order, each step once: a line that was written later takes precedence."""
    by_step = {_step_of(line): line for line in lines}
    return [by_step[step] for step in sorted(by_step) if 1 <= step <= last]


def _step_of(line: bytes) -> int:
    """The step that a line of metrics.jsonl tells of; 0 for a broken line."""
    return step_in(object_in(line))
