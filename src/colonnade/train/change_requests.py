"""changes.jsonl in a run's folder: what somebody asks the run to change; changes_decided.json: what it has decided.

    {"change": {"optim.learning_rate": 3e-4}, "at": 12000, "by": "Ada", "reason": "loss is flat"}

Anybody may write the first, a line a request; `colonnade change` does it whole. The run alone writes the second: of
each line the step at which it holds, or why it was refused. So a line is decided once, and a run that goes on from
before that step, or is started again, changes there as it did.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from colonnade.atomic import write_whole
from colonnade.checkpoint.names import newest_step
from colonnade.config.load import load, value_of
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError, ConfigError, hidden, of_the_disk, raise_passing, without_credentials
from colonnade.lock import is_held
from colonnade.train import rollback
from colonnade.train.best import evaluations_since_best, none_better
from colonnade.train.change import (
    BLEND,
    Change,
    Expected,
    ahead,
    as_it_began,
    asked_values,
    by_step,
    conflicts,
    was,
)
from colonnade.train.lines import append_text
from colonnade.train.monitor import METRICS, last_step
from colonnade.train.rollback import Rollback
from colonnade.train.run_folder import CHANGES, DECIDED, checkpoints

MOST_BYTES = 1 << 24
FIELDS = ("change", "at", "by", "reason", "time")
_HALF = "[\ud800-\udfff]"


class Line(NamedTuple):
    """A line of changes.jsonl."""

    known_as: str
    """What it is known by: its content, and which of several equal ones it is."""
    text: str
    is_whole: bool
    """Whether it has its end: else somebody may still be writing it."""


class Refusal(BaseModel):
    """A line that changes nothing."""

    line: str
    text: str
    reason: str


class Decided(BaseModel):
    """What a run has decided of the lines that it has seen."""

    model_config = ConfigDict(frozen=True)

    changes: tuple[Change, ...] = ()
    """In the order in which they were asked for."""
    refused: tuple[Refusal, ...] = ()

    @property
    def known(self) -> frozenset[str]:
        """The lines that were decided."""
        return frozenset([*(each.line for each in self.changes), *(each.line for each in self.refused)])

    def with_line(self, line: Line, began: Config, step: int, returns: Sequence[Rollback]) -> "Decided":
        """With what a line comes to, at a run that has done `step` steps, with these rollbacks."""
        try:
            change = decide(line, began, self, step, returns)
        except ColonnadeError as error:
            refusal = Refusal(line=line.known_as, text=without_credentials(line.text), reason=str(error))
            return Decided(changes=self.changes, refused=(*self.refused, refusal))
        return Decided(changes=(*self.changes, change), refused=self.refused)

    def refuse(self, change: Change, reason: str) -> "Decided":
        """With a change that was to come and cannot be."""
        rest = tuple(each for each in self.changes if each.line != change.line)
        return Decided(
            changes=rest, refused=(*self.refused, Refusal(line=change.line, text=str(change), reason=reason))
        )


def read_decided(run: Path) -> Decided:
    """What the run in a folder has decided so far. ConfigError where that cannot be read."""
    try:
        return Decided.model_validate_json((run / DECIDED).read_bytes())
    except FileNotFoundError:
        return Decided()
    except (OSError, ValidationError) as error:
        raise of_the_disk(
            f"{run / DECIDED} cannot be read ({type(error).__name__}): it says which changes the run has made at which "
            "steps. Put it back; without it (remove it) all lines of changes.jsonl are new.",
            error,
        ) from None


def write_decided(run: Path, decided: Decided) -> None:
    write_whole(run / DECIDED, decided.model_dump_json(indent=1).encode() + b"\n")


def lines_of(run: Path) -> list[Line]:
    """Every line of changes.jsonl that is not empty; OSError where it cannot be read."""
    try:
        with (run / CHANGES).open("rb") as file:
            return lines_in(file.read(MOST_BYTES))
    except FileNotFoundError:
        return []


def lines_in(content: bytes) -> list[Line]:
    """Every line that is not empty of what a changes.jsonl has."""
    *whole, rest = content.decode(errors="replace").split("\n")
    found, counts = [], Counter[str]()
    for text, is_whole in (*((each.strip(), True) for each in whole), (rest.strip(), False)):
        if text:
            counts[text] += 1
            found.append(Line(f"{sha256(text.encode()).hexdigest()[:24]}.{counts[text]}", text, is_whole))
    return found


def _asked_and_done(run: Path) -> tuple[list[Line], int]:
    """What was asked of a run, and the last step that it has done: where nobody is at work, that of the checkpoint that
    it goes on from. ConfigError where its files cannot be read.
    """
    try:
        lines, done = lines_of(run), last_step(run / METRICS)
        return lines, done if is_held(run) else newest_step(checkpoints(run))
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}. Put the file of the run back, or remove what stands "
            "in its place."
        ) from None


def request_in(text: str) -> dict[str, Any]:
    """The request that a line is. ConfigError for one that is none."""
    try:
        content = json.loads(text, object_pairs_hook=_with_each_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is no JSON object ({type(error).__name__}), perhaps cut off.") from None
    if re.search(_HALF, json.dumps(content, ensure_ascii=False)):
        raise ConfigError("it has half of a character (\\ud800 to \\udfff), which no file can hold.")
    if not isinstance(content, dict) or not isinstance(content.get("change"), dict):
        raise ConfigError('it has no "change" with keys and values, as in {"change": {"optim.learning_rate": 1e-4}}.')
    unknown = [name for name in content if name not in FIELDS]
    if unknown:
        raise ConfigError(f"it has {', '.join(map(repr, unknown))}; a line has {', '.join(FIELDS)}.")
    at = content.get("at")
    if at is not None and (type(at) is not int or at < 0):
        raise ConfigError(f'its "at" is {json.dumps(at)}, where a step stands: a whole number of at least 0.')
    return content


def _with_each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose last value of a name would be taken without a word. ConfigError for a name that it has
    twice.
    """
    counts = Counter(name for name, _ in pairs)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(f"it has {', '.join(map(repr, twice))} more than once. Write each name once.")
    return dict(pairs)


