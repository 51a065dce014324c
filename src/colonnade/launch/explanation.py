"""Who waits for whom: what every rank says of itself, put together into words. Pure, and without torch.

    Report            what one rank did last and whether it waits, as text that travels
    awaited           the ranks that a waiting rank waits for
    explain           the chain of those who wait for each other, down to the rank that does not wait: the cause

Operations over one axis are numbered alike on all its ranks, so whoever has not come to number n is awaited by whoever
waits in number n. Transfers are numbered by axis, direction and peer: the n-th send meets the n-th receive.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field

from colonnade.mesh.layout import ranks_in_words
from colonnade.mesh.process import ProcessId

_NAMED = 3  # awaited ranks named on a line
_LINES = 8  # ranks on the way to the cause, or groups of ranks of which something else is to be said
_WAIT = re.compile(r"rank \d+ \[.*?\] waits in (?P<what>.*?)(?P<seconds>\d+\.\d) s(?P<rest>[,)].*)")
_MILLISECONDS = re.compile(r"\d+\.\d ms")


@dataclass(frozen=True)
class Operation:
    """One entry of a rank's ledger, for others to read."""

    operation: str
    axis: str
    layer: str
    """blocks.7.mlp, or "" """
    backward: bool
    bytes: int
    site: str
    number: int
    """Equal on the ranks that meet in it."""
    peer: int | None = None
    """send, receive: the other rank."""
    seconds: float | None = None
    """None while it goes on."""

    def __str__(self) -> str:
        between = {"send": " to", "receive": " from"}.get(self.operation)
        whom = "" if between is None or self.peer is None else f"{between} rank {self.peer}"
        layer = f" for {self.layer}" if self.layer else ""
        return f"{self.operation} over {self.axis}{whom}{layer}{', backward' if self.backward else ''}"

    def line(self) -> str:
        """With sizes, time and the line of code that asked."""
        time = "under way" if self.seconds is None else f"{1000 * self.seconds:.1f} ms"
        return f"{self}: {self.bytes:,} bytes, {time}, {self.site}"


@dataclass(frozen=True)
class Report:
    """What a rank says of itself."""

    rank: int
    coordinates: str
    """[pp1 dp0 tp3]"""
    step: int | None
    """The step under way, None before the first."""
    waiting: Operation | None
    waiting_ranks: tuple[int, ...]
    """The ranks of the axis of `waiting`."""
    waited: float
    """Seconds."""
    error: str
    """What the transport said when the operation failed; "" if it has not."""
    numbers: dict[str, int]
    """Operations begun by axis, and for transfers by axis, direction and peer."""
    step_numbers: dict[str, int]
    """`numbers` at the start of the step."""
    recent: tuple[Operation, ...]
    """The last operations, newest last."""
    process: ProcessId
    beat: int = 0
    """Grows while the rank lives."""
    left: str = ""
    """Why it has left the run; "" while it is there."""
    explained: bool = False
    """It has said what it waits for, and has ended because of that."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} {self.coordinates}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Report":
        raw = json.loads(text)
        raw["process"] = ProcessId(**raw["process"])
        raw["recent"] = tuple(Operation(**each) for each in raw["recent"])
        raw["waiting"] = None if raw["waiting"] is None else Operation(**raw["waiting"])
        raw["waiting_ranks"] = tuple(raw["waiting_ranks"])
        return cls(**raw)


@dataclass(frozen=True)
class Picture:
    """All that is known of the ranks."""

    reports: Mapping[int, Report]
    gone: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose process has ended, and how."""
    silent: Collection[int] = ()
    """Ranks that should have said something lately, and have not."""
    limit: float | None = None
    """Seconds that a rank may wait."""
    unread: str = ""
    """Why reports could not be read; "" if they could."""

    def is_gone(self, rank: int) -> bool:
        report = self.reports.get(rank)
        return (rank in self.gone or (report is not None and report.left != "")) and not (report and report.explained)


def involved(report: Report) -> tuple[int, ...]:
    """The ranks whose reports tell whom this one waits for."""
    waiting = report.waiting
    if waiting is None:
        return ()
    others = report.waiting_ranks if waiting.peer is None else (waiting.peer,)
    return tuple(rank for rank in others if rank != report.rank)


