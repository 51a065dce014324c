"""From what ranks did, span by span, to where the step goes and a trace. Pure.

A rank stands still in a collective until the last of its ranks has come: that much is waiting, and the rest is moving.
The clocks of one machine's ranks are one; those of several are as equal as their system times.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colonnade.mesh.clock import Span, own_seconds
from colonnade.train.step import DATA, GRADIENTS, OPTIMIZER

MOST_RANKS = 64
"""In profile.json and trace.json: the first ones. Every rank's own file is in profile/."""
KINDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
REST = "rest"
Meetings = dict[tuple[str, tuple[int, ...], int], float]
"""By axis, its ranks and number: when the last of them came to a collective, in seconds since the epoch."""


def merged(ranks: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """profile.json and trace.json of what all ranks wrote."""
    spans = [[Span(**span) for span in rank["spans"]] for rank in ranks]
    last = _meetings(ranks, spans)
    told = [_rank(rank, each, last) for rank, each in zip(ranks, spans, strict=True)]
    steps = ranks[0]["steps"]
    profile = {
        "steps": [steps[0], steps[-1]],
        "seconds_per_step": max(each["seconds"] for each in told),
        "ranks": told,
        "gantt": _gantt(ranks, spans),
    }
    return profile, {"traceEvents": list(_events(ranks, spans)), "displayTimeUnit": "ms"}


def _meetings(ranks: Sequence[Mapping[str, Any]], spans: Sequence[Sequence[Span]]) -> Meetings:
    first: dict[tuple[int, str, tuple[int, ...], int], float] = {}
    for rank, each in zip(ranks, spans, strict=True):
        for span in each:
            key = _meeting(rank, span)
            if key is not None:
                first.setdefault((rank["rank"], *key), span.start + rank["epoch"])
    last: Meetings = {}
    for (_, axis, group, number), start in first.items():
        last[axis, group, number] = max(last.get((axis, group, number), start), start)
    return last


def _meeting(rank: Mapping[str, Any], span: Span) -> tuple[str, tuple[int, ...], int] | None:
    group = rank["groups"].get(span.axis)
    return (span.axis, tuple(group), span.number) if span.kind == "wait" and span.number and group else None


def _rank(rank: Mapping[str, Any], spans: list[Span], last: Meetings) -> dict[str, Any]:
    """A rank's mean step, in parts that add up to it."""
    parts: dict[str, float] = dict.fromkeys(("forward", "backward"), 0.0)
    units: dict[str, dict[str, float]] = {}
    for span, own in zip(spans, own_seconds(spans), strict=True):
        if span.kind == "wait":
            waits, moves = _waits_and_moves(rank, span, own, last)
            _add(parts, f"wait for {span.axis}", waits)
            _add(parts, f"{span.axis} moves", moves)
        elif span.kind == "unit":
            kind = KINDS[_action_of(spans, span).name[0]]
            _add(parts, kind, own)
            _add(units.setdefault(span.name, {}), kind, own)
        else:
            _add(parts, span.name if span.kind == "part" else REST, own)
    count = len(rank["steps"])
    place = " ".join(f"{axis}{at}" for axis, at in rank["coordinates"].items())
    return {
        "rank": rank["rank"],
        "name": f"rank {rank['rank']} [{place}]",
        "seconds": sum(span.seconds for span in spans if span.kind == "step") / count,
        "parts": {name: parts[name] / count for name in sorted(parts, key=_order) if parts[name]},
        "units": {unit: {kind: each / count for kind, each in kinds.items()} for unit, kinds in units.items()},
        "peak_memory_bytes": max((size for _, size in rank["memory"]), default=None),
    }


def _order(name: str) -> tuple[bool, int, str]:
    """Compute first, what crosses ranks behind it, the rest last."""
    known = [*KINDS.values(), DATA, GRADIENTS, OPTIMIZER]
    return name == REST, known.index(name) if name in known else len(known), name


def _add(sums: dict[str, float], name: str, seconds: float) -> None:
    sums[name] = sums.get(name, 0.0) + seconds


def _waits_and_moves(rank: Mapping[str, Any], span: Span, own: float, last: Meetings) -> tuple[float, float]:
    key = _meeting(rank, span)
    if key is None:  # a transfer: what stands still for it waits for the other stage
        return own, 0.0
    waits = min(own, max(0.0, last[key] - (span.start + rank["epoch"])))
    return waits, own - waits


def _action_of(spans: Sequence[Span], span: Span) -> Span:
    while span.kind != "action":
        assert span.parent >= 0, "units run within actions"
        span = spans[span.parent]
    return span


def _gantt(ranks: Sequence[Mapping[str, Any]], spans: Sequence[list[Span]]) -> dict[str, Any]:
    """The last profiled step: an action from the first of its units to the last, on a rank of each stage."""
    last = [max(at for at, span in enumerate(each) if span.kind == "step") for each in spans]
    begins = min(each[at].start + rank["epoch"] for rank, each, at in zip(ranks, spans, last, strict=True))
    rows, ends = [], begins
    for rank, each, at in zip(ranks, spans, last, strict=True):
        shift = rank["epoch"] - begins
        ends = max(ends, each[at].end + rank["epoch"])
        if rank["coordinates"]["tp"] == rank["coordinates"]["dp"] == 0:
            stage = rank["coordinates"]["pp"]
            rows.append((stage, {"name": f"stage {stage}", "actions": list(_actions(each, at, shift))}))
    return {
        "step": ranks[0]["steps"][-1],
        "seconds": ends - begins,
        "rows": [row for _, row in sorted(rows, key=lambda row: row[0])],
    }


def _actions(spans: list[Span], step: int, shift: float) -> Iterator[dict[str, Any]]:
    inside: dict[int, list[Span]] = {}
    for span in spans[step:]:
        if span.kind == "unit":
            inside.setdefault(span.parent, []).append(span)
    for at, span in enumerate(spans[step:], step):
        if span.kind == "action" and (units := inside.get(at)):
            number, _, chunk = span.name[1:].partition(".")
            numbers = {"microbatch": int(number), "chunk": int(chunk or 0)}
            yield {"kind": span.name[0], **numbers, "start": units[0].start + shift, "end": units[-1].end + shift}
        elif span.kind == "part" and span.name == OPTIMIZER:
            yield {"kind": OPTIMIZER, "start": span.start + shift, "end": span.end + shift}


def _events(ranks: Sequence[Mapping[str, Any]], spans: Sequence[list[Span]]) -> Iterator[dict[str, Any]]:
    """The trace: a process a rank, a slice a span, a counter of its memory. Times in microseconds."""
    begins = min(each[0].start + rank["epoch"] for rank, each in zip(ranks, spans, strict=True))
    for rank, each in zip(ranks, spans, strict=True):
        shift, pid = rank["epoch"] - begins, rank["rank"]
        place = " ".join(f"{axis}{at}" for axis, at in rank["coordinates"].items())
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"rank {pid} [{place}]"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
        for span in each:
            name = f"step {span.name}" if span.kind == "step" else span.name
            at, length = 1e6 * (span.start + shift), 1e6 * span.seconds
            yield {"name": name, "cat": span.kind, "ph": "X", "ts": at, "dur": length, "pid": pid, "tid": 0}
        for at, size in rank["memory"]:
            yield {"name": "memory", "ph": "C", "ts": 1e6 * (at + shift), "pid": pid, "args": {"bytes": size}}


def table(profile: Mapping[str, Any]) -> str:
    """Where the mean step of the first rank and of all goes, in lines."""
    ranks = profile["ranks"]
    names = sorted({name for rank in ranks for name in rank["parts"]}, key=_order)
    lines = [f"{'of a step':24}{'rank 0':>12}{'':>8}{'least':>12}{'most':>12}"]
    for name in names:
        every = [rank["parts"].get(name, 0.0) for rank in ranks]
        share = every[0] / ranks[0]["seconds"]
        lines.append(f"{name:24}{every[0]:>10.4f} s{share:>8.1%}{min(every):>10.4f} s{max(every):>10.4f} s")
    every = [rank["seconds"] for rank in ranks]
    lines.append(f"{'together':24}{every[0]:>10.4f} s{1:>8.1%}{min(every):>10.4f} s{max(every):>10.4f} s")
    return "\n".join(lines)
