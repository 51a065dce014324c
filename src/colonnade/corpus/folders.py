"""Files and folders of raw text: what of a folder is read, what is left aside and why, and what is named twice."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from colonnade.errors import DataError

MANIFEST, COMMAND = "manifest.json", "data clean"
"""What a cleaning run says of itself in its write.folder, and whose it is."""
RUN_FILE = Path("state", "run.json")
"""Where a write.folder says which run it holds, from its beginning on."""


class Entry(NamedTuple):
    """Something in a folder, or below."""

    path: Path
    aside: str
    """Why it is not read, in a word or two; empty for a file, or a link to one."""


def entries(folder: Path) -> list[Entry]:
    """All that is in a folder, by name. Links to folders are not followed: they may lead anywhere, and in circles."""
    return sorted(_entries(folder))


def inputs_in(folder: Path) -> list[Entry]:
    """All that is in a folder that is to be read, by name. Raises DataError where a cleaning run writes in it."""
    found = entries(folder)
    named = (entry.path for entry in found if not entry.aside)
    for path in (path for path in named if path.name in (MANIFEST, RUN_FILE.name)):
        run = path.parent if path.name == MANIFEST else path.parent.parent
        parts = cleaned_parts(run)
        if parts is not None or (path == run / RUN_FILE and _is_run(path)):
            raise DataError(
                f"{folder} {'is' if run == folder else f'has files of {run},'} the write.folder of a run of `colonnade "
                "data clean`: what it trains and tests on, what it dropped and its own state would be read together. "
                f"{_instead(run, parts)}"
            )
    return found


def _instead(run: Path, parts: Sequence[str] | None) -> str:
    if parts is None:
        return "The run has not finished: start it again, and name one of its parts then."
    named = ", ".join(str(run / part) for part in parts)
    return f"Name one of its parts: {named or 'it kept no document, and has none'}."


def cleaned_parts(folder: Path) -> list[str] | None:
    """The parts in the write.folder of a cleaning run that is done; None of another folder."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        return list(content["parts"]) if content["colonnade"] == COMMAND else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _is_run(file: Path) -> bool:
    """Whether a file is what a cleaning run says of itself from its beginning on, and nobody else's of that name."""
    try:
        return {"identity", "facts"} <= dict(json.loads(file.read_bytes())).keys()
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def began_with(folder: Path, paths: Sequence[str]) -> bool:
    """Whether a folder holds a cleaning run that reads just these inputs."""
    try:
        stored = json.loads((folder / RUN_FILE).read_bytes())
        return bool(stored["facts"]["recipe"]["read"]["paths"] == list(paths))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def told_aside(left_aside: Mapping[str, int]) -> Iterator[str]:
    """A line for people on how many files are left aside, by ending or by what they are; none where there are none."""
    if left_aside:
        endings = ", ".join(f"{ending} {count:,}" for ending, count in left_aside.items())
        yield f"files of other kinds, left aside by ending: {endings}"


def named_twice(paths: Sequence[str]) -> Iterator[str]:
    """Of inputs that are there, those that are named twice, by themselves or with a folder, links and dots followed."""
    places: dict[str, str] = {}  # paths by what they are with links followed
    for path in paths:
        real = os.path.realpath(path)
        if real in places:
            named = f"{path} twice" if places[real] == path else f"{places[real]} and {path}, which are the same"
            yield f"{named}: it would be read twice. Name it once."
        places.setdefault(real, path)
    for real, path in places.items():
        folders = [*Path(real).parents]
        if Path(path).is_file():  # a folder stands for links to files in it too
            beside = Path(os.path.realpath(Path(path).parent))
            folders += [beside, *beside.parents]
        if within := next((places[str(folder)] for folder in folders if str(folder) in places), None):
            yield f"{path} and {within}, which has it: it would be read twice. Name one of the two."


def _entries(folder: Path) -> Iterator[Entry]:
    try:
        found = list(os.scandir(folder))
    except PermissionError:
        yield Entry(folder, "folder that may not be read")
        return
    for entry in found:
        path = folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(path)
        else:
            yield Entry(path, _aside(path, is_link=entry.is_symlink()))


def _aside(path: Path, *, is_link: bool) -> str:
    try:
        mode = path.stat().st_mode
    except OSError:
        return "broken link"
    if stat.S_ISREG(mode):
        return ""
    if stat.S_ISDIR(mode):
        return "link to a folder"
    kinds = {stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    kind = kinds.get(stat.S_IFMT(mode), "special file")
    return f"link to a {kind}" if is_link else kind