def awaited(report: Report, picture: Picture) -> list[int]:
    """The ranks that have not come to where this one waits, and those that never will."""
    waiting = report.waiting
    if waiting is None:
        return []
    line = waiting.axis
    if waiting.peer is not None:
        opposite = {"send": "receive", "receive": "send"}[waiting.operation]
        line = f"{waiting.axis} {opposite} {report.waiting_ranks.index(report.rank)}"

    def has_come(rank: int) -> bool:
        if picture.is_gone(rank) or rank not in picture.reports:
            return False
        return picture.reports[rank].numbers.get(line, 0) >= waiting.number

    return [rank for rank in involved(report) if not has_come(rank)]


def explain(rank: int, picture: Picture) -> str:
    """What `rank` waits for, what those wait for in turn, and behind an empty line the last that it did itself."""
    lines, seen, ends = [], {rank}, False
    queue = [rank]
    for waiting in queue:
        others = awaited(picture.reports[waiting], picture)
        lines.append(_waits(picture.reports[waiting], others, picture))
        ends = ends or not others or any(not _waits_too(other, picture) for other in others)
        fresh = [other for other in others if other not in seen and _waits_too(other, picture)]
        seen.update(fresh)
        queue += fresh
    notes = [f"… and {len(lines) - _LINES} more ranks wait."] if len(lines) > _LINES else []
    if not ends:
        notes.append("They wait for each other: their programs disagree about what comes next.")
    if picture.unread:
        notes.append(f"The other ranks' reports cannot be read ({picture.unread}): this is what is known.")
    report = picture.reports[rank]
    if picture.limit is not None and report.waited > picture.limit:
        notes.append(f"The limit is train.timeout = {picture.limit:g} seconds.")
    last = [f"The last operations of {report.name}, newest last:", *(f"  {each.line()}" for each in report.recent)]
    return "\n".join([*lines[:_LINES], *notes, "", *last])


def together(explanations: Mapping[int, str]) -> str:
    """The explanations of several ranks as one: every rank's wait once, in its own words if it has any, and what each
    did last. Ranks of which the same is to be said share it; of much else what leads to the cause stays.
    """
    parts = {rank: text.partition("\n\n") for rank, text in explanations.items()}
    own = [waits.splitlines()[0] for waits, _, _ in parts.values()]
    by_rank = {_rank_of(line): line for line in own}
    others = [
        line for waits, _, _ in parts.values() for line in waits.splitlines()[1:] if _rank_of(line) not in by_rank
    ]
    by_rank |= {_rank_of(line): line for line in others if _rank_of(line) >= 0}
    notes = dict.fromkeys(line for line in others if _rank_of(line) < 0)
    near = {rank for rank, line in by_rank.items() if _names_the_cause(line)}

    waits, more = _alike({rank: by_rank[rank] for rank in sorted(by_rank)}, _without_own, near)
    lines = [_of_all(ranks, [by_rank[rank] for rank in ranks]) for ranks in waits]
    lines += [f"… and {more} more ranks wait."] * bool(more)
    lasts = {rank: last for rank, (_, _, last) in parts.items()}
    did, more = _alike(lasts, _without_times, near)
    told = [_and_the_same(lasts[ranks[0]], ranks[1:]) for ranks in did]
    told += [f"… and the last operations of {more} more ranks."] * bool(more)
    return "\n".join([*lines, *notes, *told])


