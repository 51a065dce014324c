"""What a step let through and what it dropped, with samples: one small file for each step and task.

    in ──▶ step ──▶ out        documents, bytes of UTF-8, tokens (where they are counted)
             └────▶ dropped    by reason, each one listed in dropped/STEP/TASK.jsonl.gz with its file and line

Files are written under a temporary name and renamed; their bytes depend on the documents alone.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from colonnade.atomic import written

EXCERPT = 600


@dataclass
class Amount:
    """Documents, and what they measure."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    """Of those documents whose tokens were counted."""
    uncounted: int = 0
    """Documents whose tokens were not counted (yet)."""

    def add(self, num_bytes: int, tokens: int | None = None) -> None:
        """One more document."""
        self.uncounted += tokens is None
        self.documents, self.bytes, self.tokens = (
            self.documents + 1,
            self.bytes + num_bytes,
            self.tokens + (tokens or 0),
        )

    def merge(self, other: Amount) -> None:
        """All of another's documents."""
        self.documents += other.documents
        self.bytes += other.bytes
        self.tokens += other.tokens
        self.uncounted += other.uncounted

    def as_json(self) -> dict[str, int]:
        """`uncounted` only where there are some."""
        counts = {"documents": self.documents, "bytes": self.bytes, "tokens": self.tokens}
        return {**counts, "uncounted": self.uncounted} if self.uncounted else counts


@dataclass
class Tally:
    """The counts of one step, in one task or in all of them."""

    entered: Amount = field(default_factory=Amount)
    left: Amount = field(default_factory=Amount)
    dropped: dict[str, Amount] = field(default_factory=dict)
    changed: Counter[str] = field(default_factory=Counter)
    """Documents that were changed, by what was done."""
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    histograms: dict[str, Counter[str]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever else a step has to say: of single tasks, by task."""

    def count(self, histogram: str, value: str, by: int = 1) -> None:
        """One more in a histogram."""
        self.histograms.setdefault(histogram, Counter())[value] += by

    def drop(self, reason: str, num_bytes: int = 0, tokens: int | None = None) -> None:
        """One document less."""
        self.dropped.setdefault(reason, Amount()).add(num_bytes, tokens)

    def merge(self, other: Tally, *, samples: int) -> None:
        """Adds another task's counts; of samples the first so many a reason are kept."""
        self.entered.merge(other.entered)
        self.left.merge(other.left)
        for reason, amount in other.dropped.items():
            self.dropped.setdefault(reason, Amount()).merge(amount)
        self.changed.update(other.changed)
        for name, counts in other.histograms.items():
            self.histograms.setdefault(name, Counter()).update(counts)
        for reason, found in other.samples.items():
            kept = self.samples.setdefault(reason, [])
            kept += found[: max(0, samples - len(kept))]
        self.metadata.update(other.metadata)

    def as_json(self) -> dict[str, Any]:
        return {
            "in": self.entered.as_json(),
            "out": self.left.as_json(),
            "dropped": {reason: amount.as_json() for reason, amount in sorted(self.dropped.items())},
            "changed": dict(sorted(self.changed.items())),
            "histograms": {name: dict(sorted(counts.items())) for name, counts in sorted(self.histograms.items())},
            "samples": dict(sorted(self.samples.items())),
            "facts": dict(sorted(self.metadata.items())),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(
            entered=Amount(**content["in"]),
            left=Amount(**content["out"]),
            dropped={reason: Amount(**amount) for reason, amount in content["dropped"].items()},
            changed=Counter(content["changed"]),
            samples=content["samples"],
            histograms={name: Counter(counts) for name, counts in content["histograms"].items()},
            metadata=content["facts"],
        )


class Account:
    """A step's tally in one task, and its list of what was dropped; both on disk when the step is done."""

    def __init__(self, folder: Path, step: str, task: int, *, samples: int) -> None:
        self.tally = Tally()
        self._tally_path = tally_path(folder, step, task)
        self._dropped_path = folder / "dropped" / step / f"{task:05d}.jsonl.gz"
        self._samples, self._list = samples, list[str]()

    def drop(
        self,
        reason: str,
        *,
        place: dict[str, Any],
        text: str = "",
        num_bytes: int = 0,
        tokens: int | None = None,
        detail: str = "",
    ) -> None:
        """Counts a dropped document, lists it, and keeps the beginning of the first ones of each reason."""
        self.tally.drop(reason, num_bytes, tokens)
        entry = {**place, "reason": reason, **({"detail": detail} if detail else {})}
        self._list.append(json.dumps(entry, ensure_ascii=True))
        samples = self.tally.samples.setdefault(reason, [])
        if len(samples) < self._samples:
            samples.append({**entry, "text": text[:EXCERPT].encode("utf-8", "replace").decode()})

    def close(self) -> None:
        """Writes both files."""
        if self._list:
            with written(self._dropped_path) as stream, gzip.GzipFile("", "wb", 6, stream, mtime=0) as packed:
                packed.write(("\n".join(self._list) + "\n").encode())
        with written(self._tally_path) as stream:
            stream.write(json.dumps(self.tally.as_json()).encode())


def tally_path(folder: Path, step: str, task: int) -> Path:
    """Where a task's counts of a step are kept."""
    return folder / "state" / "tallies" / step / f"{task:05d}.json"


def read_tallies(folder: Path, step: str) -> Iterator[tuple[int, Tally]]:
    """(task, its counts) of a step, in order."""
    paths = (folder / "state" / "tallies" / step).glob("*.json")
    for path in sorted(paths, key=lambda path: int(path.stem)):  # names of more than 99,999 tasks are in another order
        yield int(path.stem), Tally.from_json(json.loads(path.read_bytes()))


def merged(tallies: Iterable[Tally], *, samples: int) -> Tally:
    """The counts of all tasks."""
    total = Tally()
    for tally in tallies:
        total.merge(tally, samples=samples)
    return total
