"""In what a run differs from the one that a folder holds, in words.

Runs are told from each other by what `plan` stores of them: the recipe, the input splits, and the files that the recipe
names with size and modification time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from colonnade.config.numbers import counted

INPUTS, NAMED_FILES, TOKENIZERS = "inputs", "named files", "tokenizers"
_SHOWN = 3  # files that are named


class _Stamp(NamedTuple):
    """By what a file is taken to be the same."""

    size: int
    """[bytes]"""
    modified: int
    """[ns] Since 1970."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What was changed between two runs, by what is stored of them; never empty."""
    found = [*_of_recipes(old["recipe"], new["recipe"])]
    before, after = parts_in_order(old), parts_in_order(new)
    if before != after and sorted(before) == sorted(after):
        found.append(f"the order of split.shares was {', '.join(before)} and is {', '.join(after)}")
    for name, stamps in ((INPUTS, _of_inputs), (NAMED_FILES, _of_named_files)):
        if old.get(name) != new.get(name):
            changed = _of_files(stamps(old.get(name, ())), stamps(new.get(name, ())))
            if changed:
                found.append(f"{name} have changed: {_first(changed)}")
            elif not found:
                found.append(f"{name} are shared out in another way, as another version does")
    if old.get(TOKENIZERS) != new.get(TOKENIZERS):
        found.append(f"{TOKENIZERS} have changed")
    return found or ["it was made by another version"]


def parts_in_order(stored: Mapping[str, Any]) -> list[str]:
    """The parts of a run, by what is stored of it: which one a document falls into goes by their order."""
    return [*(stored["recipe"].get("split") or {}).get("shares", ())]


def _of_recipes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for section in {**old, **new}:
        before, after = old.get(section) or {}, new.get(section) or {}
        for key in {**before, **after}:
            if before.get(key) != after.get(key):
                yield f"{section}.{key} was {before.get(key)!r} and is {after.get(key)!r}"


def _of_inputs(splits: Sequence[Mapping[str, Any]]) -> dict[str, _Stamp]:
    return {split["path"]: _Stamp(split["size"], split["modified"]) for split in splits}


def _of_named_files(named: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, _Stamp]:
    """By the name in the recipe, with the file's own where the recipe names a folder or a prefix. Files of one name,
    in folders below, are numbered: no more is stored of them.
    """
    found: dict[str, _Stamp] = {}
    for path, files in dict(named).items():
        times = Counter[str]()
        for name, size, modified in files:
            times[name] += 1
            known = path if Path(path).name == name else f"{name} of {path}"
            found[known if times[name] == 1 else f"{known}, number {times[name]}"] = _Stamp(size, modified)
    return found


def _of_files(old: Mapping[str, _Stamp], new: Mapping[str, _Stamp]) -> list[str]:
    """Each file that is not as it was, and what about it."""
    return [
        f"{path} ({_what(old.get(path), new.get(path))})" for path in {**old, **new} if old.get(path) != new.get(path)
    ]


def _what(old: _Stamp | None, new: _Stamp | None) -> str:
    if old is None or new is None:
        return "new" if old is None else "no longer read"
    if old.size != new.size:
        return f"its size was {counted(old.size, 'byte')} and is {new.size:,}"
    return f"its modification time was {_time(old.modified)} and is {_time(new.modified)}"


def _time(nanoseconds: int) -> str:
    """A time to the nanosecond, as `touch -d` takes it."""
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"


def _first(found: Sequence[str]) -> str:
    more = len(found) - _SHOWN
    return ", ".join(found[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