def _alike(texts: Mapping[int, str], key: Callable[[str], str], near: AbstractSet[int]) -> tuple[list[list[int]], int]:
    """Ranks whose texts say the same; of more than `_LINES` such groups those with ranks that are near the cause come
    first, and how many ranks are in the rest.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(key(text), []).append(rank)
    by_weight = sorted(groups.values(), key=lambda ranks: near.isdisjoint(ranks))
    shown = by_weight[:_LINES]
    return [ranks for ranks in groups.values() if ranks in shown], sum(map(len, by_weight[_LINES:]))


def _without_own(line: str) -> str:
    """What a rank waits in and for whom, without its name and how long it has waited."""
    found = _WAIT.fullmatch(line)
    return line if found is None else found["what"] + found["rest"]


def _of_all(ranks: Sequence[int], lines: Sequence[str]) -> str:
    """ranks 0-2 wait in all_reduce over dp for blocks.7.mlp (step 41, 4.8-5.0 s); rank 3 [pp0 dp3 tp0] …"""
    found = _WAIT.fullmatch(lines[0])
    if found is None or len(ranks) == 1:
        return lines[0]
    times = sorted({each["seconds"] for line in lines if (each := _WAIT.fullmatch(line))}, key=float)
    return (
        f"{ranks_in_words(ranks)} wait in {found['what']}{'-'.join(times[:: max(1, len(times) - 1)])} s{found['rest']}"
    )


def _names_the_cause(line: str) -> bool:
    """Whether it is told to wait for a rank that does not wait itself."""
    return any(not whom.endswith(" waits itself") for whom in line.split("; ")[1:])


def _without_times(last: str) -> str:
    """What a rank did last, without its name and how long each took."""
    name, *operations = last.splitlines()
    return _MILLISECONDS.sub("", "\n".join(operations)) or name


def _and_the_same(last: str, others: Sequence[int]) -> str:
    return f"{last}\n  The same but for times: {ranks_in_words(others)}." if others else last


def _rank_of(line: str) -> int:
    """3 for what rank 3 waits in; -1 for a note."""
    words = line.split()
    return int(words[1]) if words[0] == "rank" else -1


def _waits_too(rank: int, picture: Picture) -> bool:
    report = picture.reports.get(rank)
    known = report is not None and report.waiting is not None
    return known and not picture.is_gone(rank) and rank not in picture.silent


def _waits(report: Report, others: list[int], picture: Picture) -> str:
    """rank 3 [pp1 dp0 tp1] waits in all_reduce over tp for blocks.7.mlp (step 41, 5 s); rank 2 [pp1 dp0 tp0] …"""
    if report.waiting is None:
        return _state(report.rank, picture)
    details = [] if report.step is None else [f"step {report.step}"]
    details.append(f"{report.waited:.1f} s")
    words = [_state(other, picture) for other in others[:_NAMED]]
    if len(others) > _NAMED:
        words.append(f"{len(others) - _NAMED} more have not come")
    if report.error and not any(other in picture.reports for other in others):
        details.append(report.error)
    if not others:
        words = _disagreement(report, picture) or ["all that take part have come, but it does not end"]
    return "; ".join([f"{report.name} waits in {report.waiting} ({', '.join(details)})", *words])


def _disagreement(report: Report, picture: Picture) -> list[str]:
    """What those who have come are in, if it is something else."""
    mine = report.waiting
    theirs = [picture.reports[rank] for rank in involved(report) if rank in picture.reports]
    return [
        f"{other.name} is in {other.waiting} of {other.waiting.bytes:,} bytes instead of {mine.bytes:,}: "
        "their programs disagree"
        for other in theirs
        if mine is not None and other.waiting is not None and mine.peer is None
        if (other.waiting.axis, other.waiting.number) == (mine.axis, mine.number)
        if (other.waiting.operation, other.waiting.bytes) != (mine.operation, mine.bytes)
    ][:_NAMED]


def _state(rank: int, picture: Picture) -> str:
    """One rank in a few words."""
    report = picture.reports.get(rank)
    if report is None:
        return f"rank {rank} {'has not come' if picture.unread else 'has never reported'}{_how(rank, picture)}"
    step = last_step(report, picture)
    where = "before its first step" if step is None else f"in step {step}"
    if picture.is_gone(rank):
        left = "before its first step" if step is None else f"step {step}"
        return f"{report.name} left {left}{_how(rank, picture)}"
    if report.waiting is not None and rank not in picture.silent:
        return f"{report.name} waits itself"
    after = f", after {report.recent[-1]}" if report.recent and step == report.step else ""
    if rank in picture.silent:
        return f"{report.name} stands still {where}{after} and says nothing (stopped, or its machine is lost)"
    return f"{report.name} is busy {where}{after}"


def _how(rank: int, picture: Picture) -> str:
    """Why a rank is not there, as far as that is known."""
    report = picture.reports.get(rank)
    reason = picture.gone.get(rank, "" if report is None else report.left)
    return f" ({reason})" if reason else ""


def last_step(report: Report, picture: Picture) -> int | None:
    """The step that a rank was in last. Its report may be from before; who met it in a later step knows better."""
    known = [report.step] if report.step is not None else []
    for other in picture.reports.values():
        waiting, step = other.waiting, other.step
        if waiting is None or waiting.peer is not None or step is None or report.rank not in other.waiting_ranks:
            continue
        met = waiting.number - 1 > other.step_numbers.get(waiting.axis, 0)
        known.append(step if met else step - 1)
    return max(known, default=None)