def is_request(text: str) -> bool:
    """Whether a line is one by its form."""
    try:
        request_in(text)
    except ConfigError:
        return False
    return True


def decide(line: Line, began: Config, decided: Decided, step: int, returns: Sequence[Rollback]) -> Change:
    """The change that a line asks for, at a run that has done `step` steps, with these rollbacks. ConfigError where it
    is refused.
    """
    request = request_in(line.text)
    at = step if request.get("at") is None else request["at"]
    if at < step:
        raise ConfigError(f"step {at:,} is over: the run has done {step:,}. Name a later one, or none for the next.")
    values = asked_values(began, _by_key(request["change"].items()))
    by, reason = (without_credentials(str(request.get(name) or "")) for name in ("by", "reason"))
    change = Change(at=at, values=values, was=was(began, values), line=line.known_as, by=by, reason=reason)
    start = Expected(began, rollbacks=returns)
    refused = ahead(start, [*decided.changes, change]).refused
    anyway = {each.line for each, _ in ahead(start, decided.changes).refused} if refused else set()
    for each, why in refused:
        if each.line not in anyway:
            raise ConfigError(why)
    return change


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of SECTION.KEY=VALUE, by key; of data.blend also of single files, data.blend.FILE=VALUE. ConfigError
    for other forms, and for what is given twice.
    """
    found: list[tuple[str, Any]] = []
    for override in overrides:
        of_file = override.startswith(f"{BLEND}.")
        name, equals, text = override.rpartition("=") if of_file else override.partition("=")
        if not (equals and "." in name):
            raise ConfigError(f"{override!r} is not of the form SECTION.KEY=VALUE, like optim.learning_rate=1e-4.")
        found.append((name if of_file else name.strip(), value_of(text.strip(), name)))
    return _by_key(found)


def _by_key(given: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """With the numbers of single files, data.blend.FILE, in one data.blend. ConfigError for what is given twice."""
    values: dict[str, Any] = {}
    for name, value in given:
        of_file = name.startswith(f"{BLEND}.")
        key = name.removeprefix(f"{BLEND}.") if of_file else name
        there = values.setdefault(BLEND, {}) if of_file else values
        if not isinstance(there, dict) or key in there:
            raise ConfigError(f"{name} has two values. Give each key one.")
        there[key] = value
    return values


def ask(run: Path, request: dict[str, Any]) -> None:
    """Write a line of changes.jsonl, in one piece and on a line of its own. ConfigError, and nothing is written, for
    what the run would refuse. ConfigError too where the disk refuses it, which may be there all the same if others
    write meanwhile.
    """
    decided = read_decided(run)
    began, returns = began_with(run, decided), returns_of(run)
    lines, done = _asked_and_done(run)
    waiting = _with_waiting(lines, began, decided, done, returns)
    try:
        text = json.dumps(hidden(request), ensure_ascii=False)
    except TypeError as error:
        raise ConfigError(f"{run} is not changed: no key takes a date or time ({error}).") from None
    try:
        change = decide(Line("asked for now", text, is_whole=True), began, waiting, done, returns)
        start = Expected(began, rollbacks=returns)
        end = max(done, ahead(start, waiting.changes).config.train.steps)  # it may have been set below what was done
        if change.at > end or (change.at == end and "train.steps" not in change.values):
            raise ConfigError(
                f"the run ends with step {end:,} (train.steps): nothing comes behind step {change.at:,}. Raise "
                f"train.steps first{', or in the same change' * (change.at == end)}."
            )
        _check_not_ended_early(run, start, [*waiting.changes, change], done)
    except ConfigError as error:
        raise ConfigError(f"{run} is not changed: {error}") from None
    file = run / CHANGES
    try:
        append_text(file, text, sync=True)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}. Fix that, and ask again, unless others have asked at the "
            f"same moment and `colonnade change {run} --list` has it."
        ) from error


def _check_not_ended_early(run: Path, start: Expected, changes: Sequence[Change], step: int) -> None:
    """ConfigError where train.patience has ended the run with `step`, and no change behind it lets it go on."""
    patience = ahead(start, (each for each in changes if each.at <= step)).config.train.patience
    since = evaluations_since_best(run, until=step)
    if patience and since >= patience:
        raise ConfigError(
            f"it has ended with step {step:,}: {none_better(since, patience)}. Raise train.patience above "
            f"{since} first, or in the same change."
        )


def returns_of(run: Path) -> list[Rollback]:
    """The rollbacks of the steps that the run in a folder is made of."""
    return rollback.in_force(rollback.read(run))


def _with_waiting(
    lines: Sequence[Line], began: Config, decided: Decided, step: int, returns: Sequence[Rollback]
) -> Decided:
    """What the run, which has done `step` steps, will have decided of the lines that are there."""
    for line in lines:
        if line.known_as not in decided.known:
            decided = decided.with_line(line, began, step, returns)
    return decided


def listed(run: Path) -> list[str]:
    """A line for each request, in their order: what came of it."""
    decided = read_decided(run)
    began_with(run, decided)
    lines, done = _asked_and_done(run)
    changes = {each.line: each for each in decided.changes}
    refused = {each.line: each for each in decided.refused}
    found = []
    for line in lines:
        change = changes.get(line.known_as)
        if change is not None:
            when = "changed" if change.at < done else "changes"
            found.append(f"{when} behind step {change.at:,}: {change}{change.asked}")
        elif line.known_as in refused:
            found.append(f"refused: {without_credentials(line.text)}: {refused[line.known_as].reason}")
        else:
            found.append(f"not seen yet: {without_credentials(line.text)}")
    return found or [f"Nobody has asked {run} to change."]


def began_with(run: Path, decided: Decided) -> Config:
    """What the run in a folder began with, as its config.toml tells. ConfigError where there is no run."""
    if not ((run / "config.toml").is_file() and checkpoints(run).is_dir()):
        raise ConfigError(f"{run} is not the folder of a run: it has no config.toml and checkpoints/. Name one.")
    return as_it_began(load(run / "config.toml"), decided.changes)


def as_the_run_began(config: Config, record: Path | None = None) -> Config:
    """A configuration that a run is started with, without what was changed in mid-run: these changes come in their
    steps. ConfigError where it gives such a key a value that the run has never had. `record`: the folder that has what
    was decided, if not the run's.
    """
    changes = read_decided(record or Path(config.run.folder)).changes
    found = list(conflicts(config, changes))
    if found:
        raise ConfigError(
            f"{config.run.folder} has changed keys in mid-run, and the configuration has other values for them:\n"
            + "\n".join(f"  {each}" for each in found)
            + f"\nSet one of those, and change it where it is to hold: colonnade change {config.run.folder} KEY=VALUE."
        )
    return as_it_began(config, changes)


def decided_and_asked(began: Config, step: int, run: Path | None = None) -> list[Change]:
    """The changes of a run that has done `step` steps, in their order: those that it has decided, and what it will
    decide of the lines that it has not seen. ConfigError where that cannot be read, DiskError where not for a while;
    for lines that are forbidden the run waits. `run`: its folder, if not where the configuration says.
    """
    folder, lines = run or Path(began.run.folder), list[Line]()
    try:
        lines = lines_of(folder)
    except OSError as error:
        raise_passing(folder / CHANGES, error)
    return by_step(_with_waiting(lines, began, read_decided(folder), step, returns_of(folder)).changes)


def foreseen(began: Config, step: int, run: Path | None = None) -> list[Change]:
    """As `decided_and_asked`, as far as the files can be read."""
    with suppress(ConfigError):
        return decided_and_asked(began, step, run)
    with suppress(ConfigError):
        return by_step(read_decided(run or Path(began.run.folder)).changes)
    return []


def from_now_on(began: Config, step: int, run: Path | None = None) -> list[Config]:
    """What is in force in a run that has done `step` steps, and behind each change that is to come, as far as that can
    be told: a change that cannot be made is refused in its step. What the run began with, where nobody has changed it.
    """
    changes, returns = foreseen(began, step, run), list[Rollback]()
    with suppress(ConfigError):
        returns = returns_of(run or Path(began.run.folder))
    stages = ahead(Expected(began, rollbacks=returns), changes).stages
    return [each.config for each in stages[sum(each.step <= step for each in stages[1:]) :]]


def to_come(decided: Decided, done: Sequence[Change], step: int) -> list[Change]:
    """Changes that are not in force yet, in the order in which they will be."""
    known = {each.line for each in done}
    return by_step(each for each in decided.changes if each.line not in known and each.at >= step)
